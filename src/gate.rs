//! The gate: pass, fail or inconclusive, with the reason in one sentence. The printed number is the number compared.

use serde_json::Value;

use crate::{
    error::{Error, Result},
    exit,
    report::{
        measure,
        summary::{ArmSummary, Expect, Outcome, Summary},
        tally::Tally,
    },
    run::Plan,
    scenario::{Gate, UntilSpec},
    stats::{Counts, interval, sequential},
};

/// The answer for one arm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The arm.
    pub arm: String,
    /// The answer.
    pub outcome: Outcome,
    /// Why, in one sentence.
    pub reason: String,
}

/// The answer for a whole run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ruling {
    /// The answer.
    pub outcome: Outcome,
    /// Why, in one sentence.
    pub reason: String,
    /// The arms' answers, in order.
    pub arms: Vec<Decision>,
}

/// Refuses thresholds of `plan` that no result of it can be held against, before anything runs.
pub fn check(plan: &Plan) -> Result<()> {
    judge(&measure::summary(plan, &Tally::default(), None), &plan.gate).map(drop)
}

/// Judges every arm of a finished run.
pub fn judge(summary: &Summary, gate: &Gate) -> Result<Ruling> {
    for text in &gate.thresholds {
        text.parse::<Threshold>()?.check(&summary.arms, gate)?;
    }
    let arms = summary.arms.iter().map(|arm| decide(arm, gate)).collect::<Result<Vec<_>>>()?;
    Ok(overall(arms, summary.interrupted))
}

/// Writes the gate's answers into a finished run's summary.
pub fn settle(mut summary: Summary, gate: &Gate) -> Result<Summary> {
    let ruling = judge(&summary, gate)?;
    for (arm, decision) in summary.arms.iter_mut().zip(ruling.arms) {
        arm.verdict = decision.outcome;
        arm.reason = decision.reason;
    }
    summary.verdict = ruling.outcome;
    summary.reason = ruling.reason;
    Ok(summary)
}

/// Joins the arms' answers: one failure fails, else one open question leaves the run open.
pub fn overall(arms: Vec<Decision>, interrupted: bool) -> Ruling {
    let first = |outcome| arms.iter().find(|arm| arm.outcome == outcome);
    let named =
        |arm: &Decision| if arms.len() == 1 { arm.reason.clone() } else { format!("{}: {}", arm.arm, arm.reason) };
    let (outcome, reason) = match (first(Outcome::Fail), first(Outcome::Inconclusive), arms.as_slice()) {
        (Some(arm), _, _) => (Outcome::Fail, named(arm)),
        (None, _, []) => (Outcome::Inconclusive, "no arm was run".to_owned()),
        (None, Some(arm), _) => (Outcome::Inconclusive, named(arm)),
        (None, None, _) if interrupted => {
            (Outcome::Inconclusive, "the run did not end: it was interrupted, or parts of it are missing".to_owned())
        }
        (None, None, [arm]) => (Outcome::Pass, arm.reason.clone()),
        (None, None, _) => (Outcome::Pass, format!("all {} arms met what is expected of them", arms.len())),
    };
    Ruling { outcome, reason, arms }
}

/// Judges one arm against what is expected of it.
pub fn decide(arm: &ArmSummary, gate: &Gate) -> Result<Decision> {
    let (outcome, reason) = match arm.expect {
        Expect::Report => (Outcome::Pass, format!("{}: reported, not judged", corrupted(arm))),
        expect if arm.sequential.is_some() => sequential(arm, expect, gate),
        Expect::Corrupt => expect_corruption(arm, gate),
        Expect::Clean => expect_none(arm, gate),
    };
    let decision = Decision { arm: arm.name.clone(), outcome, reason };
    if outcome == Outcome::Fail {
        return Ok(decision);
    }
    apply_thresholds(arm, gate, decision)
}

fn sessions(arm: &ArmSummary) -> Counts {
    Counts::new(arm.sessions_corrupted.min(arm.sessions_judged), arm.sessions_judged)
}

fn corrupted(arm: &ArmSummary) -> String {
    format!("{} of {} corrupted", arm.sessions_corrupted, arm.sessions_judged)
}

