//! `summary.csv`: one row an arm.

use super::{
    measure::LATENCIES,
    summary::{ArmSummary, Outcome, Summary},
};
use crate::{
    error::{Error, Result},
    scenario::Expect,
};

const FIGURES: [&str; 5] = ["mean", "median", "p90", "p95", "p99"];

/// The whole table.
pub fn render(summary: &Summary) -> Result<String> {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let fail = |error: ::csv::Error| Error::usage(format!("summary.csv: {error}"));
    let latencies =
        || LATENCIES.iter().flat_map(|name| FIGURES.iter().map(move |figure| format!("{figure}_{name}_ms")));
    let columns = summary.arms.first().map(columns).unwrap_or_default();
    let mut header: Vec<_> = columns.into_iter().map(|(name, _)| name.to_owned()).collect();
    header.extend(latencies());
    writer.write_record(&header).map_err(fail)?;
    for arm in &summary.arms {
        let mut row: Vec<_> = self::columns(arm).into_iter().map(|(_, value)| value).collect();
        row.extend(
            latencies().map(|name| arm.latency.get(&name).map_or_else(String::new, |value| format!("{value:.3}"))),
        );
        writer.write_record(&row).map_err(fail)?;
    }
    let bytes = writer.into_inner().map_err(|error| Error::usage(format!("summary.csv: {error}")))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn columns(arm: &ArmSummary) -> Vec<(&'static str, String)> {
    let share = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.6}"));
    let count = |value: Option<u64>| value.map_or_else(String::new, |value| value.to_string());
    let env: Vec<_> = arm.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let map = |pairs: Vec<(String, u64)>| {
        pairs.into_iter().map(|(name, count)| format!("{name}={count}")).collect::<Vec<_>>().join(" ")
    };
    let races: Vec<_> = arm.races.iter().flatten().map(|(kind, count)| format!("{kind}={count}")).collect();
    vec![
        ("arm", arm.name.clone()),
        ("env", env.join(" ")),
        ("concurrency", arm.concurrency.to_string()),
        ("sessions_planned", arm.sessions_planned.to_string()),
        ("sessions_judged", arm.sessions_judged.to_string()),
        ("sessions_corrupted", arm.sessions_corrupted.to_string()),
        ("session_corruption_rate", share(arm.session_corruption_rate)),
        ("session_corruption_rate_lower", share(arm.session_corruption_rate_interval.map(|bounds| bounds[0]))),
        ("session_corruption_rate_upper", share(arm.session_corruption_rate_upper)),
        ("calls", arm.calls.to_string()),
        ("calls_corrupted", arm.calls_corrupted.to_string()),
        ("corruption_rate", share(arm.corruption_rate)),
        ("corruption_rate_interval_lower", share(arm.corruption_rate_interval.map(|bounds| bounds[0]))),
        ("corruption_rate_interval_upper", share(arm.corruption_rate_interval.map(|bounds| bounds[1]))),
        ("round_corruption_rate", share(arm.round_corruption_rate)),
        ("classes", map(arm.classes.iter().map(|(class, count)| (class.to_string(), *count)).collect())),
        ("infra", map(arm.infra.iter().map(|(class, count)| (class.to_string(), *count)).collect())),
        ("quirks", map(arm.quirks.iter().map(|(quirk, count)| (quirk.to_string(), *count)).collect())),
        ("hazards", count(arm.hazards)),
        ("race_hits", count(arm.race_hits)),
        ("races", races.join("; ")),
        ("overlap_share", share(arm.overlap_share)),
        ("virtual_step_us", share(arm.virtual_step_us)),
        ("schema_accuracy", share(arm.schema_accuracy)),
        ("expect", expect(arm.expect).into()),
        ("verdict", outcome(arm.verdict).into()),
    ]
}

/// The outcome's name in files.
pub(super) fn outcome(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Pass => "pass",
        Outcome::Fail => "fail",
        Outcome::Inconclusive => "inconclusive",
    }
}

/// The expectation's name in files.
pub(super) fn expect(expect: Expect) -> &'static str {
    match expect {
        Expect::Clean => "clean",
        Expect::Corrupt => "corrupt",
        Expect::Report => "report",
    }
}
