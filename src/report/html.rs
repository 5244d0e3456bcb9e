//! `report.html`: one self-contained page.

use minijinja::{Environment, Value, context, value::Serde};
use serde_json::json;

use super::{
    failure::{self, failures},
    parity::Parity,
    plot::{self, Bar},
    position::{self, Positions},
    summary::{ArmSummary, Outcome, Summary},
    table::{bounds, details, percent, selfcheck, sessions},
    tally::Tally,
};
use crate::{
    error::{Error, Result},
    run::Plan,
};

/// Corrupted calls that the page shows in full; all of them are in the evidence folder.
const SHOWN: usize = 60;

/// The whole page.
pub fn render(plan: &Plan, tally: &Tally, summary: &Summary, positions: &[Positions]) -> Result<String> {
    let fail = |error: minijinja::Error| Error::usage(format!("report.html: {error:#}"));
    let mut environment = Environment::new();
    environment.add_template("report.html", include_str!("template.html")).map_err(fail)?;
    let template = environment.get_template("report.html").map_err(fail)?;
    let positions: Vec<_> = position::corrupted(positions, summary).map(drawings).collect();
    template
        .render(context! {
            selfcheck => summary.selfcheck.as_ref().map(selfcheck),
            summary => Value::from(Serde(json!(summary))),
            arms => Value::from(Serde(json!(summary.arms.iter().map(row).collect::<Vec<_>>()))),
            failed => failure::count(tally),
            failures => Value::from(Serde(json!(failures(plan, tally, SHOWN)))),
            positions => Value::from(Serde(json!(positions))),
            rates => Value::from_safe_string(plot::bars(&rates(summary), " %")),
            latencies => Value::from(Serde(json!(latencies(summary)))),
            configurations => Value::from(Serde(json!(configurations(tally)))),
        })
        .map_err(fail)
}

fn row(arm: &ArmSummary) -> serde_json::Value {
    let interval = arm.session_corruption_rate_interval;
    let interval = interval.map(bounds);
    json!({
        "name": arm.name,
        "env": arm.env,
        "concurrency": arm.concurrency,
        "sessions": sessions(arm),
        "corrupted": arm.sessions_corrupted,
        "rate": percent(arm.session_corruption_rate),
        "interval": interval,
        "calls": arm.calls,
        "calls_corrupted": arm.calls_corrupted,
        "hazards": arm.hazards,
        "race_hits": arm.race_hits,
        "race_kinds": arm.races.as_ref().map(std::collections::BTreeMap::len),
        "overlap_share": percent(arm.overlap_share),
        "virtual_step_us": arm.virtual_step_us.map(|time| format!("{time:.0}")),
        "details": details(arm),
        "parity": arm.parity.as_ref().map(Parity::lines),
        "expect": arm.expect,
        "verdict": arm.verdict,
        "reason": arm.reason,
    })
}

fn rates(summary: &Summary) -> Vec<Bar> {
    let bar = |arm: &ArmSummary| {
        let ([low, high], middle) = (arm.session_corruption_rate_interval?, arm.session_corruption_rate?);
        let alarming = arm.verdict == Outcome::Fail || arm.sessions_corrupted > 0;
        Some(Bar { label: arm.name.clone(), low: low * 100.0, middle: middle * 100.0, high: high * 100.0, alarming })
    };
    summary.arms.iter().filter_map(bar).collect()
}

/// A drawing a latency: from the median over p95 to p99.
fn latencies(summary: &Summary) -> Vec<(&'static str, String)> {
    let draw = |(name, title): (&str, &'static str)| {
        let bar = |arm: &ArmSummary| {
            let figure = |label: &str| arm.latency.get(&format!("{label}_{name}_ms")).copied();
            let (low, middle, high) = (figure("median")?, figure("p95")?, figure("p99")?);
            Some(Bar { label: arm.name.clone(), low, middle, high, alarming: false })
        };
        let rows: Vec<_> = summary.arms.iter().filter_map(bar).collect();
        (title, plot::bars(&rows, " ms"))
    };
    [("ttft", "Time to first token"), ("tpot", "Time per output token"), ("e2el", "Whole request")]
        .map(draw)
        .into_iter()
        .filter(|(_, svg)| !svg.is_empty())
        .collect()
}

/// Where in an arm's calls corruption sits: one drawing an axis, then the hazard of the first corruption.
fn drawings(arm: &Positions) -> serde_json::Value {
    let plot = |title: &str, bars: Vec<Bar>| json!({"title": title, "plot": plot::bars(&bars, " %")});
    let mut tables: Vec<_> =
        arm.tables.iter().map(|table| plot(table.axis.title(), table.rows.iter().map(bar).collect())).collect();
    tables
        .push(plot("round of the first corruption, of the sessions still clean", arm.curve.iter().map(step).collect()));
    json!({"arm": arm.arm, "tables": tables})
}

fn step(step: &position::Step) -> Bar {
    let position::Step { round, at_risk, corrupted, interval: [low, high], surviving } = step;
    Bar {
        label: format!("{round} ({corrupted} of {at_risk}, {:.0} % clean after)", surviving * 100.0),
        low: low * 100.0,
        middle: *corrupted as f64 / (*at_risk).max(1) as f64 * 100.0,
        high: high * 100.0,
        alarming: *corrupted > 0,
    }
}

fn bar(row: &position::Row) -> Bar {
    let rate = row.corrupted as f64 / row.calls.max(1) as f64;
    Bar {
        label: format!("{} ({} of {})", row.position, row.corrupted, row.calls),
        low: row.interval[0] * 100.0,
        middle: rate * 100.0,
        high: row.interval[1] * 100.0,
        alarming: row.corrupted > 0,
    }
}

/// What each launch's server said about itself.
fn configurations(tally: &Tally) -> Vec<serde_json::Value> {
    let launches = tally.launches.iter().filter(|(_, launch)| !launch.config.is_null() || launch.failure.is_some());
    launches
        .map(|(number, launch)| {
            let config = serde_json::to_string_pretty(&launch.config).unwrap_or_default();
            json!({"launch": number, "arm": launch.arm, "config": config, "failure": launch.failure})
        })
        .collect()
}

/// The page of `history`.
pub fn history(trends: &[super::history::Trend]) -> Result<String> {
    let fail = |error: minijinja::Error| Error::usage(format!("history page: {error:#}"));
    let mut environment = Environment::new();
    environment.add_template("history.html", include_str!("history.html")).map_err(fail)?;
    let rows: Vec<_> = trends.iter().map(|trend| json!({"trend": trend, "plot": trend.plot()})).collect();
    let template = environment.get_template("history.html").map_err(fail)?;
    template.render(context! { rows => Value::from(Serde(json!(rows))) }).map_err(fail)
}