/// The answer of an arm that a sequential test ended: an exact bound does not hold after looks, the test's answer does.
fn sequential(arm: &ArmSummary, expect: Expect, gate: &Gate) -> (Outcome, String) {
    let Some(test) = &arm.sequential else { return (Outcome::Inconclusive, corrupted(arm)) };
    let (low, high, at) = match test.rule {
        UntilSpec::Sprt { p0, p1, alpha, .. } => (
            format!("nearer to p0 {} than to p1 {}", percent(p0), percent(p1)),
            format!("nearer to p1 {} than to p0 {}", percent(p1), percent(p0)),
            1.0 - alpha,
        ),
        UntilSpec::AlwaysValid { limit, confidence } => {
            (format!("below {}", percent(limit)), format!("above {}", percent(limit)), confidence)
        }
    };
    let expected = test
        .expected_sessions
        .map_or_else(String::new, |[low, high]| format!(" (in the mean {low:.0} at p0, {high:.0} at p1)"));
    let seen = format!("{}, sequential test after {} sessions{expected}", corrupted(arm), test.sessions);
    let (found, clean) = match test.decision {
        None => return (Outcome::Inconclusive, format!("{seen}: not decided")),
        Some(sequential::Decision::Low) => (low, true),
        Some(sequential::Decision::High) => (high, false),
    };
    let met = clean == (expect == Expect::Clean);
    // The test itself says when there were enough sessions.
    let gate = Gate { min_sessions: 1, ..gate.clone() };
    if let Some(reason) = unobserved(arm, &gate).filter(|_| clean) {
        return (Outcome::Inconclusive, reason);
    }
    (if met { Outcome::Pass } else { Outcome::Fail }, format!("{seen}: {found} at {}", percent(at)))
}

fn expect_none(arm: &ArmSummary, gate: &Gate) -> (Outcome, String) {
    let seen = corrupted(arm);
    if arm.sessions_corrupted > gate.max_corruption {
        let reason = format!("{seen}, more than max_corruption {} allows", gate.max_corruption);
        return (Outcome::Fail, reason);
    }
    if let Some(reason) = unobserved(arm, gate) {
        return (Outcome::Inconclusive, reason);
    }
    let upper = interval::upper_bound(sessions(arm), gate.confidence);
    let lower = interval::lower_bound(sessions(arm), gate.confidence);
    let limit = percent(gate.max_upper);
    if lower > gate.max_upper {
        let least = percent_against(lower, gate.max_upper);
        return (
            Outcome::Fail,
            format!("{seen}, at least {least} at {}: fails max_upper {limit}", percent(gate.confidence)),
        );
    }
    let bound = format!("{seen}, at most {} at {}", percent_against(upper, gate.max_upper), percent(gate.confidence));
    if upper <= gate.max_upper {
        (Outcome::Pass, format!("{bound}: passes max_upper {limit}"))
    } else {
        (Outcome::Inconclusive, format!("{bound}: too few sessions for max_upper {limit}"))
    }
}

fn expect_corruption(arm: &ArmSummary, gate: &Gate) -> (Outcome, String) {
    let seen = corrupted(arm);
    if arm.sessions_corrupted > 0 {
        return (Outcome::Pass, format!("{seen}, as expected"));
    }
    if let Some(reason) = unobserved(arm, gate) {
        return (Outcome::Inconclusive, reason);
    }
    let upper = interval::upper_bound(sessions(arm), gate.confidence);
    let bound = format!("{seen}, at most {} at {}", percent_against(upper, gate.max_upper), percent(gate.confidence));
    if upper <= gate.max_upper {
        (Outcome::Fail, format!("{bound}, where corruption is expected"))
    } else {
        (Outcome::Inconclusive, format!("{bound}: too few sessions to miss the corruption that is expected"))
    }
}

