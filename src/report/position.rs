//! Where corruption sits: rates against round, request index, output length, concurrency and cache phase.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    summary::{CallRecord, Summary},
    tally::Tally,
};
use crate::{
    error::{Error, Result},
    stats::position::{Course, Observation, bin, fine_bin, fine_width, hazard, rates},
    validate::Verdict,
};

/// Which position of a call is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Round of the session.
    Round,
    /// Requests that the launch had been sent before, as the next power of two.
    RequestIndex,
    /// Output tokens, in eighths of the next power of two.
    OutputLength,
    /// Bytes of the request, as the next power of two.
    PromptLength,
    /// Requests in flight, as the next power of two.
    Concurrency,
    /// First request of a session (its prompt is new) or a later one (its history is resent).
    CachePhase,
}

impl Axis {
    /// All of them, in the order of the report.
    pub const ALL: [Self; 6] =
        [Self::Round, Self::RequestIndex, Self::OutputLength, Self::PromptLength, Self::Concurrency, Self::CachePhase];

    /// The heading of its table.
    pub fn title(self) -> &'static str {
        match self {
            Self::Round => "round",
            Self::RequestIndex => "request since launch",
            Self::OutputLength => "output tokens",
            Self::PromptLength => "prompt bytes",
            Self::Concurrency => "requests in flight",
            Self::CachePhase => "cache phase",
        }
    }

    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Round => "round",
            Self::RequestIndex => "request_index",
            Self::OutputLength => "output_tokens",
            Self::PromptLength => "prompt_bytes",
            Self::Concurrency => "in_flight",
            Self::CachePhase => "cache_phase",
        }
    }

    /// Where `call` stands; `None` where that is not known.
    pub fn position(self, call: &CallRecord, order: &SendOrder) -> Option<u64> {
        Some(match self {
            Self::Round => u64::from(call.round),
            Self::RequestIndex => bin(order.index(call)? + 1),
            Self::OutputLength => fine_bin(call.output_tokens?),
            // A request always has a body; records without the field are older than it.
            Self::PromptLength => bin(Some(call.prompt_bytes).filter(|bytes| *bytes > 0)?),
            Self::Concurrency => bin(u64::from(call.in_flight_at)),
            Self::CachePhase => u64::from(call.round > 0),
        })
    }

    /// What a position is called in a table.
    pub fn label(self, position: u64) -> String {
        match self {
            Self::Round => position.to_string(),
            Self::CachePhase => if position == 0 { "cold" } else { "warm" }.to_owned(),
            Self::OutputLength if fine_width(position) == 1 => position.to_string(),
            Self::OutputLength => format!("{}–{position}", position + 1 - fine_width(position)),
            _ if position <= 2 => position.to_string(),
            _ => format!("{}–{position}", position / 2 + 1),
        }
    }
}

/// The rates along one axis.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Table {
    /// The axis.
    pub axis: Axis,
    /// One row a position.
    pub rows: Vec<Row>,
}

/// The rate at one position.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The position's name.
    pub position: String,
    /// Sessions with calls there.
    pub sessions: u64,
    /// Judged calls there.
    pub calls: u64,
    /// Corrupted ones.
    pub corrupted: u64,
    /// Bounds of the rate that allow for the correlation inside a session.
    pub interval: [f64; 2],
}

/// The requests of each launch in the order in which they were sent; the lines of `calls.jsonl` are in session order.
#[derive(Debug, Default)]
pub struct SendOrder(BTreeMap<(u32, u64), u64>);

impl SendOrder {
    /// The order of the requests behind `calls`.
    pub fn of<'a>(calls: impl IntoIterator<Item = &'a CallRecord>) -> Self {
        let mut launches: BTreeMap<u32, Vec<(Option<jiff::Timestamp>, u64)>> = BTreeMap::new();
        for call in calls.into_iter().filter(|call| call.call == 0) {
            launches.entry(call.launch).or_default().push((call.started_at.parse().ok(), call.data_index));
        }
        let numbered = launches.into_iter().flat_map(|(launch, mut requests)| {
            requests.sort_unstable();
            (0..).zip(requests).map(move |(index, (_, request))| ((launch, request), index))
        });
        Self(numbered.collect())
    }

    /// How many requests the launch had been sent before this one.
    fn index(&self, call: &CallRecord) -> Option<u64> {
        self.0.get(&(call.launch, call.data_index)).copied()
    }
}

