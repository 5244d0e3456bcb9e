//! Events folded into launches, sessions and answers: what every report is computed from.

use std::collections::BTreeMap;

use serde_json::Value;

use super::summary::CallRecord;
use crate::{
    run::{Answer, Consumer, Races, RunEvent, Selfcheck, SessionEnd},
    validate::parity::Forms,
};

/// Everything that a journal says.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// The launches, by number.
    pub launches: BTreeMap<u32, LaunchTally>,
    /// Wall time of the run in milliseconds, all its parts together.
    pub wall_ms: f64,
    /// The newest self-check before it.
    pub selfcheck: Option<Selfcheck>,
    /// Whether the run ended, and was not stopped before its end.
    pub complete: bool,
}

/// One launch.
#[derive(Debug, Clone, Default)]
pub struct LaunchTally {
    /// Its arm.
    pub arm: String,
    /// Its sessions, by number, which is their start order.
    pub sessions: BTreeMap<u64, SessionTally>,
    /// How many servers its sessions were driven at: another one after an interruption, or for another part of the run.
    pub servers: u32,
    /// Why its server did not start.
    pub failure: Option<String>,
    /// What its server counted.
    pub server: BTreeMap<String, f64>,
    /// Its server's configuration.
    pub config: Value,
    /// Hazards of its captured graphs.
    pub hazards: Option<u64>,
    /// What each of its server's probes found first.
    pub findings: Vec<String>,
    /// What its server's race log holds.
    pub races: Option<Races>,
    /// Why it could not be read.
    pub races_failure: Option<String>,
    /// The tensors that explain them.
    pub hazard_tensors: Vec<String>,
    /// Why they are not known, or not all of them.
    pub hazards_failure: Option<String>,
    /// From the first session's start to the last one's end.
    pub wall_ms: f64,
    /// Whether all its sessions ended.
    pub complete: bool,
}

/// One session.
#[derive(Debug, Clone, Default)]
pub struct SessionTally {
    /// Whether it is outside every rate.
    pub warmup: bool,
    /// From its planned to its actual start.
    pub schedule_delay_ms: f64,
    /// Of that, waiting for a place.
    pub client_queue_ms: f64,
    /// Its judged responses, in order.
    pub answers: Vec<Answer>,
    /// Its turns that were asked in several forms.
    pub compared: Vec<Forms>,
    /// How it ended.
    pub end: Option<SessionEnd>,
}

impl Tally {
    /// The tally of `events`.
    pub fn of(events: &[RunEvent]) -> Self {
        let mut tally = Self::default();
        for event in events {
            tally.add(event);
        }
        tally
    }

    /// Takes note of one event.
    pub fn add(&mut self, event: &RunEvent) {
        match event {
            RunEvent::RunStarted { selfcheck, .. } => {
                self.complete = false;
                self.selfcheck = selfcheck.or(self.selfcheck);
            }
            RunEvent::RunEnded { interrupted, wall_ms } => {
                self.complete = !interrupted;
                self.wall_ms += wall_ms;
            }
            RunEvent::LaunchStarted { launch, arm, sessions, config, .. } => {
                let launch = self.launches.entry(*launch).or_default();
                launch.arm.clone_from(arm);
                launch.config.clone_from(config);
                launch.failure = None;
                // What is driven anew counts once; an empty list means that time decides, so everything is.
                launch.sessions.retain(|number, _| !sessions.is_empty() && !sessions.contains(number));
                launch.servers = if launch.sessions.is_empty() { 1 } else { launch.servers + 1 };
            }
            RunEvent::LaunchFailed { launch, arm, reason } => {
                let launch = self.launches.entry(*launch).or_default();
                launch.arm.clone_from(arm);
                launch.failure = Some(reason.clone());
            }
            RunEvent::SessionStarted { launch, session, warmup, schedule_delay_ms, client_queue_ms, .. } => {
                let (warmup, schedule_delay_ms, client_queue_ms) = (*warmup, *schedule_delay_ms, *client_queue_ms);
                let new = SessionTally { warmup, schedule_delay_ms, client_queue_ms, ..SessionTally::default() };
                self.launches.entry(*launch).or_default().sessions.insert(*session, new);
            }
            RunEvent::Answered(answer) => {
                let launch = self.launches.entry(answer.launch).or_default();
                launch.sessions.entry(answer.session).or_default().answers.push(Answer::clone(answer));
            }
            RunEvent::Compared { launch, session, forms, .. } => {
                let launch = self.launches.entry(*launch).or_default();
                launch.sessions.entry(*session).or_default().compared.push(forms.clone());
            }
            RunEvent::SessionEnded { launch, session, end, .. } => {
                let launch = self.launches.entry(*launch).or_default();
                launch.sessions.entry(*session).or_default().end = Some(*end);
            }
            RunEvent::LaunchEnded {
                launch,
                complete,
                server,
                hazards,
                hazard_tensors,
                hazards_failure,
                findings,
                races,
                races_failure,
                wall_ms,
            } => {
                let launch = self.launches.entry(*launch).or_default();
                launch.complete = *complete;
                launch.server.clone_from(server);
                launch.hazards = *hazards;
                launch.findings.clone_from(findings);
                launch.races.clone_from(races);
                let last = || format!("it is that of the last of {} servers", launch.servers);
                launch.races_failure =
                    races_failure.clone().or_else(|| (launch.servers > 1 && races.is_some()).then(last));
                launch.hazard_tensors.clone_from(hazard_tensors);
                launch.hazards_failure.clone_from(hazards_failure);
                launch.wall_ms += wall_ms;
            }
        }
    }