/// Why too little was seen, if so.
fn unobserved(arm: &ArmSummary, gate: &Gate) -> Option<String> {
    if arm.launches_failed > 0 {
        return Some(format!("{} of {} launches failed", arm.launches_failed, arm.launches));
    }
    if arm.sessions_missing > 0 {
        return Some(format!("{} of {} sessions were not driven", arm.sessions_missing, arm.sessions_planned));
    }
    if arm.calls == 0 {
        let first = arm.infra_first.as_ref().map_or_else(String::new, |said| format!("; the first response: {said}"));
        return Some(format!("no tool call was observed{first}"));
    }
    if arm.sessions_judged < gate.min_sessions.max(1) {
        let wanted = gate.min_sessions.max(1);
        return Some(format!("{} sessions judged, fewer than min_sessions {wanted}", arm.sessions_judged));
    }
    let infra: u64 = arm.infra.values().sum();
    let share = infra as f64 / (infra + arm.rounds).max(1) as f64;
    (share > gate.max_infra).then(|| {
        let (share, limit) = (percent_against(share, gate.max_infra), percent(gate.max_infra));
        format!("{share} of responses lost to transport, refusals or limits: more than max_infra {limit}")
    })
}

/// A comparison of one of the summary's numbers: `corruption_rate_upper<0.01`, or for one arm alone
/// `fp8:p99_ttft_ms<=250`.
#[derive(Debug, Clone, PartialEq)]
pub struct Threshold {
    arm: Option<String>,
    metric: String,
    relation: Relation,
    limit: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Relation {
    AtMost,
    AtLeast,
    Below,
    Above,
}

impl Relation {
    /// Longer spellings first, so that `<=` is not read as `<`.
    const ALL: [(&'static str, Self); 4] =
        [("<=", Self::AtMost), (">=", Self::AtLeast), ("<", Self::Below), (">", Self::Above)];

    fn holds(self, value: f64, limit: f64) -> bool {
        match self {
            Self::AtMost => value <= limit,
            Self::AtLeast => value >= limit,
            Self::Below => value < limit,
            Self::Above => value > limit,
        }
    }
}

impl std::str::FromStr for Threshold {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::usage(format!("threshold `{text}` is no comparison of a number"))
                .hint("write NAME<NUMBER, with <, <=, > or >=: `corruption_rate_upper<0.01`")
        };
        let (spelling, relation) = Relation::ALL.into_iter().find(|(sign, _)| text.contains(sign)).ok_or_else(wrong)?;
        let (name, limit) = text.split_once(spelling).ok_or_else(wrong)?;
        let limit: f64 = limit.trim().parse().map_err(|_| wrong())?;
        // An arm's name may have colons, a number's has none.
        let (arm, metric) = match name.rsplit_once(':') {
            Some((arm, metric)) => (Some(arm.trim().to_owned()), metric),
            None => (None, name),
        };
        if metric.trim().is_empty() || !limit.is_finite() {
            return Err(wrong());
        }
        Ok(Self { arm, metric: metric.trim().to_owned(), relation, limit })
    }
}

impl Threshold {
    /// Refuses an arm or a number that is not there.
    fn check(&self, arms: &[ArmSummary], gate: &Gate) -> Result<()> {
        if let Some(arm) = arms.first() {
            metric(arm, gate, &self.metric)?;
        }
        let Some(wanted) = self.arm.as_ref().filter(|name| arms.iter().all(|arm| arm.name != **name)) else {
            return Ok(());
        };
        let error = Error::usage(format!("threshold: the result has no arm `{wanted}`"));
        Err(did_you_mean(error, arms.iter().map(|arm| arm.name.clone()), wanted))
    }

