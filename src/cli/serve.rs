//! `toolstorm serve`: the built-in engine as an OpenAI-compatible server.

use crate::{cli::unavailable, error::Result, report::terminal::Console};

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
}

/// Runs `serve`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    console.note(format!("{args:?}"));
    Err(unavailable("serve"))
}
