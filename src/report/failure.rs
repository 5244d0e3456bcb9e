//! Corrupted calls beside what was dictated, made again from the plan: the journal keeps only what came.

use super::tally::Tally;
use crate::{
    run::{CallRecord, Plan, evidence_folder},
    scenario::Session,
    validate::Verdict,
};

/// One corrupted response.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Failure {
    /// The arm.
    pub arm: String,
    /// Number of the launch.
    pub launch: u32,
    /// Number of the session.
    pub session: u64,
    /// Number of the round.
    pub round: u32,
    /// Number of the call.
    pub call: u32,
    /// The class.
    pub class: String,
    /// Where it stops being right.
    pub detail: String,
    /// What was dictated.
    pub dictated: String,
    /// The part of what came that agrees with it.
    pub shared: String,
    /// The rest of what came.
    pub rest: String,
    /// Where the bytes lie, from the result folder.
    pub evidence: String,
    /// The race hits behind it in words; empty where the server has no race log.
    pub why: Vec<String>,
    /// Where all of them lie, from the result folder.
    pub races: String,
}

/// How many failures a run has.
pub fn count(tally: &Tally) -> usize {
    tally.calls().filter(fails).count()
}

/// Whether a call is a failure: corrupted, or the first of a corrupted response; not after its session's first.
fn fails(call: &CallRecord) -> bool {
    let damaged = call.verdict == Verdict::Corrupted;
    let beside = call.response_verdict == Verdict::Corrupted && call.call == 0;
    (damaged || beside) && !call.after_corruption
}

/// The first `limit` corrupted calls of a run, those after a session's first corruption left out.
pub fn failures(plan: &Plan, tally: &Tally, limit: usize) -> Vec<Failure> {
    let mut found = Vec::new();
    let mut last: Option<(u64, Session)> = None;
    for call in tally.calls().filter(fails).take(limit) {
        if last.as_ref().is_none_or(|(number, _)| *number != call.session) {
            last = plan.scenario.session(plan.workload_seed(), call.session).ok().map(|made| (call.session, made));
        }
        let dictated = last.as_ref().and_then(|(_, session)| dictated(session, &call)).unwrap_or_default();
        let came = match (&call.name, &call.arguments) {
            (Some(name), Some(arguments)) => format!("{name} {arguments}"),
            _ => String::new(),
        };
        let agree: usize =
            dictated.chars().zip(came.chars()).take_while(|(a, b)| a == b).map(|(letter, _)| letter.len_utf8()).sum();
        let folder = evidence_folder(std::path::Path::new(""), &call.arm, call.launch, call.session);
        let answer = tally.answer(call.launch, call.session, call.round);
        found.push(Failure {
            why: answer.map(|answer| answer.why.clone()).unwrap_or_default(),
            class: if call.verdict == Verdict::Corrupted { call.class } else { call.response_class }.to_string(),
            detail: call.detail.unwrap_or_default(),
            shared: came[..agree].to_owned(),
            rest: came[agree..].to_owned(),
            races: folder.join(format!("round-{:02}-races.json", call.round)).display().to_string(),
            evidence: folder.display().to_string(),
            arm: call.arm,
            launch: call.launch,
            session: call.session,
            round: call.round,
            call: call.call,
            dictated,
        });
    }
    found
}

fn dictated(session: &Session, call: &CallRecord) -> Option<String> {
    let dictated = session.rounds.get(call.round as usize)?.calls.get(call.call as usize)?;
    Some(format!("{} {}", dictated.name, dictated.text))
}