/// A session of one launch.
pub(crate) fn session_of(call: &CallRecord) -> (u32, u64) {
    (call.launch, call.session)
}

/// Whether a call is inside the rates: judged, not of the warm-up, not after its session's first corruption.
pub(crate) fn is_counted(call: &CallRecord) -> bool {
    !call.warmup && !call.after_corruption && matches!(call.verdict, Verdict::Valid | Verdict::Corrupted)
}

/// One table an axis, over the calls of one arm. Positions that no call has give no row.
pub fn tables(calls: &[&CallRecord], confidence: f64) -> Vec<Table> {
    let numbers = number_sessions(calls);
    let order = SendOrder::of(calls.iter().copied());
    let along = |axis: Axis| {
        let counted = calls.iter().filter(|call| is_counted(call));
        let observations = counted.filter_map(|call| {
            Some(Observation {
                position: axis.position(call, &order)?,
                session: numbers[&session_of(call)],
                corrupted: call.verdict == Verdict::Corrupted,
            })
        });
        let rows = rates(observations, confidence).into_iter().map(|row| Row {
            position: axis.label(row.position),
            sessions: row.sessions,
            calls: row.counts.trials,
            corrupted: row.counts.events,
            interval: [row.interval.lower, row.interval.upper],
        });
        Table { axis, rows: rows.collect() }
    };
    Axis::ALL.into_iter().map(along).collect()
}

fn number_sessions(calls: &[&CallRecord]) -> BTreeMap<(u32, u64), u64> {
    let mut numbers = BTreeMap::new();
    for call in calls {
        let next = numbers.len() as u64;
        numbers.entry(session_of(call)).or_insert(next);
    }
    numbers
}

/// One round of the hazard curve.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Step {
    /// The round, from 0.
    pub round: u64,
    /// Sessions that reached it clean.
    pub at_risk: u64,
    /// Of these, sessions first corrupted there.
    pub corrupted: u64,
    /// Exact bounds of the hazard.
    pub interval: [f64; 2],
    /// Share of sessions still clean after it (Kaplan-Meier).
    pub surviving: f64,
}

/// First corruption against round: sessions that end clean are censored.
pub fn curve(calls: &[&CallRecord], confidence: f64) -> Vec<Step> {
    let mut courses: BTreeMap<(u32, u64), Course> = BTreeMap::new();
    for call in calls.iter().filter(|call| is_counted(call)) {
        let course = courses.entry(session_of(call)).or_insert(Course { rounds: 0, corrupted: None });
        course.rounds = course.rounds.max(u64::from(call.round) + 1);
        if call.verdict == Verdict::Corrupted {
            let round = u64::from(call.round);
            course.corrupted = Some(course.corrupted.map_or(round, |first| first.min(round)));
        }
    }
    let courses: Vec<Course> = courses.into_values().collect();
    let steps = hazard(&courses, confidence).into_iter().map(|row| Step {
        round: row.round,
        at_risk: row.counts.trials,
        corrupted: row.counts.events,
        interval: [row.interval.lower, row.interval.upper],
        surviving: row.surviving,
    });
    steps.collect()
}

/// Where the calls of one arm were corrupted.
#[derive(Debug, Clone, PartialEq)]
pub struct Positions {
    /// The arm.
    pub arm: String,
    /// One table an axis.
    pub tables: Vec<Table>,
    /// First corruption against round.
    pub curve: Vec<Step>,
}

/// The positions of every arm of a run, in the arms' order.
pub fn of_run(tally: &Tally, summary: &Summary) -> Vec<Positions> {
    let calls: Vec<_> = tally.calls().collect();
    of_arms(summary.arms.iter().map(|arm| arm.name.as_str()), &calls, summary.confidence)
}

