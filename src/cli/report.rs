//! `toolstorm report`: a result, rendered again.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `report`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Result folder
    result: std::path::PathBuf,
}

/// Runs `report`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("report"))
}
