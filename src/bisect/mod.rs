//! The smallest set of toggles that turns good into bad, under noise.
//!
//! A probe is a stress run with an uncertain outcome, so the search keeps a probability for every explanation it can
//! think of ([`hypothesis`]), picks the probe that tells most about the answer for its price ([`choose`]), and stops when
//! one set has the wanted probability and has been confirmed against its complement ([`search`]). Everything but the
//! oracle is pure: the next probe is a function of the plan and of the outcomes so far, which is also how a search is
//! resumed.

pub mod choose;
pub mod hypothesis;
pub mod oracle;
pub mod posterior;
pub mod search;
pub mod state;
pub mod toggle;

use serde::{Deserialize, Serialize};

use crate::{error::Result, seed::Seed, stats::Counts};

pub use search::{Search, Step};

/// Toggles, or groups of them, that one search tells apart; beyond this they are searched in groups.
pub const MOST_TOGGLES: usize = 20;

/// Probes side by side at most: the more are chosen before their outcomes are known, the less each of them tells.
pub const MOST_JOBS: usize = 4;

/// A set of toggles, or of groups of them, that are at their bad value; the others are at their good one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Subset(pub u32);

impl Subset {
    /// Every one of `n`.
    pub fn full(n: usize) -> Self {
        Self(((1_u64 << n) - 1) as u32)
    }

    /// Just `index`.
    pub fn one(index: usize) -> Self {
        Self(1 << index)
    }

    /// Whether `index` is in it.
    pub fn has(self, index: usize) -> bool {
        self.0 >> index & 1 == 1
    }

    /// Whether all of `other` are in it.
    pub fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether any of `other` is in it.
    pub fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// With `index` put to its other value.
    #[must_use]
    pub fn flip(self, index: usize) -> Self {
        Self(self.0 ^ 1 << index)
    }

    /// What is in it and not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// How many are in it.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether it is the good end.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The members in order.
    pub fn members(self) -> impl Iterator<Item = usize> {
        (0..32).filter(move |&index| self.has(index))
    }
}

/// What a search is told.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Number of toggles.
    pub toggles: usize,
    /// Probability that the answer must reach.
    pub confidence: f64,
    /// Sessions after which the search gives up.
    pub max_sessions: u64,
    /// Sessions of the smallest probe.
    pub sessions_per_probe: u64,
    /// Probes that run side by side.
    pub jobs: usize,
    /// Seed of the choice among equals.
    pub seed: Seed,
}

/// One probe: the toggles at their bad value, and how many sessions to spend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// Numbers of the toggles at their bad value.
    pub bad: Vec<usize>,
    /// Sessions to run in one fresh server.
    pub sessions: u64,
    /// Outcomes that were recorded when it was chosen; probes of one step share it.
    pub known: u64,
}

/// What a probe showed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Corrupted sessions of judged ones.
    Judged(Counts),
    /// The server did not start, or nothing could be judged: no evidence either way.
    Skipped(String),
}

/// Whoever runs a probe: the real one starts a server, a simulated one draws.
pub trait Trial {
    /// Runs `probe` in a fresh server. An error ends the search; a server that does not start is [`Outcome::Skipped`].
    fn run(&mut self, probe: &Probe) -> Result<Outcome>;

    /// Runs several probes, side by side where that is possible; their outcomes in the same order.
    fn run_all(&mut self, probes: &[Probe]) -> Result<Vec<Outcome>> {
        probes.iter().map(|probe| self.run(probe)).collect()
    }
}

/// How a search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// The culprit reached the confidence and was confirmed.
    Found,
    /// The sessions ran out first; the culprit is the best guess.
    Undecided,
    /// The bad end was never seen to fail.
    BadIsClean,
    /// The good end fails about as often as the bad one.
    GoodIsCorrupt,
    /// The good or the bad end could not be run.
    EndSkipped,
}

/// What a search found.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// How it ended.
    pub ending: Ending,
    /// The smallest set that turns good into bad: numbers of toggles.
    pub culprit: Vec<usize>,
    /// The probability that it is one.
    pub posterior: f64,
    /// Other sets that turn good into bad on their own.
    pub alternatives: Vec<Vec<usize>>,
    /// The probability of each toggle to matter to the cause.
    pub inclusion: Vec<f64>,
    /// Toggles whose probability to matter is at most one minus the confidence.
    pub irrelevant: Vec<usize>,
    /// Sessions spent.
    pub sessions: u64,
    /// Corrupted sessions with only the culprit at its bad value.
    pub alone: Counts,
    /// Corrupted sessions with everything but the culprit at its bad value.
    pub complement: Counts,
    /// Corrupted sessions at the good end.
    pub good: Counts,
    /// Corrupted sessions at the bad end.
    pub bad: Counts,
}

/// Runs a search to its end with `trial`, telling `watch` after every probe.
pub fn run(
    search: &mut Search,
    trial: &mut impl Trial,
    mut watch: impl FnMut(&Search, &Probe, &Outcome) -> Result<()>,
) -> Result<Answer> {
    loop {
        match search.step() {
            Step::Done(answer) => return Ok(answer),
            Step::Probe(probes) => {
                let outcomes = trial.run_all(&probes)?;
                for (probe, outcome) in probes.iter().zip(&outcomes) {
                    search.record(probe, outcome);
                    watch(search, probe, outcome)?;
                }
            }
        }
    }
}