/// Those of the arms with corrupted calls: of the others there is nothing to tell.
pub(super) fn corrupted<'a>(positions: &'a [Positions], summary: &'a Summary) -> impl Iterator<Item = &'a Positions> {
    let is_corrupted = |arm: &str| summary.arm(arm).is_some_and(|arm| arm.calls_corrupted > 0);
    positions.iter().filter(move |positions| is_corrupted(&positions.arm))
}

fn of_arms<'a>(arms: impl Iterator<Item = &'a str>, calls: &[CallRecord], confidence: f64) -> Vec<Positions> {
    let of = |arm: &str| {
        let own: Vec<_> = calls.iter().filter(|call| call.arm == arm).collect();
        Positions { arm: arm.to_owned(), tables: tables(&own, confidence), curve: curve(&own, confidence) }
    };
    arms.map(of).collect()
}

/// `positions.csv`: one row an arm, axis and position; the axis `first_corruption` is the hazard by round, whose
/// denominator are the sessions that reached the round clean.
pub fn csv(positions: &[Positions]) -> Result<String> {
    let fail = |error: ::csv::Error| Error::usage(format!("positions.csv: {error}"));
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    writer
        .write_record(["arm", "axis", "position", "sessions", "calls", "corrupted", "rate", "lower", "upper"])
        .map_err(fail)?;
    for Positions { arm, tables, curve } in positions {
        let mut row = |axis: &str, position: &str, counts: [u64; 3], interval: [f64; 2]| {
            let [sessions, calls, corrupted] = counts;
            let rate = corrupted as f64 / calls.max(1) as f64;
            let shares = [rate, interval[0], interval[1]].map(|share| format!("{share:.6}"));
            let counts = [sessions, calls, corrupted].map(|count| count.to_string());
            let fields = [arm, axis, position].into_iter().map(str::to_owned).chain(counts).chain(shares);
            writer.write_record(fields).map_err(fail)
        };
        for table in tables {
            for Row { position, sessions, calls, corrupted, interval } in &table.rows {
                row(table.axis.name(), position, [*sessions, *calls, *corrupted], *interval)?;
            }
        }
        for Step { round, at_risk, corrupted, interval, .. } in curve {
            row("first_corruption", &round.to_string(), [*at_risk, *at_risk, *corrupted], *interval)?;
        }
    }
    let bytes = writer.into_inner().map_err(|error| Error::usage(format!("positions.csv: {error}")))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The tables and the curve as a Markdown section.
pub fn markdown(tables: &[Table], curve: &[Step]) -> String {
    use std::fmt::Write as _;

    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    let mut text = String::new();
    for table in tables.iter().filter(|table| !table.rows.is_empty()) {
        let title = table.axis.title();
        let _ = write!(text, "\n| {title} | corrupted calls | rate | interval |\n|---|--:|--:|--:|\n");
        for row in &table.rows {
            let rate = percent(row.corrupted as f64 / row.calls.max(1) as f64);
            let [lower, upper] = row.interval.map(percent);
            let Row { position, corrupted, calls, .. } = row;
            let _ = writeln!(text, "| {position} | {corrupted} of {calls} | {rate} | {lower} – {upper} |");
        }
    }
    if !curve.is_empty() {
        text.push_str("\n| round | first corrupted | interval | still clean after |\n|---|--:|--:|--:|\n");
        for step in curve {
            let [lower, upper] = step.interval.map(percent);
            let Step { round, corrupted, at_risk, surviving, .. } = step;
            let clean = percent(*surviving);
            let _ = writeln!(text, "| {round} | {corrupted} of {at_risk} | {lower} – {upper} | {clean} |");
        }
    }
    text
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A record at a place in a run; the rest is filler.
    pub(crate) fn call(session: u64, round: u32, corrupted: bool) -> CallRecord {
        let verdict = if corrupted { "corrupted" } else { "valid" };
        let class = if corrupted { "args_truncated" } else { "ok" };
        serde_json::from_value(serde_json::json!({
            "session": session, "round": round, "call": 0, "arm": "a", "launch": 0, "seed": 1, "model": "m",
            "stream": true, "name": "f", "arguments": "{}", "verdict": verdict, "class": class, "detail": null,
            "response_verdict": verdict, "response_class": class, "after_corruption": false, "warmup": false,
            "quirks": [], "expected_sha256": null, "nonce": "n", "finish_reason": "tool_calls",
            "output_tokens": 40 + 20 * u64::from(round), "in_flight_at": 64, "ttft_ms": 10.0 + f64::from(round),
            "e2el_ms": 100.0, "started_at": "", "data_index": session * 5 + u64::from(round), "request_sha256": "",
            "tool_calls_valid": true, "duration_ms": 100.0, "prompt_bytes": 4000
        }))
        .unwrap()
    }

    #[test]
    fn every_axis_counts_every_call_once() {
        let calls: Vec<_> = (0..20)
            .flat_map(|session| (0..4).map(move |round| call(session, round, session == 3 && round == 2)))
            .collect();
        let tables = tables(&calls.iter().collect::<Vec<_>>(), 0.95);
        assert_eq!(tables.len(), Axis::ALL.len());
        for table in &tables {
            assert_eq!(table.rows.iter().map(|row| row.calls).sum::<u64>(), 80, "{:?}", table.axis);
            assert_eq!(table.rows.iter().map(|row| row.corrupted).sum::<u64>(), 1);
        }
        assert_eq!(tables[0].rows[2].corrupted, 1);
        assert_eq!(
            tables[2].rows.iter().map(|row| row.position.as_str()).collect::<Vec<_>>(),
            ["33–40", "57–64", "65–80", "97–112"]
        );
        assert_eq!(tables[5].rows[0].position, "cold");
    }

    #[test]
    fn requests_count_from_the_launch_in_the_order_of_sending() {
        let mut calls: Vec<_> =
            (0..3).flat_map(|session| (0..2).map(move |round| call(session, round, false))).collect();
        for record in &mut calls {
            // Sessions in turn: all first rounds, then all second ones. Fractions of a second have no fixed width.
            record.started_at = match record.round {
                0 => format!("2026-01-01T00:00:00.{}Z", record.session + 1),
                _ => format!("2026-01-01T00:00:0{}Z", record.session + 1),
            };
        }
        calls[2].started_at = "2026-01-01T00:00:00.15Z".into();
        let order = SendOrder::of(&calls);
        let indices: Vec<_> = calls.iter().map(|call| order.index(call).unwrap()).collect();
        assert_eq!(indices, [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn an_arm_without_calls_has_no_row() {
        let calls: Vec<_> = (0..4)
            .flat_map(|session| (0..2).map(move |round| call(session, round, session == 1 && round == 1)))
            .collect();
        let text = csv(&of_arms(["a", "silent"].into_iter(), &calls, 0.95)).unwrap();
        let rows: Vec<_> = text.lines().map(|line| line.split(',').collect::<Vec<_>>()).collect();
        assert!(rows.iter().all(|row| row.len() == 9), "{text}");
        assert!(text.contains("a,round,1,4,4,1,0.250000,0.006309,0.805880\n"), "{text}");
        assert!(text.contains("a,first_corruption,1,4,4,1,"), "{text}");
        for axis in Axis::ALL {
            assert!(rows.iter().any(|row| row[..2] == ["a", axis.name()]), "{axis:?}: {text}");
        }
        assert!(rows.iter().skip(1).all(|row| row[0] == "a"), "{text}");
    }

    #[test]
    fn the_curve_censors_and_what_follows_a_corruption_is_out() {
        let mut late = call(1, 1, true);
        late.after_corruption = true;
        let calls = [call(0, 0, false), call(0, 1, false), call(1, 0, true), late];
        let calls: Vec<_> = calls.iter().collect();
        let curve = curve(&calls, 0.95);
        assert_eq!(curve.iter().map(|step| (step.corrupted, step.at_risk)).collect::<Vec<_>>(), [(1, 2), (0, 1)]);
        assert!((curve[1].surviving - 0.5).abs() < 1e-12);
        assert!(markdown(&tables(&calls, 0.95), &curve).contains("| 0 | 1 of 2 |"));
    }
}
