//! `toolstorm plan`: what a run will take. Sends nothing, unless a probe is asked for.

use std::path::PathBuf;

use comfy_table::{Table, presets};

use super::{execute, options::Options};
use crate::{
    error::{Error, Result},
    exit,
    gate::{self, percent},
    plan::{Estimate, POWER, Question, estimate},
    report::{load, summary::Summary, terminal::Console},
    run::{Plan, resolve},
    scenario::file,
};

/// Arguments of `plan`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Matrix file, or the name of a shipped one
    matrix: String,
    /// A past result of these arms, for the expected time; a short one will do
    #[arg(long, value_name = "RESULT", conflicts_with = "probe")]
    from: Option<PathBuf>,
    /// Run every arm for this many sessions first, for the expected time; without a number, for as many as run at once
    #[arg(long, value_name = "SESSIONS", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    #[arg(conflicts_with = "dry_run")]
    probe: Option<u64>,
    /// Share of sessions that a bug corrupts: what does it need? May be given several times
    #[arg(long, value_name = "SHARE")]
    bug_rate: Vec<f64>,
    /// Probability of seeing the bug
    #[arg(long, value_name = "SHARE", default_value_t = POWER)]
    power: f64,
    #[command(flatten)]
    pub(super) options: Options,
}

/// Runs `plan`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    args.options.refuse("plan", &[("--resume", args.options.resume.is_some())])?;
    let (matrix, scenario) = file::matrix(&args.matrix)?;
    let plan = resolve(matrix, scenario, &args.options.overrides())?;
    gate::check(&plan)?;
    if !(args.power > 0.0 && args.power < 1.0) {
        return Err(
            Error::usage(format!("--power {} is no probability", args.power)).hint("it lies between 0 and 1: 0.95")
        );
    }
    let jobs = execute::jobs(&plan, args.options.jobs)?;
    let question = |past| Question { past, jobs, rates: &args.bug_rate, power: args.power };
    let past = match (args.probe, &args.from) {
        (Some(sessions), _) => {
            // What cannot be answered is refused before a probe spends minutes.
            estimate(&plan, question(None))?;
            Some(probe(&plan, sessions, &args.options, console)?)
        }
        (None, from) => from.as_deref().map(load::summary).transpose()?,
    };
    let estimate = estimate(&plan, question(past.as_ref()))?;
    show(&estimate, console);
    console.emit(&estimate);
    Ok(exit::PASS)
}

/// A short run of every arm: one launch each, kept as a result like any other.
fn probe(plan: &Plan, sessions: u64, options: &Options, console: Console) -> Result<Summary> {
    let mut short = plan.clone();
    short.load.until = None;
    short.partition = None;
    for arm in &mut short.arms {
        let wanted = if sessions == 0 { u64::from(arm.concurrency) } else { sessions };
        arm.sessions = wanted.min(arm.sessions).max(1);
        arm.repetitions = 1;
        arm.hazards = false;
    }
    let (summary, finished) = execute::drive(short, options, console)?;
    if finished.interrupted {
        return Err(Error::incomplete("the probe was interrupted"));
    }
    if let Some(arm) = summary.arms.iter().find(|arm| arm.launches_failed > 0) {
        let place = summary.result_dir.clone().unwrap_or_default();
        return Err(Error::usage(format!("the probe's server of arm `{}` did not start", arm.name))
            .hint(format!("its log is in {place}")));
    }
    Ok(summary)
}

fn show(estimate: &Estimate, console: Console) {
    let Estimate { launches, sessions, requests, prompt_tokens, output_tokens, jobs, .. } = estimate;
    let time = estimate.wall_s.map_or("unknown: give --probe, or --from RESULT".to_owned(), duration);
    let beside = if *jobs > 1 { format!(" with {jobs} launches side by side") } else { String::new() };
    console.say(format!(
        "{}: {launches} launches, {sessions} sessions, {requests} requests, about {prompt_tokens} prompt and \
         {output_tokens} output tokens; expected time {time}{beside}",
        estimate.name,
    ));
    console.say(arms(estimate).to_string());
    if let Some(needed) = estimate.sessions_for_max_upper {
        console.say(format!("a clean arm passes max_upper {} from {needed} sessions on", percent(estimate.max_upper)));
    }
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
    let see = format!("to see it at {}", percent(estimate.power_level));
    let header = ["a bug in", &see, "time", "to exclude it", "two arms, each", "sequential", "this plan sees it"];
    table.set_header(header);
    for need in &estimate.power {
        table.add_row([
            percent(need.rate),
            need.sessions_to_see.to_string(),
            need.wall_s_to_see.map_or_else(String::new, duration),
            need.sessions_to_exclude.to_string(),
            need.sessions_to_compare.to_string(),
            format!("{:.0} or {:.0}", need.sequential[0], need.sequential[1]),
            format!("{:.1} %", need.seen_by_this_plan * 100.0),
        ]);
    }
    table
}
