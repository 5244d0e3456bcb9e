//! `toolstorm matrix`: every arm of an A/B matrix, interleaved, one report.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `matrix`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Matrix file, or the name of a shipped one
    matrix: String,
    #[command(flatten)]
    options: super::options::Options,
}

/// Runs `matrix`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("matrix"))
}
