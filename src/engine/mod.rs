//! The built-in decode engine: submit a prompt, get a token stream.
