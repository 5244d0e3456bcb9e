//! The built-in decode engine: submit a prompt, get a token stream.

pub mod cache;
pub mod chat;
pub mod lockstep;
pub mod parser;
pub mod scheduler;
pub mod tokenizer;
