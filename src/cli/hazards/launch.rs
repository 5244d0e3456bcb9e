//! `hazards --launch`: a foreign command, its captured graphs exported behind its back.

use super::Args;
use crate::{
    error::{Error, Result},
    hazard::Capture,
    report::terminal::Console,
};

/// Runs the command and reads what it captured.
pub(super) fn captures(args: &Args, console: Console) -> Result<Vec<Capture>> {
    console.note(format!("{:?}", args.command));
    Err(Error::usage("not yet"))
}
