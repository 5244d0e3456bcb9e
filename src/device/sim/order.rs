//! In which order ready ops run: the only choice that the virtual GPU leaves open.

use rand::{RngExt, seq::SliceRandom};
use rand_pcg::Pcg64Mcg;
use std::{fmt, str::FromStr};

use super::token::Token;
use crate::{device::StreamId, error::Error, seed::Seed};

/// Longest time for which the adversary holds an op back, ns: far more than a decode step takes.
const HOLD_NS: u64 = 10_000_000;
/// The adversary holds one op in this many.
const HOLD_ONE_IN: u32 = 8;

/// Chooses among what the edges allow.
pub(crate) trait Order {
    /// A program of these streams' ops begins; `seed` is this launch's alone.
    fn begin(&mut self, seed: Seed, streams: &[StreamId]);

    /// How long `op` is held back once its edges are met, ns.
    fn hold_ns(&mut self, _op: u32) -> u64 {
        0
    }

    /// True where ops run one at a time as [`Order::pick`] says; else the machine runs all that are ready, first come
    /// first served.
    fn serial(&self) -> bool {
        false
    }

    /// Which of the ready ops (ascending, never empty) runs next.
    fn pick(&mut self, _ready: &[u32]) -> usize {
        0
    }
}

/// An order by name, as `TOOLSTORM_ORDER` spells it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Schedule {
    /// The machine's own order, under seeded jitter.
    #[default]
    Random,
    /// Probabilistic concurrency testing: streams have random priorities, and at `depth - 1` random ops the running
    /// stream's priority drops below all others. Ops run one at a time.
    Pct {
        /// How many orderings the bug needs, at least 1.
        depth: u32,
    },
    /// Ops run one at a time in the order in which the host enqueued them.
    Host,
    /// Ops picked at random are held back for far longer than a step, as their edges allow.
    Adversarial,
    /// The seed and the order of a token; the launch that it names must take the same interleaving.
    Replay(Token),
    /// This order, by two virtual GPUs that must agree ([`Rerun`](super::Rerun)); one alone just follows it.
    Twice(Box<Schedule>),
}

impl Schedule {
    /// The order that one virtual GPU follows, and whether there are two of them.
    pub fn split(&self) -> (&Self, bool) {
        if let Self::Twice(order) = self { (order, true) } else { (self, false) }
    }

    pub(super) fn order(&self) -> Box<dyn Order> {
        match self {
            Self::Random => Box::new(Machine),
            Self::Pct { depth } => Box::new(Pct::new(*depth)),
            Self::Host => Box::new(Host),
            Self::Adversarial => Box::new(Adversary { rng: Seed(0).rng() }),
            Self::Replay(token) => token.schedule().order(),
            Self::Twice(order) => order.order(),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Random => f.write_str("random"),
            Self::Pct { depth } => write!(f, "pct:{depth}"),
            Self::Host => f.write_str("host"),
            Self::Adversarial => f.write_str("adversarial"),
            Self::Replay(token) => write!(f, "replay:{token}"),
            Self::Twice(order) => write!(f, "twice:{order}"),
        }
    }
}

impl FromStr for Schedule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text.split_once(':') {
            None if text == "random" => Ok(Self::Random),
            None if text == "host" => Ok(Self::Host),
            None if text == "adversarial" => Ok(Self::Adversarial),
            Some(("pct", depth)) => match depth.parse() {
                Ok(depth) if depth > 0 => Ok(Self::Pct { depth }),
                _ => Err(Error::usage(format!("`{depth}` is no bug depth in the order `{text}`"))
                    .hint("a whole number from 1 on: pct:3")),
            },
            Some(("replay", token)) => Ok(Self::Replay(token.parse()?)),
            Some(("twice", order)) if !order.starts_with("twice") => Ok(Self::Twice(Box::new(order.parse()?))),
            _ => Err(Error::usage(format!("`{text}` is no order"))
                .hint("known orders: random, pct:<depth>, host, adversarial, replay:<token>, twice:<order>")),
        }
    }
}

struct Machine;

impl Order for Machine {
    fn begin(&mut self, _seed: Seed, _streams: &[StreamId]) {}
}

struct Host;

impl Order for Host {
    fn begin(&mut self, _seed: Seed, _streams: &[StreamId]) {}

    fn serial(&self) -> bool {
        true
    }
}

struct Adversary {
    rng: Pcg64Mcg,
}

impl Order for Adversary {
    fn begin(&mut self, seed: Seed, _streams: &[StreamId]) {
        self.rng = seed.rng();
    }

    fn hold_ns(&mut self, _op: u32) -> u64 {
        if self.rng.random_ratio(1, HOLD_ONE_IN) { self.rng.random_range(1..=HOLD_NS) } else { 0 }
    }
}

struct Pct {
    depth: u32,
    streams: Vec<StreamId>,
    /// By stream; the highest runs.
    priorities: Vec<u32>,
    /// Counts of ops run at which the running stream is demoted, descending.
    changes: Vec<u32>,
    run: u32,
}

impl Pct {
    fn new(depth: u32) -> Self {
        Self { depth, streams: Vec::new(), priorities: Vec::new(), changes: Vec::new(), run: 0 }
    }
}

impl Order for Pct {
    fn begin(&mut self, seed: Seed, streams: &[StreamId]) {
        let mut rng = seed.rng();
        let count = streams.iter().map(|stream| stream.0 + 1).max().unwrap_or(0);
        self.streams = streams.to_vec();
        self.priorities = (self.depth..self.depth + count).collect();
        self.priorities.shuffle(&mut rng);
        self.changes = (1..self.depth).map(|_| rng.random_range(0..streams.len().max(1) as u32)).collect();
        self.changes.sort_unstable_by(|a, b| b.cmp(a));
        self.run = 0;
    }

    fn serial(&self) -> bool {
        true
    }

    fn pick(&mut self, ready: &[u32]) -> usize {
        loop {
            let stream = |op: u32| self.streams[op as usize].0 as usize;
            let rank = |&at: &usize| (self.priorities[stream(ready[at])], ready.len() - at);
            let highest = (0..ready.len()).max_by_key(rank).unwrap_or(0);
            if self.changes.last().is_some_and(|&change| change <= self.run) {
                self.changes.pop();
                self.priorities[stream(ready[highest])] = self.changes.len() as u32;
                continue;
            }
            self.run += 1;
            return highest;
        }
    }
}
