//! The final table, for terminals.

use std::fmt::Write as _;

use comfy_table::{Attribute, Cell, CellAlignment, Color, Table, presets};

use super::{
    csv::{expect, outcome},
    parity::Parity,
    summary::{ArmSummary, LaunchEffect, Outcome, Summary},
    terminal::Console,
};
use crate::{run::Selfcheck, stats::cluster::FEW_CLUSTERS};

/// Tensors with hazards that a line names at most.
const TENSORS: usize = 5;

/// The table and what follows from it.
pub fn render(summary: &Summary, console: Console) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header(summary));
    table.force_no_tty();
    if console.colored() {
        table.enforce_styling();
    }
    for arm in &summary.arms {
        table.add_row(row(arm, hazards(summary)));
    }
    let mut text = table.to_string();
    text.push('\n');
    for arm in &summary.arms {
        let classes: Vec<_> = details(arm);
        if !classes.is_empty() {
            let _ = writeln!(text, "{}: {}", arm.name, classes.join(", "));
        }
        for line in arm.parity.iter().flat_map(Parity::lines) {
            let _ = writeln!(text, "{}: {line}", arm.name);
        }
    }
    if let Some(check) = &summary.selfcheck {
        let _ = writeln!(text, "{}", selfcheck(check));
    }
    if let Some(note) = launch_note(summary) {
        let _ = writeln!(text, "{note}");
    }
    let _ = writeln!(text, "{}: {}", outcome(summary.verdict), summary.reason);
    if let Some(path) = &summary.result_dir {
        let _ = writeln!(text, "results in {path}");
    }
    text
}

fn hazards(summary: &Summary) -> bool {
    summary.arms.iter().any(|arm| arm.hazards.is_some() || arm.race_hits.is_some())
}

fn header(summary: &Summary) -> Vec<Cell> {
    let mut names = vec!["arm", "conc.", "sessions", "corrupted", "rate", "95 % interval", "calls", "corrupted"];
    let confidence = format!("{:.0} % interval", summary.confidence * 100.0);
    names[5] = &confidence;
    if hazards(summary) {
        names.extend(["hazards", "race hits", "race kinds"]);
    }
    names.extend(["ttft p50", "e2el p50", "p99 ms", "expect", "verdict"]);
    names.into_iter().map(|name| Cell::new(name).add_attribute(Attribute::Bold)).collect()
}

fn row(arm: &ArmSummary, hazards: bool) -> Vec<Cell> {
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let latency = |name: &str| right(arm.latency.get(name).map_or_else(|| "–".into(), |value| format!("{value:.0}")));
    let count = |value: Option<u64>| right(value.map_or_else(|| "–".into(), |value| value.to_string()));
    let interval = arm.session_corruption_rate_interval;
    let mut cells = vec![
        Cell::new(&arm.name),
        right(arm.concurrency.to_string()),
        right(sessions(arm)),
        right(arm.sessions_corrupted.to_string()),
        right(percent(arm.session_corruption_rate)),
        right(interval.map_or_else(|| "–".into(), bounds)),
        right(arm.calls.to_string()),
        right(arm.calls_corrupted.to_string()),
    ];
    if hazards {
        let kinds = arm.races.as_ref().map(|races| races.len() as u64);
        cells.extend([count(arm.hazards), count(arm.race_hits), count(kinds)]);
    }
    cells.extend([latency("median_ttft_ms"), latency("median_e2el_ms"), latency("p99_e2el_ms")]);
    let color = match arm.verdict {
        Outcome::Pass => Color::Green,
        Outcome::Fail => Color::Red,
        Outcome::Inconclusive => Color::Yellow,
    };
    cells.extend([Cell::new(expect(arm.expect)), Cell::new(outcome(arm.verdict)).fg(color)]);
    cells
}

/// The self-check before a run, in one line.
pub(super) fn selfcheck(check: &Selfcheck) -> String {
    let Selfcheck { responses, faulty, false_positives, .. } = check;
    format!(
        "self-check before: {responses} responses, {faulty} faulty; recall {}, {false_positives} false positives",
        percent(check.recall)
    )
}

/// Judged sessions, and those planned where they differ.
pub(super) fn sessions(arm: &ArmSummary) -> String {
    if arm.sessions_judged == arm.sessions_planned || arm.sessions_planned == 0 {
        arm.sessions_judged.to_string()
    } else {
        format!("{} of {}", arm.sessions_judged, arm.sessions_planned)
    }
}

/// A share in percent; a dash where there is none.
pub(super) fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".into(), |share| format!("{:.1} %", share * 100.0))
}

/// An interval of shares in percent.
pub(crate) fn bounds([lower, upper]: [f64; 2]) -> String {
    format!("{:.1}–{:.1} %", lower * 100.0, upper * 100.0)
}

/// A warning where an arm has too few launches to tell how much launches differ.
pub(super) fn launch_note(summary: &Summary) -> Option<String> {
    let fewest = summary.arms.iter().map(|arm| arm.launches).filter(|launches| *launches > 0).min()?;
    ((fewest as usize) < FEW_CLUSTERS).then(|| {
        format!(
            "fewer than {FEW_CLUSTERS} launches of an arm do not show how much launches differ: the intervals hold for \
             these launches (`repetitions` makes more)"
        )
    })
}

