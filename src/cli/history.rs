//! `toolstorm history`: trend over past results.

use std::path::PathBuf;

use serde_json::json;

use crate::{
    error::Result,
    exit,
    report::{
        folder,
        history::{self, Trend},
        html,
        table::bounds,
        terminal::Console,
    },
};

/// Arguments of `history`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Folder that holds result folders
    #[arg(default_value = "results")]
    dir: PathBuf,
    /// Only the runs of this matrix or scenario
    #[arg(long)]
    name: Option<String>,
    /// Write a page with the trends
    #[arg(long, value_name = "FILE")]
    export_html: Option<PathBuf>,
}

/// Runs `history`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let mut past = history::read(&args.dir, console)?;
    past.retain(|result| args.name.as_ref().is_none_or(|name| result.summary.name == *name));
    let trends = history::trends(&past);
    if let Some(path) = &args.export_html {
        folder::put(path, &html::history(&trends)?)?;
    }
    console.emit(&json!({"schema": "toolstorm-history/1", "results": past.len(), "trends": trends}));
    for trend in &trends {
        show(trend, console);
    }
    Ok(exit::PASS)
}

fn show(trend: &Trend, console: Console) {
    console.say(format!("{} / {}", trend.name, trend.arm));
    for point in &trend.points {
        let bounds = point.interval.map_or_else(String::new, |interval| format!("  {}", bounds(interval)));
        let (corrupted, judged) = (point.sessions_corrupted, point.sessions_judged);
        console.say(format!("  {}  {corrupted:>4} of {judged:<5}{bounds}", point.created_at));
    }
    match trend.p {
        Some(p) if trend.drifts => console.say(format!("  the last result differs from those before it, p = {p:.2e}")),
        Some(p) => console.say(format!("  no drift, p = {p:.2}")),
        None => {}
    }
}
