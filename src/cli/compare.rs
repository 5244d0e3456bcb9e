//! `toolstorm compare`: two results or arms against each other.

use std::path::{Path, PathBuf};

use comfy_table::{Table, presets};
use serde::Serialize;

use crate::{
    compare::{Comparison, Row, SCHEMA, Side, adjust, compare},
    error::{Error, Result},
    exit,
    gate::percent,
    report::{
        load,
        position::is_counted,
        summary::{ArmSummary, CallRecord, Summary},
        terminal::Console,
    },
    seed::Seed,
    stats::{Counts, Interval},
    validate::Verdict,
};

/// Arguments of `compare`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Result folder, or `RESULT:ARM`
    first: String,
    /// Result folder, or `RESULT:ARM`; without it every arm of the first result is compared with its first arm
    second: Option<String>,
    /// Confidence of the intervals
    #[arg(long, value_name = "SHARE")]
    confidence: Option<f64>,
    /// Compare although the sessions were not the same
    #[arg(long)]
    different_workload: bool,
}

/// What is printed under `--json`.
#[derive(Serialize)]
struct Output<'a> {
    schema: &'static str,
    confidence: f64,
    same_workload: bool,
    comparisons: &'a [Comparison],
}

/// A result and the arm of it that was asked for.
struct Source {
    path: PathBuf,
    arm: Option<String>,
    summary: Summary,
}

/// Runs `compare`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let confidence = super::options::confidence(args.confidence)?.unwrap_or(0.95);
    let first = Source::open(&args.first)?;
    let second = args.second.as_deref().map(Source::open).transpose()?;
    let same_workload = second.as_ref().is_none_or(|second| same_workload(&first, second));
    if !same_workload && !args.different_workload {
        return Err(Error::usage(format!(
            "{} and {} did not send the same sessions",
            first.name(),
            name(second.as_ref())
        ))
        .hint("run both with one scenario, size and seed, or give --different-workload"));
    }
    let pairs = pairs(&first, second.as_ref())?;
    let seed = Seed(first.summary.seed).fork("compare");
    let mut comparisons: Vec<Comparison> = pairs.iter().map(|(a, b)| compare(a, b, confidence, seed)).collect();
    adjust(&mut comparisons);
    if !same_workload {
        console.warn("the two results did not send the same sessions: a difference may come from the workload");
    }
    for comparison in &comparisons {
        show(comparison, confidence, comparisons.len() > 1, console);
    }
    console.emit(&Output { schema: SCHEMA, confidence, same_workload, comparisons: &comparisons });
    Ok(exit::PASS)
}