    /// Whether it is about `arm`. Of an arm that is only reported, it must say so by name.
    fn is_about(&self, arm: &ArmSummary) -> bool {
        match &self.arm {
            Some(name) => *name == arm.name,
            None => arm.expect != Expect::Report,
        }
    }
}

fn did_you_mean(error: Error, known: impl Iterator<Item = String>, wanted: &str) -> Error {
    let likeness = |name: &String| strsim::jaro_winkler(name, wanted);
    match known.max_by(|a, b| likeness(a).total_cmp(&likeness(b))) {
        Some(nearest) => error.hint(format!("did you mean `{nearest}`?")),
        None => error,
    }
}

fn apply_thresholds(arm: &ArmSummary, gate: &Gate, mut decision: Decision) -> Result<Decision> {
    for text in &gate.thresholds {
        let threshold: Threshold = text.parse()?;
        if !threshold.is_about(arm) {
            continue;
        }
        match metric(arm, gate, &threshold.metric)? {
            Some(value) if threshold.relation.holds(value, threshold.limit) => {}
            Some(value) => {
                let reason = format!("{} is {value}, which misses the threshold {text}", threshold.metric);
                return Ok(Decision { outcome: Outcome::Fail, reason, ..decision });
            }
            None => {
                let reason = format!("{} was not observed, which leaves the threshold {text} open", threshold.metric);
                decision = Decision { outcome: Outcome::Inconclusive, reason, ..decision };
            }
        }
    }
    Ok(decision)
}

/// A number of the arm's summary by its name; members of an object as `classes.args_truncated`, 0 where it has no such
/// member. `None` where it was not observed. The bound of a call rate is that of the sessions, the sampling unit.
fn metric(arm: &ArmSummary, gate: &Gate, name: &str) -> Result<Option<f64>> {
    let bound = matches!(name, "session_corruption_rate_upper" | "corruption_rate_upper");
    if bound {
        let upper = if arm.sequential.is_some() { sequential::always_valid_upper } else { interval::upper_bound };
        return Ok((arm.sessions_judged > 0).then(|| upper(sessions(arm), gate.confidence)));
    }
    let fields = serde_json::to_value(arm).map_err(|error| Error::usage(format!("arm `{}`: {error}", arm.name)))?;
    let found = match name.split_once('.') {
        Some((group, member)) => match fields.get(group) {
            Some(Value::Object(members)) => Some(members.get(member).cloned().unwrap_or_else(|| 0.into())),
            _ => None,
        },
        None => fields.get(name).cloned(),
    };
    match found {
        Some(Value::Number(number)) => Ok(number.as_f64()),
        Some(Value::Null) => Ok(None),
        None if measure::figures().any(|figure| figure == name) => Ok(None),
        _ => Err(unknown_metric(&fields, name)),
    }
}

fn unknown_metric(fields: &Value, name: &str) -> Error {
    let numbers = fields.as_object().into_iter().flatten().filter(|(_, value)| value.is_number() || value.is_null());
    let error = Error::usage(format!("threshold: the summary has no number `{name}`"));
    did_you_mean(error, numbers.map(|(key, _)| key.clone()).chain(measure::figures()), name)
}

/// The exit code of an answer.
pub fn exit_code(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Pass => exit::PASS,
        Outcome::Fail => exit::FAIL,
        Outcome::Inconclusive => exit::INCONCLUSIVE,
    }
}

/// The exit code that `git bisect run` understands: what is neither good nor bad is skipped.
pub fn git_bisect_code(code: u8) -> u8 {
    match code {
        exit::USAGE | exit::INCONCLUSIVE => exit::GIT_BISECT_SKIP,
        code => code,
    }
}

/// A share as a percentage with as few digits as it needs, at most six after the point.
pub fn percent(share: f64) -> String {
    let digits = (0..6).find(|&digits| printed(share, digits) == printed(share, 6)).unwrap_or(6);
    format!("{:.digits$} %", share * 100.0)
}

/// A share as a percentage with at least one digit after the point, and as many as it takes for the printed number to
/// stand on the same side of `limit` as the real one.
pub fn percent_against(share: f64, limit: f64) -> String {
    let same = |&digits: &usize| (printed(share, digits) > limit * 100.0) == (share > limit);
    let digits = (1..12).find(same).unwrap_or(12);
    format!("{:.digits$} %", share * 100.0)
}

