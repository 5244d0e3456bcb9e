//! `toolstorm bisect`: the smallest set of toggles that turns good into bad.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `bisect`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Matrix file with a `[bisect]` table
    matrix: String,
    #[command(flatten)]
    options: super::options::Options,
}

/// Runs `bisect`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("bisect"))
}
