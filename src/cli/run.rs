//! `toolstorm run`: one configuration, one report.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Scenario file, or the name of a shipped one
    scenario: String,
    #[command(flatten)]
    options: super::options::Options,
}

/// Runs `run`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("run"))
}
