//! `toolstorm hazards`: happens-before analysis of captured graphs.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `hazards`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Capture file; our own graphs where none is given
    capture: Option<std::path::PathBuf>,
}

/// Runs `hazards`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("hazards"))
}
