//! A plan and a tally to the numbers of a summary.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;

use super::{
    parity::Parity,
    summary::{ArmSummary, LaunchEffect, Outcome, SCHEMA, Summary},
    tally::{LaunchTally, SessionTally, Tally},
};
use crate::{
    run::{Answer, Arm, CallRecord, Plan, Progress, SessionEnd, Until, Watch},
    scenario::{self, Arrival},
    seed::Seed,
    stats::{
        Counts,
        cluster::{self, Clustering},
        interval::{clopper_pearson, upper_bound},
        sequential::{always_valid_upper, confidence_sequence},
    },
    validate::{Class, Verdict},
};

/// A gap between output events that counts as a stall.
const STALL_US: u32 = 1_000_000;

/// Bytes of a server's message that a summary tells.
const MESSAGE: usize = 200;

/// Latencies are kept in microseconds with three significant digits.
const DIGITS: u8 = 3;

/// The latencies that are kept.
pub const LATENCIES: [&str; 4] = ["ttft", "tpot", "itl", "e2el"];

/// What is told of each of them.
const QUANTILES: [(&str, f64); 4] = [("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)];

/// The names of all figures that an arm has where they were observed.
pub fn figures() -> impl Iterator<Item = String> {
    let others = ["client_queue_time", "schedule_delay", "requested_rate", "achieved_rate", "stall_pct"];
    let labels = || QUANTILES.iter().map(|(label, _)| *label).chain(["mean"]);
    let latencies = LATENCIES.iter().flat_map(move |name| labels().map(move |label| format!("{label}_{name}_ms")));
    latencies.chain(others.map(str::to_owned))
}

/// The summary of a run, its verdicts still open.
pub fn summary(plan: &Plan, tally: &Tally, result: Option<&std::path::Path>) -> Summary {
    Summary {
        schema: SCHEMA.into(),
        verdict: Outcome::Inconclusive,
        reason: String::new(),
        result_dir: result.map(|path| path.display().to_string()),
        wall_s: tally.wall_ms / 1e3,
        name: plan.name.clone(),
        version: env!("CARGO_PKG_VERSION").into(),
        seed: plan.seed,
        workload_sha256: plan.workload_sha256(),
        partition: plan.partition.map(|partition| partition.to_string()),
        interrupted: !tally.complete,
        selfcheck: tally.selfcheck,
        confidence: plan.gate.confidence,
        arms: plan.arms.iter().map(|arm| measure(plan, arm, tally)).collect(),
    }
}

fn measure(plan: &Plan, arm: &Arm, tally: &Tally) -> ArmSummary {
    let launches: Vec<_> = tally.of_arm(&arm.name).map(|(_, launch)| launch).collect();
    let mut sum = blank(plan, arm);
    for launch in &launches {
        sum.launches += 1;
        sum.launches_failed += u32::from(launch.failure.is_some());
        sum.sessions_started += launch.sessions.values().filter(|session| !session.warmup).count() as u64;
        launch.counted().for_each(|session| count_session(&mut sum, session));
        for answer in measured(launch) {
            count_answer(&mut sum, answer);
        }
    }
    if plan.load.until.is_none() {
        let driven: usize = launches.iter().map(|launch| launch.sessions.len()).sum();
        sum.sessions_missing = sum.sessions_planned.saturating_sub(driven as u64);
    }
    let rate = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
    if sum.sessions_judged > 0 {
        let counts = Counts::new(sum.sessions_corrupted, sum.sessions_judged);
        let confidence = plan.gate.confidence;
        // What holds for a size fixed beforehand does not hold for one that the data chose.
        let (interval, upper) = if plan.load.until.is_some() {
            (confidence_sequence(counts, confidence), always_valid_upper(counts, confidence))
        } else {
            (clopper_pearson(counts, confidence), upper_bound(counts, confidence))
        };
        sum.session_corruption_rate_interval = Some([interval.lower, interval.upper]);
        sum.session_corruption_rate_upper = Some(upper);
    }
    sum.session_corruption_rate = rate(sum.sessions_corrupted, sum.sessions_judged);
    sum.corruption_rate = rate(sum.calls_corrupted, sum.calls);
    sum.corruption_rate_interval = call_interval(plan, &sum, &launches);
    sum.launch_effect = launch_effect(plan.gate.confidence, &launches);
    sum.round_corruption_rate = rate(sum.rounds_corrupted, sum.rounds);
    sum.schema_accuracy = rate(sum.count_successful_tool_call, sum.calls);
    sum.sequential = plan.load.until.map(|until| sequential(until, tally, arm));
    if plan.scenario.parity != scenario::Parity::Off {
        let sessions = launches.iter().flat_map(|launch| launch.sessions.values());
        let compared = sessions.filter(|session| !session.warmup).map(|session| session.compared.as_slice());
        sum.parity = Some(Parity::of(compared, plan.gate.confidence));
    }
    server(&mut sum, &launches);
    sum.latency = latency(plan, &launches);
    sum
}

fn blank(plan: &Plan, arm: &Arm) -> ArmSummary {
    let planned = plan.sessions(arm).len() as u64 * u64::from(arm.repetitions);
    ArmSummary {
        name: arm.name.clone(),
        env: arm.env.clone(),
        args: arm.args.clone(),
        concurrency: arm.concurrency,
        launches: 0,
        launches_failed: 0,
        sessions_planned: if plan.load.duration.is_some() { 0 } else { planned },
        sessions_missing: 0,
        sessions_started: 0,
        sessions_judged: 0,
        sessions_corrupted: 0,
        session_corruption_rate: None,
        launch_effect: None,
        session_corruption_rate_interval: None,
        session_corruption_rate_upper: None,
        calls: 0,
        calls_corrupted: 0,
        corruption_rate: None,
        corruption_rate_interval: None,
        rounds: 0,
        rounds_corrupted: 0,
        round_corruption_rate: None,
        first_corruption_round: BTreeMap::new(),
        calls_after_corruption: 0,
        classes: BTreeMap::new(),
        infra: BTreeMap::new(),
        infra_first: None,
        quirks: BTreeMap::new(),
        cancelled: 0,
        count_finish_reason_tool_calls: 0,
        count_successful_tool_call: 0,
        schema_accuracy: None,
        finish_others_detail: BTreeMap::new(),
        hazards: None,
        hazard_tensors: Vec::new(),
        hazards_failure: None,
        race_hits: None,
        races: None,
        races_failure: None,
        findings: Vec::new(),
        overlap_share: None,
        virtual_step_us: None,
        server: BTreeMap::new(),
        latency: BTreeMap::new(),
        sequential: None,
        parity: None,
        expect: arm.expect,
        verdict: Outcome::Inconclusive,
        reason: String::new(),
    }
}

/// The arm's sequential test over the sessions as they started.
fn sequential(until: Until, tally: &Tally, arm: &Arm) -> Progress {
    let mut watch = Watch::new(until);
    for (number, launch) in tally.of_arm(&arm.name) {
        watch.launch(number, launch.sessions.len());
        for (place, session) in launch.sessions.values().enumerate() {
            watch.end(number, place as u64, session.end.unwrap_or(SessionEnd::Interrupted));
        }
    }
    watch.progress()
}

/// The judged answers of a launch, warm-up aside.
fn measured(launch: &LaunchTally) -> impl Iterator<Item = &Answer> {
    launch.sessions.values().filter(|session| !session.warmup).flat_map(|session| &session.answers)
}

fn count_session(sum: &mut ArmSummary, session: &SessionTally) {
    match session.end {
        Some(SessionEnd::Complete) => sum.sessions_judged += 1,
        Some(SessionEnd::Corrupted) => {
            sum.sessions_judged += 1;
            sum.sessions_corrupted += 1;
            let corrupted = |answer: &&Answer| answer.calls[0].response_verdict == Verdict::Corrupted;
            if let Some(answer) = session.answers.iter().find(corrupted) {
                *sum.first_corruption_round.entry(answer.round).or_default() += 1;
            }
        }
        _ => {}
    }
}

/// Why a response is outside the denominator: its class, its status, and the beginning of its body.
fn said(call: &CallRecord) -> String {
    let detail = call.detail.as_deref().unwrap_or("no detail");
    let end = detail.floor_char_boundary(MESSAGE);
    format!("{}: {}{}", call.response_class, &detail[..end], if end < detail.len() { "…" } else { "" })
}

fn count_answer(sum: &mut ArmSummary, answer: &Answer) {
    let Some(first) = answer.calls.first() else { return };
    if answer.cancelled {
        sum.cancelled += 1;
        return;
    }
    if first.after_corruption {
        sum.calls_after_corruption += answer.calls.len() as u64;
        return;
    }
    for quirk in answer.calls.iter().flat_map(|call| &call.quirks) {
        *sum.quirks.entry(*quirk).or_default() += 1;
    }
    if !matches!(first.response_verdict, Verdict::Valid | Verdict::Corrupted) {
        *sum.infra.entry(first.response_class).or_default() += 1;
        sum.infra_first.get_or_insert_with(|| said(first));
        return;
    }
    match first.finish_reason.as_deref() {
        Some("tool_calls") => sum.count_finish_reason_tool_calls += 1,
        Some("stop") => {}
        other => *sum.finish_others_detail.entry(other.unwrap_or("missing").into()).or_default() += 1,
    }
    sum.rounds += 1;
    let corrupted = first.response_verdict == Verdict::Corrupted;
    sum.rounds_corrupted += u64::from(corrupted);
    let calls = counted_calls(answer);
    sum.calls += calls.trials;
    sum.calls_corrupted += calls.events;
    for call in &answer.calls {
        *sum.classes.entry(call.class).or_default() += 1;
        if call.name.is_some() || corrupted {
            let successful = call.verdict == Verdict::Valid || call.class == Class::ValueAltered;
            sum.count_successful_tool_call += u64::from(successful);
        }
    }
    // Damage beside intact calls belongs to the response and to no call.
    if corrupted && answer.calls.iter().all(|call| call.verdict != Verdict::Corrupted) {
        *sum.classes.entry(first.response_class).or_default() += 1;
    }
}

/// The judged calls of an answer, and the corrupted ones.
fn counted_calls(answer: &Answer) -> Counts {
    let Some(first) = answer.calls.first() else { return Counts::default() };
    let judged = matches!(first.response_verdict, Verdict::Valid | Verdict::Corrupted);
    if answer.cancelled || first.after_corruption || !judged {
        return Counts::default();
    }
    let corrupted = first.response_verdict == Verdict::Corrupted;
    let counted = answer.calls.iter().filter(|call| call.name.is_some() || corrupted);
    counted.fold(Counts::default(), |sum, call| sum + Counts::new(u64::from(call.verdict == Verdict::Corrupted), 1))
}

/// Calls of one session are not independent, so whole sessions are resampled.
fn call_interval(plan: &Plan, sum: &ArmSummary, launches: &[&LaunchTally]) -> Option<[f64; 2]> {
    let sessions = launches.iter().flat_map(|launch| launch.sessions.values()).filter(|session| !session.warmup);
    let calls = |session: &SessionTally| {
        session.answers.iter().fold(Counts::default(), |sum, answer| sum + counted_calls(answer))
    };
    let clusters: Vec<_> = sessions.map(calls).filter(|calls| calls.trials > 0).collect();
    if clusters.is_empty() {
        return None;
    }
    let mut rng = Seed(plan.seed).fork("bootstrap").fork(&sum.name).rng();
    let interval = cluster::bootstrap(&clusters, plan.gate.confidence, &mut rng);
    interval.map(|interval| [interval.lower, interval.upper]).or(sum.session_corruption_rate_interval)
}

fn launch_effect(confidence: f64, launches: &[&LaunchTally]) -> Option<LaunchEffect> {
    let corrupted = |session: &SessionTally| match session.end {
        Some(SessionEnd::Complete) => Counts::new(0, 1),
        Some(SessionEnd::Corrupted) => Counts::new(1, 1),
        _ => Counts::default(),
    };
    let of = |launch: &&LaunchTally| launch.counted().map(corrupted).fold(Counts::default(), |sum, one| sum + one);
    let clustering = Clustering::of(&launches.iter().map(of).collect::<Vec<_>>());
    let interval = clustering.interval(confidence);
    (clustering.clusters > 1).then_some(LaunchEffect {
        launches: clustering.clusters,
        correlation: clustering.correlation,
        design_effect: clustering.design_effect,
        interval: [interval.lower, interval.upper],
    })
}

fn server(sum: &mut ArmSummary, launches: &[&LaunchTally]) {
    let mut seen: BTreeMap<&str, u32> = BTreeMap::new();
    for launch in launches {
        for (name, value) in &launch.server {
            *sum.server.entry(name.clone()).or_default() += value;
            *seen.entry(name).or_default() += 1;
        }
        sum.hazards = sum.hazards.max(launch.hazards);
        if let Some(races) = &launch.races {
            let sums = sum.races.get_or_insert_default();
            for (kind, count) in &races.kinds {
                *sums.entry(kind.clone()).or_default() += count;
            }
        }
        sum.races_failure = sum.races_failure.take().or_else(|| launch.races_failure.clone());
        if sum.findings.is_empty() {
            sum.findings.clone_from(&launch.findings);
        }
        sum.hazard_tensors.extend(launch.hazard_tensors.iter().cloned());
        sum.hazards_failure = sum.hazards_failure.take().or_else(|| launch.hazards_failure.clone());
    }
    // Counters add up over launches; everything else is a level and is averaged.
    for (name, value) in &mut sum.server {
        if !name.ends_with("_total") {
            *value /= f64::from(seen[name.as_str()]);
        }
    }
    rates(&mut sum.server, launches.iter().map(|launch| launch.wall_ms / 1e3).sum());
    // A real device cannot tell what overlapped and what raced.
    let real = sum.server.get("device_busy_seconds_total").is_some_and(|busy| *busy > 0.0);
    let told = |name| sum.server.get(name).copied().filter(|_| !real);
    sum.overlap_share = told("overlap_share");
    sum.race_hits = told("race_hits_total").map(|hits| hits as u64);
    sum.virtual_step_us = sum.server.get("virtual_step_us").copied();
}

/// Adds to an engine's counters what they are of the time.
fn rates(server: &mut BTreeMap<String, f64>, wall_s: f64) {
    for (total, rate) in [
        ("device_busy_seconds_total", "device_busy_share"),
        ("worker_busy_seconds_total", "worker_busy_share"),
        ("generation_tokens_total", "generation_tokens_per_s"),
    ] {
        if let Some(total) = server.get(total).filter(|_| wall_s > 0.0) {
            server.insert(rate.to_owned(), total / wall_s);
        }
    }
}

/// The histograms of an arm's or a launch's answers, in microseconds.
pub fn histograms<'a>(answers: impl Iterator<Item = &'a Answer>) -> BTreeMap<&'static str, Histogram<u64>> {
    let mut all: BTreeMap<_, _> =
        LATENCIES.iter().filter_map(|name| Some((*name, Histogram::new(DIGITS).ok()?))).collect();
    let mut add = |name: &str, micros: f64| {
        if let Some(histogram) = all.get_mut(name) {
            // The histogram grows by itself; a value that it cannot hold does not occur in microseconds.
            let _ = histogram.record(micros as u64);
        }
    };
    for answer in answers.filter(|answer| !answer.cancelled && answer.status == 200) {
        let Some(call) = answer.calls.first() else { continue };
        for (name, millis) in [("ttft", call.ttft_ms), ("tpot", answer.tpot_ms), ("e2el", call.e2el_ms)] {
            if let Some(millis) = millis {
                add(name, millis * 1e3);
            }
        }
        for gap in &answer.itl_us {
            add("itl", f64::from(*gap));
        }
    }
    all
}