fn printed(share: f64, digits: usize) -> f64 {
    format!("{:.digits$}", share * 100.0).parse().unwrap_or(share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{report::summary::Progress, validate::Class};

    fn arm(corrupted: u64, judged: u64) -> ArmSummary {
        let fields = serde_json::json!({
            "name": "arm", "env": {}, "concurrency": 64, "launches": 1, "launches_failed": 0,
            "sessions_planned": judged, "sessions_started": judged, "sessions_judged": judged,
            "sessions_corrupted": corrupted, "session_corruption_rate": null,
            "session_corruption_rate_interval": null, "session_corruption_rate_upper": null,
            "calls": judged * 5, "calls_corrupted": corrupted, "corruption_rate": 0.0,
            "rounds": judged * 5, "rounds_corrupted": corrupted, "round_corruption_rate": 0.0,
            "first_corruption_round": {}, "calls_after_corruption": 0, "classes": {}, "infra": {}, "quirks": {},
            "cancelled": 0, "count_finish_reason_tool_calls": 0, "count_successful_tool_call": 0,
            "schema_accuracy": null, "finish_others_detail": {}, "hazards": null, "race_hits": null,
            "overlap_share": null, "virtual_step_us": null, "expect": "clean", "verdict": "pass", "reason": "",
            "p99_ttft_ms": 120.5
        });
        serde_json::from_value(fields).unwrap()
    }

    fn decided(arm: &ArmSummary, gate: &Gate) -> (Outcome, String) {
        let decision = decide(arm, gate).unwrap();
        (decision.outcome, decision.reason)
    }

    #[test]
    fn a_clean_arm_passes_with_its_bound() {
        let wanted = "0 of 80 corrupted, at most 3.7 % at 95 %: passes max_upper 5 %";
        assert_eq!(decided(&arm(0, 80), &Gate::default()), (Outcome::Pass, wanted.into()));
    }

    #[test]
    fn corruption_fails_and_too_few_sessions_are_inconclusive() {
        let gate = Gate::default();
        let wanted = "1 of 80 corrupted, more than max_corruption 0 allows";
        assert_eq!(decided(&arm(1, 80), &gate), (Outcome::Fail, wanted.into()));
        let wanted = "0 of 20 corrupted, at most 13.9 % at 95 %: too few sessions for max_upper 5 %";
        assert_eq!(decided(&arm(0, 20), &gate), (Outcome::Inconclusive, wanted.into()));
        let lenient = Gate { max_corruption: 40, ..Gate::default() };
        assert_eq!(decided(&arm(30, 80), &lenient).0, Outcome::Fail);
        assert_eq!(decided(&arm(4, 80), &lenient).0, Outcome::Inconclusive);
        assert_eq!(decided(&arm(4, 400), &lenient).0, Outcome::Pass);
    }

    #[test]
    fn what_was_not_observed_is_inconclusive() {
        let gate = Gate::default();
        let mut silent = arm(0, 80);
        silent.calls = 0;
        assert_eq!(decided(&silent, &gate), (Outcome::Inconclusive, "no tool call was observed".into()));
        let mut lossy = arm(0, 80);
        lossy.infra.insert(Class::HttpError, 40);
        let (outcome, reason) = decided(&lossy, &gate);
        assert_eq!(outcome, Outcome::Inconclusive);
        assert!(reason.starts_with("9.1 % of responses lost"), "{reason}");
        let mut dead = arm(0, 80);
        (dead.launches, dead.launches_failed) = (3, 1);
        assert_eq!(decided(&dead, &gate), (Outcome::Inconclusive, "1 of 3 launches failed".into()));
    }

    #[test]
    fn a_sequential_test_says_nothing_about_responses_that_were_lost() {
        let rule = UntilSpec::AlwaysValid { limit: 0.05, confidence: 0.95 };
        let low = Some(sequential::Decision::Low);
        let progress = Progress { rule, decision: low, sessions: 80, expected_sessions: None };
        let mut tested = ArmSummary { sequential: Some(progress), ..arm(0, 80) };
        assert_eq!(decided(&tested, &Gate::default()).0, Outcome::Pass);
        tested.infra.insert(Class::HttpError, 40);
        assert_eq!(decided(&tested, &Gate::default()).0, Outcome::Inconclusive);
    }

    #[test]
    fn an_arm_that_must_corrupt_fails_when_it_does_not() {
        let expecting = |corrupted, judged| ArmSummary { expect: Expect::Corrupt, ..arm(corrupted, judged) };
        let gate = Gate::default();
        assert_eq!(decided(&expecting(12, 80), &gate), (Outcome::Pass, "12 of 80 corrupted, as expected".into()));
        assert_eq!(decided(&expecting(0, 80), &gate).0, Outcome::Fail);
        assert_eq!(decided(&expecting(0, 10), &gate).0, Outcome::Inconclusive);
    }

    #[test]
    fn thresholds_name_any_number() {
        let with = |text: &str| Gate { thresholds: vec![text.into()], ..Gate::default() };
        assert_eq!(decided(&arm(0, 80), &with("corruption_rate_upper<0.01")).0, Outcome::Fail);
        assert_eq!(decided(&arm(0, 300), &with("corruption_rate_upper<0.01")).0, Outcome::Pass);
        assert_eq!(decided(&arm(0, 80), &with("p99_ttft_ms <= 120.5")).0, Outcome::Pass);
        assert_eq!(decided(&arm(0, 80), &with("other:p99_ttft_ms<1")).0, Outcome::Pass);
        assert_eq!(decided(&arm(0, 80), &with("classes.args_truncated<1")).0, Outcome::Pass);
        assert_eq!(decided(&arm(0, 80), &with("schema_accuracy>0.9")).0, Outcome::Inconclusive);
        let error = decide(&arm(0, 80), &with("p99_tfft_ms<1")).unwrap_err();
        assert_eq!(error.cure(), Some("did you mean `p99_ttft_ms`?"));
        assert!(decide(&arm(0, 80), &with("fast")).is_err());
        assert_eq!(decided(&arm(0, 80), &with("p99_e2el_ms<1")).0, Outcome::Inconclusive);
        let reported = ArmSummary { expect: Expect::Report, ..arm(0, 80) };
        assert_eq!(decided(&reported, &with("p99_ttft_ms<1")).0, Outcome::Pass);
        assert_eq!(decided(&reported, &with("arm:p99_ttft_ms<1")).0, Outcome::Fail);
    }

    #[test]
    fn thresholds_that_no_result_can_meet_are_refused_before_the_run() {
        let check = |text: &str| {
            let (matrix, scenario) = crate::scenario::file::matrix("quick").unwrap();
            let mut plan = crate::run::resolve(matrix, scenario, &crate::run::Overrides::default()).unwrap();
            plan.gate.thresholds = vec![text.into()];
            super::check(&plan)
        };
        check("baseline:p99_e2el_ms<250").unwrap();
        let error = check("baselin:corruption_rate<0.1").unwrap_err();
        assert!(error.to_string().contains("has no arm `baselin`"));
        assert_eq!(error.cure(), Some("did you mean `baseline`?"));
        assert_eq!(check("p99_e2e_ms<1").unwrap_err().cure(), Some("did you mean `p99_e2el_ms`?"));
        check("fast").unwrap_err();
    }

    #[test]
    fn a_run_is_as_good_as_its_worst_arm() {
        let with = |outcome| Decision { arm: "a".into(), outcome, reason: "r".into() };
        let all = |outcomes: &[Outcome]| overall(outcomes.iter().copied().map(with).collect(), false).outcome;
        assert_eq!(all(&[Outcome::Pass, Outcome::Inconclusive, Outcome::Fail]), Outcome::Fail);
        assert_eq!(all(&[Outcome::Pass, Outcome::Inconclusive]), Outcome::Inconclusive);
        assert_eq!(all(&[Outcome::Pass, Outcome::Pass]), Outcome::Pass);
        assert_eq!(all(&[]), Outcome::Inconclusive);
        assert_eq!(overall(vec![with(Outcome::Pass)], true).outcome, Outcome::Inconclusive);
    }

    #[test]
    fn the_printed_number_is_on_the_right_side() {
        assert_eq!(percent_against(0.050_04, 0.05), "5.004 %");
        assert_eq!(percent_against(0.049_96, 0.05), "5.0 %");
        assert_eq!(percent_against(0.036_8, 0.05), "3.7 %");
        assert_eq!([percent(0.05), percent(0.999), percent(0.0)], ["5 %", "99.9 %", "0 %"]);
    }

    #[test]
    fn git_bisect_skips_what_is_neither_good_nor_bad() {
        assert_eq!([0, 1, 2, 3].map(git_bisect_code), [0, 1, 125, 125]);
    }
}
