//! `toolstorm supervise`: what stands between the harness and a server that it started; not for people.

use crate::{error::Result, target::supervise::supervise};

/// Arguments of `supervise`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Program and arguments
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Runs `supervise`.
pub(super) fn run(args: &Args) -> Result<u8> {
    supervise(&args.command)
}
