//! `toolstorm history`: trend over past results.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `history`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Folder that holds result folders
    dir: std::path::PathBuf,
}

/// Runs `history`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("history"))
}
