//! What is left of a run: a pure function of its plan and its journal.

use std::collections::{BTreeMap, BTreeSet};

use super::{Launch, Plan, RunEvent, SessionEnd};

/// A launch and the sessions that it still has to drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Todo {
    /// The launch.
    pub launch: Launch,
    /// The sessions.
    pub sessions: Vec<u64>,
}

/// The launches that are left, in the plan's order.
///
/// Under lockstep a launch is one function of its seeds, so an incomplete one is driven anew as a whole; so is one that
/// goes by time. Otherwise only the sessions that did not end are left.
pub fn remaining(plan: &Plan, events: &[RunEvent]) -> Vec<Todo> {
    let mut complete = BTreeSet::new();
    let mut ended: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
    for event in events {
        match event {
            RunEvent::LaunchStarted { launch, sessions, .. } => {
                let done = ended.entry(*launch).or_default();
                for session in sessions {
                    done.remove(session);
                }
            }
            RunEvent::SessionEnded { launch, session, end, .. } if *end != SessionEnd::Interrupted => {
                ended.entry(*launch).or_default().insert(*session);
            }
            RunEvent::LaunchEnded { launch, complete: true, .. } => {
                complete.insert(*launch);
            }
            _ => {}
        }
    }
    let whole = plan.load.lockstep || plan.load.duration.is_some();
    // A launch that a test or the clock ended has no sessions left; one that lacks some comes from an incomplete merge.
    let by_count = plan.load.until.is_none() && plan.load.duration.is_none();
    let left = |launch: Launch| {
        let all = plan.sessions(&plan.arms[launch.arm]);
        let ended = ended.get(&launch.number);
        let open = |session: &u64| ended.is_none_or(|ended| !ended.contains(session));
        let over = complete.contains(&launch.number) && !(by_count && all.iter().any(open));
        let sessions: Vec<u64> = all.into_iter().filter(|session| whole || open(session)).collect();
        (!over && !sessions.is_empty()).then_some(Todo { launch, sessions })
    };
    plan.launches().into_iter().filter_map(left).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        run::{Overrides, resolve},
        scenario::file,
    };

    fn plan(lockstep: bool) -> Plan {
        let (matrix, scenario) = file::matrix("quick").unwrap();
        let overrides = Overrides { lockstep: Some(lockstep), sessions: Some(4), ..Overrides::default() };
        resolve(matrix, scenario, &overrides).unwrap()
    }

    fn started(launch: u32, sessions: Vec<u64>) -> RunEvent {
        let (arm, started_at) = (String::new(), String::new());
        RunEvent::LaunchStarted { launch, arm, seed: 0, sessions, config: serde_json::Value::Null, started_at }
    }

    fn ended(launch: u32, session: u64, end: SessionEnd) -> RunEvent {
        RunEvent::SessionEnded { launch, session, end, rounds: 1 }
    }

    fn closed(launch: u32, complete: bool) -> RunEvent {
        RunEvent::LaunchEnded {
            launch,
            complete,
            server: BTreeMap::new(),
            hazards: None,
            hazard_tensors: Vec::new(),
            hazards_failure: None,
            races: None,
            races_failure: None,
            findings: Vec::new(),
            wall_ms: 0.0,
        }
    }

    #[test]
    fn an_empty_journal_leaves_everything_and_a_complete_one_nothing() {
        let plan = plan(true);
        assert_eq!(remaining(&plan, &[]).len(), 2);
        let drive = |launch| (0..4).map(move |session| ended(launch, session, SessionEnd::Complete));
        let mut events: Vec<_> = drive(0).chain(drive(1)).collect();
        events.extend([closed(0, true), closed(1, true)]);
        assert_eq!(remaining(&plan, &events), []);
        // As after a merge without all parts.
        events.remove(6);
        assert_eq!(remaining(&plan, &events)[0].sessions, [0, 1, 2, 3]);
    }

    #[test]
    fn an_incomplete_launch_is_driven_anew_under_lockstep_and_completed_without() {
        let events = [
            started(0, vec![0, 1, 2, 3]),
            ended(0, 1, SessionEnd::Complete),
            ended(0, 2, SessionEnd::Interrupted),
            closed(0, false),
        ];
        let left = |lockstep| remaining(&plan(lockstep), &events)[0].sessions.clone();
        assert_eq!(left(true), [0, 1, 2, 3]);
        assert_eq!(left(false), [0, 2, 3]);
    }

    #[test]
    fn a_second_start_voids_what_the_first_one_finished() {
        let events = [started(0, vec![0, 1, 2, 3]), ended(0, 1, SessionEnd::Complete), started(0, vec![0, 1, 2, 3])];
        assert_eq!(remaining(&plan(false), &events)[0].sessions, [0, 1, 2, 3]);
    }
}
