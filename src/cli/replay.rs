//! `toolstorm replay`: a failing session again.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `replay`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Evidence folder, session id, or schedule token
    id: String,
}

/// Runs `replay`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("replay"))
}
