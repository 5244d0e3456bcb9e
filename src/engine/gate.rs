//! The gate before each step under lockstep: open when everybody who is expected is there, and shut for a bounded time.

use std::{collections::BTreeSet, time::Duration};

use super::{
    lockstep::{Lockstep, Place},
    request::Failure,
};

/// How many missing sessions a message names.
const NAMED: usize = 16;

/// Lockstep, and how long it has kept everybody waiting.
#[derive(Debug)]
pub struct Gate {
    /// Who is expected.
    pub lockstep: Lockstep,
    /// The longest wait for missing sessions.
    patience: Duration,
    /// Since when somebody waits for somebody who is missing.
    closed: Option<Duration>,
    stalled: Option<String>,
}

/// Whether a step may be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Passage {
    /// Everybody is there.
    Open,
    /// Somebody is missing.
    Closed,
    /// Somebody was missing for too long, for the reason given: whoever waits fails, and whoever comes.
    Stalled(String),
}

impl Gate {
    /// Waits for the sessions of `lockstep`, at most `patience` at a time.
    pub fn new(lockstep: Lockstep, patience: Duration) -> Self {
        Self { lockstep, patience, closed: None, stalled: None }
    }

    /// Whether a step may be taken at the time `now`, when the sessions in `present` wait for it.
    pub fn check(&mut self, present: &BTreeSet<u32>, now: Duration) -> Passage {
        let missing = self.lockstep.missing(present);
        if missing.is_empty() {
            self.closed = None;
            return Passage::Open;
        }
        let since = *self.closed.get_or_insert(now);
        if now.saturating_sub(since) <= self.patience {
            return Passage::Closed;
        }
        let reason = self.reason(&missing, present.len());
        self.stalled = Some(reason.clone());
        Passage::Stalled(reason)
    }

    /// Whether a request from `place` may join those of `present`.
    pub fn accept(&mut self, place: Place, present: &BTreeSet<u32>) -> Result<(), Failure> {
        if let Some(reason) = &self.stalled {
            return Err(Failure::Stalled(reason.clone()));
        }
        if present.contains(&place.session) {
            return Err(Failure::InFlight(place.session));
        }
        self.lockstep.arrive(place).map_err(Failure::Lockstep)
    }

    /// Why everything fails, once a wait was too long.
    pub fn stalled(&self) -> Option<&str> {
        self.stalled.as_deref()
    }

    fn reason(&self, missing: &[u32], waiting: usize) -> String {
        let mut named: Vec<_> = missing.iter().take(NAMED).map(u32::to_string).collect();
        if missing.len() > NAMED {
            named.push("…".into());
        }
        let (named, seconds) = (named.join(", "), self.patience.as_secs_f64());
        format!("lockstep: {waiting} sessions waited {seconds} s for a request or the end of: {named}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn it_opens_when_all_are_there_and_stalls_when_they_never_come() {
        let mut gate = Gate::new(Lockstep::new(3, 2), seconds(10));
        let (one, both) = (BTreeSet::from([0]), BTreeSet::from([0, 1]));
        assert_eq!(gate.check(&one, seconds(5)), Passage::Closed);
        assert_eq!(gate.check(&both, seconds(14)), Passage::Open);
        assert_eq!(gate.check(&one, seconds(20)), Passage::Closed, "the clock starts anew");
        assert_eq!(gate.check(&one, seconds(30)), Passage::Closed);
        let Passage::Stalled(reason) = gate.check(&one, seconds(31)) else { panic!("it waits forever") };
        assert!(reason.ends_with("the end of: 1"), "{reason}");
        let place = Place { session: 1, round: 0 };
        assert_eq!(gate.accept(place, &one), Err(Failure::Stalled(reason)));
    }

    #[test]
    fn a_session_has_one_request_at_a_time() {
        let mut gate = Gate::new(Lockstep::new(3, 2), seconds(10));
        let place = Place { session: 0, round: 0 };
        assert_eq!(gate.accept(place, &BTreeSet::new()), Ok(()));
        assert_eq!(gate.accept(place, &BTreeSet::from([0])), Err(Failure::InFlight(0)));
    }
}
