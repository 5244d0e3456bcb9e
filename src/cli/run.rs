//! `toolstorm run`: one configuration, one report.

use super::{execute, options::Options};
use crate::{error::Result, report::terminal::Console, run::resolve, scenario::file};

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Scenario file, or the name of a shipped one
    scenario: String,
    /// A variable of the built-in server's environment; may be given several times
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = pair, conflicts_with = "base_url", help_heading = "Target")]
    env: Vec<(String, String)>,
    #[command(flatten)]
    pub(super) options: Options,
}

/// Runs `run`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let scenario = file::scenario(&args.scenario)?;
    let matrix = file::around(&scenario, args.env.iter().cloned().collect())?;
    let plan = resolve(matrix, scenario, &args.options.overrides())?;
    execute::execute(plan, &args.options, console)
}

fn pair(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".to_owned()),
    }
}
