//! `toolstorm merge`: the partitions of one run, joined.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `merge`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Result folders
    #[arg(required = true)]
    results: Vec<std::path::PathBuf>,
}

/// Runs `merge`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("merge"))
}
