//! Stopping an arm as soon as a valid sequential test has decided, and never by peeking.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::SessionEnd;
use crate::{
    error::{Error, Result},
    scenario::UntilSpec,
    stats::sequential::{Decision, Sprt, StartOrder, Test},
};

/// A sequential test, checked.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "UntilSpec", into = "UntilSpec")]
pub struct Until {
    spec: UntilSpec,
    test: Test,
}

impl TryFrom<UntilSpec> for Until {
    type Error = Error;

    fn try_from(spec: UntilSpec) -> Result<Self> {
        let test = match spec {
            UntilSpec::Sprt { p0, p1, alpha, beta } => Sprt::new(p0, p1, alpha, beta).map(Test::Sprt),
            UntilSpec::AlwaysValid { limit, confidence } => {
                let open = |share: f64| share > 0.0 && share < 1.0;
                (open(limit) && open(confidence)).then_some(Test::AlwaysValid { limit, confidence })
            }
        };
        let hint = "a sequential test wants 0 < p0 < p1 < 1 and error rates between 0 and 1; p0 is above 0, since else the \
                    first corruption would decide everything";
        let test = test.ok_or_else(|| Error::usage("`until` makes no sequential test").hint(hint))?;
        Ok(Self { spec, test })
    }
}

impl From<Until> for UntilSpec {
    fn from(until: Until) -> Self {
        until.spec
    }
}

/// Where a test stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// The test.
    pub rule: UntilSpec,
    /// What it decided; null while it has not.
    pub decision: Option<Decision>,
    /// Sessions that it saw, in start order, up to its decision.
    pub sessions: u64,
    /// Sessions that it needs in the mean where the rate is `p0`, and where it is `p1`.
    pub expected_sessions: Option<[f64; 2]>,
}

/// One arm under a test: ends go in as they come, and are looked at in start order.
#[derive(Debug, Clone)]
pub struct Watch {
    until: Until,
    order: StartOrder,
    decision: Option<(Decision, u64)>,
    /// Start index of each launch's first session.
    offsets: BTreeMap<u32, u64>,
    next: u64,
}

impl Watch {
    /// Nothing seen yet.
    pub fn new(until: Until) -> Self {
        Self { until, order: StartOrder::default(), decision: None, offsets: BTreeMap::new(), next: 0 }
    }

    /// Another launch of the arm starts with so many sessions.
    pub fn launch(&mut self, launch: u32, sessions: usize) {
        self.offsets.insert(launch, self.next);
        self.next += sessions as u64;
    }

    /// The session that started as the `place`-th of its launch ended. True once the test has decided.
    pub fn end(&mut self, launch: u32, place: u64, end: SessionEnd) -> bool {
        let outcome = match end {
            SessionEnd::Complete => Some(false),
            SessionEnd::Corrupted => Some(true),
            SessionEnd::Transport | SessionEnd::Refused | SessionEnd::Incomplete => None,
            SessionEnd::Interrupted => return self.is_decided(),
        };
        let offset = self.offsets.get(&launch).copied().unwrap_or_default();
        self.order.end(offset + place, outcome);
        if self.decision.is_none() {
            let counts = self.order.counts();
            self.decision = self.until.test.decide(counts).map(|decision| (decision, counts.trials));
        }
        self.is_decided()
    }

    /// Whether the test has decided.
    pub fn is_decided(&self) -> bool {
        self.decision.is_some()
    }

    /// Where the test stands.
    pub fn progress(&self) -> Progress {
        let expected = match self.until.test {
            Test::Sprt(sprt) => Some(sprt.expected_trials()).map(|(low, high)| [low, high]),
            Test::AlwaysValid { .. } => None,
        };
        Progress {
            rule: self.until.spec,
            decision: self.decision.map(|(decision, _)| decision),
            sessions: self.decision.map_or(self.order.counts().trials, |(_, sessions)| sessions),
            expected_sessions: expected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch() -> Watch {
        let spec = UntilSpec::Sprt { p0: 0.01, p1: 0.2, alpha: 0.05, beta: 0.05 };
        let mut watch = Watch::new(spec.try_into().unwrap());
        watch.launch(0, 40);
        watch
    }

    #[test]
    fn clean_sessions_decide_low_and_corrupted_ones_high_in_start_order() {
        let mut clean = watch();
        let at = (0..40).find(|place| clean.end(0, *place, SessionEnd::Complete)).unwrap();
        assert_eq!((clean.progress().decision, clean.progress().sessions), (Some(Decision::Low), at + 1));
        assert!((10..20).contains(&at), "{at}");

        let mut late = watch();
        assert!(!late.end(0, 1, SessionEnd::Corrupted) && !late.end(0, 2, SessionEnd::Corrupted));
        assert!(late.end(0, 0, SessionEnd::Complete));
        assert_eq!(late.progress().decision, Some(Decision::High));
    }

    #[test]
    fn a_test_that_one_corruption_would_decide_is_refused() {
        let spec = UntilSpec::Sprt { p0: 0.0, p1: 0.2, alpha: 0.05, beta: 0.05 };
        assert!(Until::try_from(spec).unwrap_err().cure().is_some());
    }
}
