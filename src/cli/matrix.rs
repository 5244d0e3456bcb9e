//! `toolstorm matrix`: every arm of an A/B matrix, interleaved, one report.

use super::{execute, options::Options};
use crate::{error::Result, report::terminal::Console, run::resolve, scenario::file};

/// Arguments of `matrix`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Matrix file, or the name of a shipped one
    matrix: String,
    #[command(flatten)]
    pub(super) options: Options,
}

/// Runs `matrix`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let (matrix, scenario) = file::matrix(&args.matrix)?;
    let plan = resolve(matrix, scenario, &args.options.overrides())?;
    execute::execute(plan, &args.options, console)
}
