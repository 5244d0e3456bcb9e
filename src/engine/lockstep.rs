//! Lockstep: the engine steps only when everybody who is expected is there, so that a whole run is a function of its
//! seeds. The protocol is in `docs/LOCKSTEP.md`.
//!
//! Sessions are numbered in the order in which they start. *Expected* are the lowest-numbered sessions that have not
//! ended, as many as run at a time. This set depends on who has ended and not on the order of the ends, and a client
//! that starts its sessions in order, the next one when one has ended, always gets all of it to the server.

use std::collections::{BTreeMap, BTreeSet};

/// What a request says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The number of its session.
    pub session: u32,
    /// Its round, which never decreases in a session.
    pub round: u32,
}

/// Who was announced, who has ended, and how far each session is.
#[derive(Debug, Clone)]
pub struct Lockstep {
    sessions: u32,
    concurrency: u32,
    ended: BTreeSet<u32>,
    rounds: BTreeMap<u32, u32>,
}

/// Why a request or an announcement is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The session's number is too high.
    #[error("session {session} was not announced: sessions are numbered from 0 and {sessions} were announced")]
    Unannounced {
        /// The number.
        session: u32,
        /// How many were announced.
        sessions: u32,
    },
    /// The session has ended.
    #[error("session {0} has ended")]
    Ended(u32),
    /// The round is before the session's last one.
    #[error("round {round} of session {session} is before its last one, {last}")]
    Backwards {
        /// The session.
        session: u32,
        /// The round.
        round: u32,
        /// The round it was in.
        last: u32,
    },
    /// An announcement came after the first request.
    #[error("sessions are announced before the first request")]
    Late,
    /// An announcement of nothing.
    #[error("at least one session and a concurrency of at least one are wanted")]
    Nothing,
}

impl Lockstep {
    /// `sessions` sessions, of which at most `concurrency` run at a time.
    pub fn new(sessions: u32, concurrency: u32) -> Self {
        Self { sessions, concurrency: concurrency.min(sessions), ended: BTreeSet::new(), rounds: BTreeMap::new() }
    }

    /// Announces other numbers than those the server was started with; only before the first request.
    pub fn begin(&mut self, sessions: u32, concurrency: u32) -> Result<(), Refused> {
        if !self.rounds.is_empty() || !self.ended.is_empty() {
            return Err(Refused::Late);
        }
        if sessions == 0 || concurrency == 0 {
            return Err(Refused::Nothing);
        }
        *self = Self::new(sessions, concurrency);
        Ok(())
    }

    /// Takes note of a request.
    pub fn arrive(&mut self, place: Place) -> Result<(), Refused> {
        let Place { session, round } = place;
        self.announced(session)?;
        if self.ended.contains(&session) {
            return Err(Refused::Ended(session));
        }
        let last = self.rounds.get(&session).copied().unwrap_or(0);
        if round < last {
            return Err(Refused::Backwards { session, round, last });
        }
        self.rounds.insert(session, round);
        Ok(())
    }

    /// Ends a session; it may have ended already.
    pub fn end(&mut self, session: u32) -> Result<(), Refused> {
        self.announced(session)?;
        self.ended.insert(session);
        Ok(())
    }

    /// Ends every session from `first` on: those that will never start.
    pub fn end_from(&mut self, first: u32) {
        self.ended.extend(first..self.sessions);
    }

    /// The sessions without which no step is taken, in order.
    pub fn expected(&self) -> impl Iterator<Item = u32> {
        (0..self.sessions).filter(|session| !self.ended.contains(session)).take(self.concurrency as usize)
    }

    /// Those of the expected sessions that are not among `present`.
    pub fn missing(&self, present: &BTreeSet<u32>) -> Vec<u32> {
        self.expected().filter(|session| !present.contains(session)).collect()
    }

    /// Announced sessions.
    pub fn sessions(&self) -> u32 {
        self.sessions
    }

    /// Sessions that run at a time.
    pub fn concurrency(&self) -> u32 {
        self.concurrency
    }

    /// Sessions that have ended.
    pub fn ended(&self) -> u32 {
        self.ended.len() as u32
    }

    fn announced(&self, session: u32) -> Result<(), Refused> {
        let sessions = self.sessions;
        if session < sessions { Ok(()) } else { Err(Refused::Unannounced { session, sessions }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(session: u32, round: u32) -> Place {
        Place { session, round }
    }

    fn expected(lockstep: &Lockstep) -> Vec<u32> {
        lockstep.expected().collect()
    }

    #[test]
    fn the_lowest_unended_sessions_are_expected() {
        let mut lockstep = Lockstep::new(5, 3);
        assert_eq!(expected(&lockstep), [0, 1, 2]);
        lockstep.end(1).unwrap();
        assert_eq!(expected(&lockstep), [0, 2, 3]);
        lockstep.end(0).unwrap();
        lockstep.end(3).unwrap();
        assert_eq!(expected(&lockstep), [2, 4], "the tail runs with fewer");
        lockstep.end_from(4);
        assert_eq!(expected(&lockstep), [2]);
        lockstep.end(2).unwrap();
        assert!(lockstep.missing(&BTreeSet::new()).is_empty(), "nobody is waited for at the end");
    }

    #[test]
    fn the_order_of_ends_is_irrelevant() {
        let (mut one, mut other) = (Lockstep::new(9, 4), Lockstep::new(9, 4));
        for (first, second) in [(2, 5), (0, 2), (5, 0)] {
            one.end(first).unwrap();
            other.end(second).unwrap();
        }
        assert_eq!(expected(&one), expected(&other));
    }

    #[test]
    fn whoever_is_not_there_is_missing() {
        let lockstep = Lockstep::new(4, 9);
        assert_eq!(lockstep.missing(&BTreeSet::from([1, 3])), [0, 2]);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let mut lockstep = Lockstep::new(3, 3);
        lockstep.begin(2, 1).unwrap();
        assert_eq!(lockstep.begin(0, 1), Err(Refused::Nothing));
        assert_eq!(lockstep.arrive(at(2, 0)), Err(Refused::Unannounced { session: 2, sessions: 2 }));
        lockstep.arrive(at(0, 3)).unwrap();
        assert_eq!(lockstep.arrive(at(0, 2)), Err(Refused::Backwards { session: 0, round: 2, last: 3 }));
        lockstep.arrive(at(0, 3)).unwrap();
        assert_eq!(lockstep.begin(3, 3), Err(Refused::Late));
        lockstep.end(0).unwrap();
        lockstep.end(0).unwrap();
        assert_eq!(lockstep.arrive(at(0, 4)), Err(Refused::Ended(0)));
    }
}