/// What an arm's row does not show: classes of damage, infrastructure, quirks, failed launches, race kinds, probes.
pub(super) fn details(arm: &ArmSummary) -> Vec<String> {
    let damage = arm.classes.iter().filter(|(class, _)| !matches!(class.as_str(), "ok" | "no_call"));
    let mut parts: Vec<_> = damage.map(|(class, count)| format!("{count} {class}")).collect();
    parts.extend(arm.infra.iter().map(|(class, count)| format!("{count} {class} (not counted)")));
    parts.extend(arm.quirks.iter().map(|(quirk, count)| format!("{count} {quirk} (quirk)")));
    if let Some(effect) = arm.launch_effect.filter(|effect| effect.design_effect > 1.0) {
        let LaunchEffect { launches, design_effect, interval, .. } = effect;
        let interval = bounds(interval);
        parts.push(format!(
            "its {launches} launches differ: design effect {design_effect:.1}, allowing for it {interval}"
        ));
    }
    if !arm.hazard_tensors.is_empty() {
        let shown: Vec<&str> = arm.hazard_tensors.iter().take(TENSORS).map(String::as_str).collect();
        let more = if arm.hazard_tensors.len() > TENSORS { ", …" } else { "" };
        parts.push(format!("hazards in {}{more}", shown.join(", ")));
    }
    parts.extend(arm.hazards_failure.iter().map(|why| format!("hazards not analysed: {why}")));
    if arm.launches_failed > 0 {
        parts.push(format!("{} launches failed", arm.launches_failed));
    }
    parts.extend(arm.races_failure.iter().map(|why| format!("a race log is not whole: {why}")));
    parts.extend(arm.races.iter().flatten().map(|(kind, count)| format!("{count} × {kind}")));
    parts.extend(probes(arm));
    parts.extend(arm.findings.iter().cloned());
    parts.extend(work(arm));
    parts
}

/// How much of the time a real device was at work.
fn work(arm: &ArmSummary) -> Option<String> {
    let share = |name: &str| arm.server.get(name).copied().filter(|share| *share > 0.0);
    let (device, worker) = (share("device_busy_share")?, share("worker_busy_share")?);
    let tokens = share("generation_tokens_per_s").unwrap_or_default();
    Some(format!(
        "{tokens:.0} tokens/s, device at work for {} of the time, the engine's thread for {}",
        percent(Some(device)),
        percent(Some(worker))
    ))
}

/// What the probes saw, where they ran.
fn probes(arm: &ArmSummary) -> Vec<String> {
    let counted = |name: &str| arm.server.get(name).copied().unwrap_or_default();
    let told = |name: &str, part: f64, whole: f64| (whole > 0.0).then(|| format!("{name}: {part} of {whole}"));
    let differential =
        told("GE_DIFF rows that differed", counted("ge_diff_divergences_total"), counted("ge_diff_samples_total"));
    let (hits, pages) = (counted("canary_hits_total"), counted("canary_checks_total"));
    let canary = (pages > 0.0).then(|| format!("canary: {hits} keys changed unexplained, in {pages} pages checked"));
    differential.into_iter().chain(canary).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        report::{measure, tally::Tally},
        run::{Overrides, RunEvent, resolve},
        scenario::file,
    };

    /// What a launch's server counted, and what its probes found first.
    type Ended<'a> = (&'a [(&'a str, f64)], &'a [&'a str]);

    /// What the first arm's row does not show, after two launches that ended so.
    fn told(launches: [Ended<'_>; 2]) -> Vec<String> {
        let (matrix, scenario) = file::matrix("quick").unwrap();
        let plan = resolve(matrix, scenario, &Overrides::default()).unwrap();
        let mut tally = Tally::default();
        for (launch, (server, findings)) in (0..).zip(launches) {
            tally.add(&RunEvent::LaunchStarted {
                launch,
                arm: plan.arms[0].name.clone(),
                seed: 0,
                sessions: vec![0],
                config: serde_json::Value::Null,
                started_at: String::new(),
            });
            tally.add(&RunEvent::LaunchEnded {
                launch,
                complete: true,
                server: server.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect::<BTreeMap<_, _>>(),
                hazards: None,
                hazard_tensors: Vec::new(),
                hazards_failure: None,
                findings: findings.iter().map(|line| (*line).to_owned()).collect(),
                races: None,
                races_failure: None,
                wall_ms: 0.0,
            });
        }
        details(&measure::summary(&plan, &tally, None).arms[0])
    }

    #[test]
    fn probes_are_told_with_what_they_found_first() {
        let counted = [
            ("ge_diff_divergences_total", 1.0),
            ("ge_diff_samples_total", 200.0),
            ("canary_hits_total", 2.0),
            ("canary_checks_total", 450.0),
        ];
        let told = told([(&counted, &[]), (&counted, &["GE_DIFF: step 7", "canary: step 9"])]);
        assert_eq!(
            told,
            [
                "GE_DIFF rows that differed: 2 of 400",
                "canary: 4 keys changed unexplained, in 900 pages checked",
                "GE_DIFF: step 7",
                "canary: step 9",
            ]
        );
    }

    #[test]
    fn a_probe_that_found_nothing_is_told_and_one_that_did_not_look_is_not() {
        let clean =
            [("ge_diff_divergences_total", 0.0), ("ge_diff_samples_total", 200.0), ("canary_checks_total", 0.0)];
        assert_eq!(told([(&clean, &[]), (&clean, &[])]), ["GE_DIFF rows that differed: 0 of 400"]);
        assert!(told([(&[], &[]), (&[], &[])]).is_empty());
    }
}
