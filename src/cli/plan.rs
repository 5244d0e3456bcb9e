//! `toolstorm plan`: what a run will take; sends nothing.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `plan`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Matrix or scenario file
    matrix: String,
    #[command(flatten)]
    options: super::options::Options,
}

/// Runs `plan`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("plan"))
}
