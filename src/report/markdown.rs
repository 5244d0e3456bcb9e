//! `summary.md`: the table for a pull request.

use std::fmt::Write as _;

use super::{
    csv::{expect, outcome},
    parity::Parity,
    position::{self, Positions},
    summary::Summary,
    table::{bounds, details, launch_note, percent, selfcheck, sessions},
};

/// The whole page.
pub fn render(summary: &Summary, positions: &[Positions]) -> String {
    let mut text = String::new();
    let confidence = summary.confidence * 100.0;
    let _ = writeln!(text, "# {}: {}\n\n{}\n", summary.name, outcome(summary.verdict), summary.reason);
    let _ = writeln!(
        text,
        "| arm | concurrency | sessions | corrupted | rate | {confidence:.0} % interval | calls | corrupted | hazards | race kinds | \
         ttft p50 ms | e2el p50 ms | e2el p99 ms | expect | verdict |"
    );
    let _ = writeln!(text, "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|---|");
    for arm in &summary.arms {
        let latency = |name: &str| arm.latency.get(name).map_or_else(|| "–".into(), |value| format!("{value:.1}"));
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            arm.name.replace('|', "\\|"),
            arm.concurrency,
            sessions(arm),
            arm.sessions_corrupted,
            percent(arm.session_corruption_rate),
            arm.session_corruption_rate_interval.map_or_else(|| "–".into(), bounds),
            arm.calls,
            arm.calls_corrupted,
            arm.hazards.map_or_else(|| "–".into(), |count| count.to_string()),
            arm.races.as_ref().map_or_else(|| "–".into(), |races| races.len().to_string()),
            latency("median_ttft_ms"),
            latency("median_e2el_ms"),
            latency("p99_e2el_ms"),
            expect(arm.expect),
            outcome(arm.verdict),
        );
    }
    text.push('\n');
    for arm in &summary.arms {
        let _ = write!(text, "- **{}**: {}", arm.name, arm.reason);
        let parts = details(arm);
        let _ = if parts.is_empty() { writeln!(text) } else { writeln!(text, " ({})", parts.join(", ")) };
        for line in arm.parity.iter().flat_map(Parity::lines) {
            let _ = writeln!(text, "  - {line}");
        }
    }
    if let Some(check) = &summary.selfcheck {
        let _ = writeln!(text, "\n{}", selfcheck(check));
    }
    if let Some(note) = launch_note(summary) {
        let _ = writeln!(text, "\nNote: {note}.");
    }
    for arm in position::corrupted(positions, summary) {
        let _ = writeln!(text, "\n## Where calls of {} were corrupted", arm.arm);
        text.push_str(&position::markdown(&arm.tables, &arm.curve));
    }
    let _ = writeln!(
        text,
        "\ntoolstorm {}, seed {}, workload {}, {:.1} s{}",
        summary.version,
        summary.seed,
        &summary.workload_sha256[..12.min(summary.workload_sha256.len())],
        summary.wall_s,
        if summary.interrupted { ", interrupted" } else { "" },
    );
    text
}