impl Source {
    fn open(text: &str) -> Result<Self> {
        // Both paths and names of arms may have colons.
        let there = |(at, _): &(usize, &str)| Path::new(&text[..*at]).exists();
        let (path, arm) = match text.match_indices(':').find(there) {
            Some((at, _)) if !Path::new(text).exists() => (&text[..at], Some(text[at + 1..].to_owned())),
            _ => (text, None),
        };
        let source = Self { path: path.into(), arm, summary: load::summary(Path::new(path))? };
        source.arms()?;
        Ok(source)
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// The arm that was asked for, else all.
    fn arms(&self) -> Result<Vec<&ArmSummary>> {
        let Some(name) = &self.arm else { return Ok(self.summary.arms.iter().collect()) };
        let arm = self.summary.arm(name).ok_or_else(|| {
            let names: Vec<&str> = self.summary.arms.iter().map(|arm| arm.name.as_str()).collect();
            Error::usage(format!("{} has no arm `{name}`", self.name())).hint(format!("it has {}", names.join(", ")))
        });
        Ok(vec![arm?])
    }
}

fn name(source: Option<&Source>) -> String {
    source.map(Source::name).unwrap_or_default()
}

fn same_workload(first: &Source, second: &Source) -> bool {
    let key = |source: &Source| (source.summary.seed, source.summary.workload_sha256.clone());
    key(first) == key(second)
}

/// One arm against one, arms of one name against each other, or every arm against the first.
fn pairs(first: &Source, second: Option<&Source>) -> Result<Vec<(Side, Side)>> {
    let calls = load::calls(&first.path)?;
    let side = |source: &Source, arm: &ArmSummary, calls: &[CallRecord], prefix: &str| {
        let calls: Vec<_> = calls.iter().filter(|call| call.arm == arm.name).cloned().collect();
        let named = |call: &&CallRecord| call.name.is_some() || call.response_verdict == Verdict::Corrupted;
        let counted = calls.iter().filter(|call| is_counted(call)).filter(named).count() as u64;
        // What the harness cancelled is there, too, and in no rate.
        if counted < arm.calls {
            return Err(Error::usage(format!(
                "{}: calls.jsonl has {counted} judged calls of arm `{}`, the summary {}",
                source.name(),
                arm.name,
                arm.calls
            ))
            .hint(format!("write both again from the journal: toolstorm report {}", source.name())));
        }
        let sessions = Counts::new(arm.sessions_corrupted.min(arm.sessions_judged), arm.sessions_judged);
        Ok(Side { name: format!("{prefix}{}", arm.name), sessions, calls })
    };
    let ones = first.arms()?;
    let Some(second) = second else {
        let [base, others @ ..] = ones.as_slice() else { return Err(Error::usage("the result has no arm")) };
        if others.is_empty() {
            return Err(Error::usage(format!("{} has one arm only", first.name())).hint("name a second result"));
        }
        return others.iter().map(|arm| Ok((side(first, base, &calls, "")?, side(first, arm, &calls, "")?))).collect();
    };
    let other_calls = load::calls(&second.path)?;
    let twos = second.arms()?;
    let (a, b) = if first.path == second.path { (String::new(), String::new()) } else { prefixes(first, second) };
    if let ([one], [two]) = (ones.as_slice(), twos.as_slice()) {
        return Ok(vec![(side(first, one, &calls, &a)?, side(second, two, &other_calls, &b)?)]);
    }
    let shared = ones.iter().filter_map(|one| twos.iter().find(|two| two.name == one.name).map(|two| (one, two)));
    let shared = shared.map(|(one, two)| Ok((side(first, one, &calls, &a)?, side(second, two, &other_calls, &b)?)));
    let shared: Vec<_> = shared.collect::<Result<_>>()?;
    if shared.is_empty() {
        return Err(Error::usage("the two results have no arm of one name").hint("name the arms: RESULT:ARM"));
    }
    Ok(shared)
}

fn prefixes(first: &Source, second: &Source) -> (String, String) {
    let stem = |source: &Source| source.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    (format!("{}:", stem(first)), format!("{}:", stem(second)))
}

fn show(comparison: &Comparison, confidence: f64, adjusted: bool, console: Console) {
    let Comparison { first, second, sessions, .. } = comparison;
    let difference = sessions.difference.map_or("unknown".to_owned(), |d| format!("{:+.1} points", d * 100.0));
    let p = if adjusted { format!(", {:.2e} after Holm", sessions.adjusted_p) } else { String::new() };
    console.say(format!(
        "{first} {} of {} corrupted, {second} {} of {}: {difference}, {} to {} at {}; Fisher p = {:.2e}{p}; Boschloo p = {:.2e}",
        sessions.first.events,
        sessions.first.trials,
        sessions.second.events,
        sessions.second.trials,
        points(sessions.interval.lower),
        points(sessions.interval.upper),
        percent(confidence),
        sessions.fisher_p,
        sessions.boschloo_p,
    ));
    for table in &comparison.tables {
        console.say(proportions(table.by, &table.rows, comparison).to_string());
    }
    if !comparison.latency.is_empty() {
        console.say(latencies(comparison).to_string());
    }
}

fn points(share: f64) -> String {
    format!("{:+.1}", share * 100.0)
}

fn bracket(interval: Interval, scale: f64) -> String {
    format!("{:+.1} … {:+.1}", interval.lower * scale, interval.upper * scale)
}

fn proportions(by: &str, rows: &[Row], comparison: &Comparison) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header([by, &comparison.first, &comparison.second, "difference", "interval", "Holm p"]);
    for row in rows {
        let counts = |counts: Counts| format!("{} of {}", counts.events, counts.trials);
        table.add_row([
            row.key.clone(),
            counts(row.first),
            counts(row.second),
            row.difference.map_or_else(String::new, points),
            bracket(row.interval, 100.0),
            format!("{:.3}", row.adjusted_p),
        ]);
    }
    table
}

fn latencies(comparison: &Comparison) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["latency", &comparison.first, &comparison.second, "difference", "interval"]);
    for row in &comparison.latency {
        table.add_row([
            row.metric.clone(),
            format!("{:.1}", row.first),
            format!("{:.1}", row.second),
            format!("{:+.1}", row.difference),
            bracket(row.interval, 1.0),
        ]);
    }
    table
}
