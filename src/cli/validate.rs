//! `toolstorm validate`: recorded responses, classified offline.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `validate`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Recorded responses or transcripts
    #[arg(required = true)]
    files: Vec<std::path::PathBuf>,
}

/// Runs `validate`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("validate"))
}
