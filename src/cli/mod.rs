//! The command line: one file per command; arguments to a validated plan, nothing else.

/// Runs the command named by the process's arguments and returns its exit code (see [`crate::exit`]).
pub fn main() -> u8 {
    crate::exit::USAGE
}
