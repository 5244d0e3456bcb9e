//! `toolstorm compare`: two results or arms against each other.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `compare`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Result folder, or `RESULT:ARM`
    first: String,
    /// Result folder, or `RESULT:ARM`
    second: String,
}

/// Runs `compare`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("compare"))
}
