//! Statistics of rare failures. Pure: no I/O, no clock, nothing of ours imported; each formula's doc names its source.
//!
//! The sampling unit is the session, since the calls inside one are correlated.

pub mod cluster;
pub mod exact;
pub mod interval;
pub mod position;
pub mod power;
pub mod sequential;

use serde::{Deserialize, Serialize};

/// Events among trials: corrupted sessions of judged ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// How often it happened.
    pub events: u64,
    /// How often it could have happened.
    pub trials: u64,
}

impl Counts {
    /// `events` of `trials`.
    ///
    /// # Panics
    /// When there are more events than trials.
    pub fn new(events: u64, trials: u64) -> Self {
        assert!(events <= trials, "{events} events of {trials} trials");
        Self { events, trials }
    }

    /// Events per trial; `None` without trials.
    pub fn rate(self) -> Option<f64> {
        (self.trials > 0).then(|| self.events as f64 / self.trials as f64)
    }
}

impl std::ops::Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { events: self.events + other.events, trials: self.trials + other.trials }
    }
}

/// A closed interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Lower end.
    pub lower: f64,
    /// Upper end.
    pub upper: f64,
}

impl Interval {
    /// What is known of a proportion before anything is observed.
    pub const UNIT: Self = Self { lower: 0.0, upper: 1.0 };

    /// Whether `value` lies inside, ends included.
    pub fn contains(self, value: f64) -> bool {
        (self.lower..=self.upper).contains(&value)
    }
}
