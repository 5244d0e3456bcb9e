//! `toolstorm plan`: what a run will take; sends nothing.

use std::path::PathBuf;

use comfy_table::{Table, presets};

use super::options::Options;
use crate::{
    error::Result,
    exit,
    gate::percent,
    plan::{Estimate, estimate},
    report::{load, terminal::Console},
    run::resolve,
    scenario::file,
};

/// Arguments of `plan`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Matrix file, or the name of a shipped one
    matrix: String,
    /// A past result of these arms, for the expected time; a short one will do
    #[arg(long, value_name = "RESULT")]
    from: Option<PathBuf>,
    #[command(flatten)]
    options: Options,
}

/// Runs `plan`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let (matrix, scenario) = file::matrix(&args.matrix)?;
    let plan = resolve(matrix, scenario, &args.options.overrides())?;
    let past = args.from.as_deref().map(load::summary).transpose()?;
    let estimate = estimate(&plan, past.as_ref())?;
    show(&estimate, console);
    console.emit(&estimate);
    Ok(exit::PASS)
}

fn show(estimate: &Estimate, console: Console) {
    let Estimate { launches, sessions, requests, output_tokens, prompt_bytes, .. } = estimate;
    let time = estimate.wall_s.map_or("unknown: give --from RESULT".to_owned(), duration);
    console.say(format!(
        "{}: {launches} launches, {sessions} sessions, {requests} requests, {:.1} MB of prompts, about {output_tokens} \
         output tokens; expected time {time}",
        estimate.name,
        *prompt_bytes as f64 / 1e6
    ));
    console.say(arms(estimate).to_string());
    console.say(needs(estimate).to_string());
}

fn duration(seconds: f64) -> String {
    match seconds.round() as u64 {
        short @ 0..60 => format!("{short} s"),
        medium @ 60..3600 => format!("{} min {} s", medium / 60, medium % 60),
        long => format!("{} h {} min", long / 3600, long % 3600 / 60),
    }
}

fn arms(estimate: &Estimate) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["arm", "launches", "sessions", "concurrency", "requests", "bound if clean", "time"]);
    for arm in &estimate.arms {
        table.add_row([
            arm.name.clone(),
            arm.launches.to_string(),
            arm.sessions.to_string(),
            arm.concurrency.to_string(),
            arm.requests.to_string(),
            format!("{:.2} %", arm.bound_if_clean * 100.0),
            arm.wall_s.map_or_else(String::new, duration),
        ]);
    }
    table
}

fn needs(estimate: &Estimate) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    let header = ["a bug in", "to see it", "to exclude it", "two arms, each", "sequential", "this plan sees it"];
    table.set_header(header);
    for need in &estimate.power {
        table.add_row([
            percent(need.rate),
            need.sessions_to_see.to_string(),
            need.sessions_to_exclude.to_string(),
            need.sessions_to_compare.to_string(),
            format!("{:.0} or {:.0}", need.sequential[0], need.sequential[1]),
            format!("{:.1} %", need.seen_by_this_plan * 100.0),
        ]);
    }
    table
}
