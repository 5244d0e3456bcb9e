//! toolstorm drives hundreds of multi-round tool-call sessions at an OpenAI-compatible endpoint, judges every call and
//! says why calls break.
//!
//! The map, from the outside in. A module imports only what stands below it; `tests/tidy.rs` holds the direction.
//!
//! - [`cli`]: one file per command; arguments to a validated plan, nothing else
//! - [`run`], [`gate`], [`compare`], [`plan`], [`bisect`], [`report`], [`selfcheck`]: what the commands do
//! - [`drive`], [`target`], [`validate`], [`scenario`], [`stats`]: sessions, servers, verdicts, files, numbers
//! - [`probe`], [`hazard`]: why; over captured graphs and the engine's own state
//! - [`engine`]: the built-in decode engine and its OpenAI-compatible server
//! - [`device`]: ops, allocator, streams, graphs; the virtual GPU and CUDA; knows no models
//! - [`sse`], [`seed`], [`clock`], [`env`](mod@env), [`exit`], [`error`]: import nothing of ours

pub mod bisect;
pub mod cli;
pub mod clock;
pub mod compare;
pub mod device;
pub mod drive;
pub mod engine;
pub mod env;
pub mod error;
pub mod exit;
pub mod gate;
pub mod hazard;
pub mod plan;
pub mod probe;
pub mod report;
pub mod run;
pub mod scenario;
pub mod seed;
pub mod selfcheck;
pub mod sse;
pub mod stats;
pub mod target;
pub mod validate;
