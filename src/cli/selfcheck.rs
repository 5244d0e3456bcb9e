//! `toolstorm selfcheck`: recall and false positives of the harness itself.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `selfcheck`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Seed of the faults
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs `selfcheck`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("selfcheck"))
}