    /// The launches of an arm.
    pub fn of_arm<'a>(&'a self, arm: &'a str) -> impl Iterator<Item = (u32, &'a LaunchTally)> {
        self.launches.iter().filter(move |(_, launch)| launch.arm == arm).map(|(number, launch)| (*number, launch))
    }

    /// The answer of a round, one that the harness cut aside.
    pub fn answer(&self, launch: u32, session: u64, round: u32) -> Option<&Answer> {
        let session = self.launches.get(&launch)?.sessions.get(&session)?;
        session.answers.iter().find(|answer| answer.round == round && !answer.cancelled)
    }

    /// The lines of `calls.jsonl`: launches, sessions, rounds and calls in order, each request with its number.
    pub fn calls(&self) -> impl Iterator<Item = CallRecord> {
        self.launches.values().flat_map(|launch| {
            let answers = launch.sessions.values().flat_map(|session| &session.answers);
            answers.enumerate().flat_map(|(index, answer)| {
                answer.calls.iter().map(move |call| CallRecord { data_index: index as u64, ..call.clone() })
            })
        })
    }
}

impl Consumer for Tally {
    fn consume(&mut self, event: &RunEvent) -> crate::error::Result<()> {
        self.add(event);
        Ok(())
    }
}

impl LaunchTally {
    /// The sessions that rates may count: in start order up to the first that did not end, warm-up aside. Corrupted
    /// sessions end early, so whoever counts completions counts too many of them.
    pub fn counted(&self) -> impl Iterator<Item = &SessionTally> {
        let open = |session: &&SessionTally| !matches!(session.end, None | Some(SessionEnd::Interrupted));
        self.sessions.values().take_while(open).filter(|session| !session.warmup)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_race_log_of_the_last_of_several_servers_is_not_whole() {
        let started = |sessions: &[u64]| RunEvent::LaunchStarted {
            launch: 0,
            arm: "a".into(),
            seed: 0,
            sessions: sessions.to_vec(),
            config: Value::Null,
            started_at: String::new(),
        };
        let session = |session| RunEvent::SessionEnded { launch: 0, session, end: SessionEnd::Complete, rounds: 1 };
        let ended = RunEvent::LaunchEnded {
            launch: 0,
            complete: true,
            server: BTreeMap::new(),
            hazards: None,
            hazard_tensors: Vec::new(),
            hazards_failure: None,
            races: Some(Races::default()),
            races_failure: None,
            findings: Vec::new(),
            wall_ms: 0.0,
        };
        let failure = |events: &[RunEvent]| Tally::of(events).launches[&0].races_failure.clone();
        let again = [started(&[0, 1]), session(0), started(&[0, 1]), session(0), session(1), ended.clone()];
        assert_eq!(failure(&again), None, "driven anew as a whole");
        let rest = [started(&[0, 1]), session(0), started(&[1]), session(1), ended];
        assert!(failure(&rest).is_some_and(|why| why.contains("last of 2")), "the first server's hits are not in it");
    }
}
