//! `toolstorm gate`: verdict on a finished run.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `gate`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Result folder or its summary.json
    result: std::path::PathBuf,
}

/// Runs `gate`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("gate"))
}
