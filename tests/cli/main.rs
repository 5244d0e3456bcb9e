//! The binary, tested from outside: commands, exit codes, files, and what servers of every kind do to a run.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod context;
mod errors;
mod faults;
mod interruption;
mod lockstep;
mod pacing;
mod parity;
mod parts;
mod replay;
mod reports;
mod scripted;
mod verdicts;