fn latency(plan: &Plan, launches: &[&LaunchTally]) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    for (name, histogram) in histograms(launches.iter().flat_map(|launch| measured(launch))) {
        if histogram.is_empty() {
            continue;
        }
        figures.insert(format!("mean_{name}_ms"), histogram.mean() / 1e3);
        for (label, quantile) in QUANTILES {
            figures.insert(format!("{label}_{name}_ms"), histogram.value_at_quantile(quantile) as f64 / 1e3);
        }
    }
    let sessions: Vec<_> = launches.iter().flat_map(|launch| launch.sessions.values()).collect();
    let mean =
        |of: fn(&SessionTally) -> f64| sessions.iter().map(|session| of(session)).sum::<f64>() / sessions.len() as f64;
    if plan.load.arrival != Arrival::Closed && !sessions.is_empty() {
        figures.insert("client_queue_time".into(), mean(|session| session.client_queue_ms));
        figures.insert("schedule_delay".into(), mean(|session| session.schedule_delay_ms));
        figures.extend(plan.load.rate.map(|rate| ("requested_rate".to_owned(), rate)));
    }
    let wall_s: f64 = launches.iter().map(|launch| launch.wall_ms / 1e3).sum();
    let ended = sessions.iter().filter(|session| session.end.is_some()).count();
    if wall_s > 0.0 {
        figures.insert("achieved_rate".into(), ended as f64 / wall_s);
    }
    let streamed: Vec<_> =
        launches.iter().flat_map(|launch| measured(launch)).filter(|answer| !answer.itl_us.is_empty()).collect();
    if !streamed.is_empty() {
        let stalled = streamed.iter().filter(|answer| answer.itl_us.iter().any(|gap| *gap > STALL_US)).count();
        figures.insert("stall_pct".into(), 100.0 * stalled as f64 / streamed.len() as f64);
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_time_become_shares_of_it() {
        let counters = [("device_busy_seconds_total", 3.0), ("generation_tokens_total", 100.0), ("steps_total", 7.0)];
        let mut server: BTreeMap<_, _> = counters.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        rates(&mut server, 0.0);
        assert_eq!(server.len(), 3, "nothing is known of no time");
        rates(&mut server, 4.0);
        assert_eq!((server["device_busy_share"], server["generation_tokens_per_s"]), (0.75, 25.0));
        assert_eq!(server.len(), 5, "what is not told has no share");
    }
}
