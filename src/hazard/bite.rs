//! Whether a hazard bites here: an estimate from charged durations, on a machine with room for everything at once.

use super::{Capture, Hazard, Order};

/// Time from a finished predecessor to a start inside a launched graph.
const NODE_LATENCY_US: f64 = 1.0;
/// How far one operation's real duration strays from the charged one, as a share of it.
const JITTER: f64 = 0.15;

/// How a hazard behaves where durations are as charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Bite {
    /// The second operation starts before the first has ended: expect damage in most replays.
    Likely,
    /// The slack is within the jitter of the two operations.
    Possible,
    /// The first operation is done well before the second starts: latent.
    Latent,
}

impl Bite {
    /// Lower-case word for reports.
    pub fn label(self) -> &'static str {
        match self {
            Self::Likely => "likely",
            Self::Possible => "possible",
            Self::Latent => "latent",
        }
    }
}

/// Slack of one hazard and what it suggests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Start of the second operation minus end of the first; negative when they overlap in time.
    pub slack_us: f64,
    /// What that suggests.
    pub bite: Bite,
}

/// Start of every node when each begins as soon as its predecessors allow; none where a duration is unknown.
#[derive(Debug)]
pub struct Schedule {
    start_us: Vec<f64>,
    duration_us: Vec<f64>,
}

impl Schedule {
    /// Earliest starts of the capture's nodes, when every node's duration is charged.
    pub fn new(capture: &Capture, order: &Order) -> Option<Self> {
        let duration_us: Vec<f64> = capture.nodes.iter().map(|n| n.duration_us).collect::<Option<_>>()?;
        let mut before = vec![Vec::new(); capture.nodes.len()];
        for &(a, b) in &capture.edges {
            before[b as usize].push(a);
        }
        let mut start_us = vec![0.0_f64; capture.nodes.len()];
        for &node in order.topological() {
            let ready = |&p: &u32| start_us[p as usize] + duration_us[p as usize] + NODE_LATENCY_US;
            start_us[node as usize] = before[node as usize].iter().map(ready).fold(0.0, f64::max);
        }
        Some(Self { start_us, duration_us })
    }

    /// Earliest start of a node.
    pub fn start_us(&self, node: u32) -> f64 {
        self.start_us[node as usize]
    }

    /// Earliest end of a node.
    pub fn end_us(&self, node: u32) -> f64 {
        self.start_us[node as usize] + self.duration_us[node as usize]
    }

    /// The estimate for one hazard.
    pub fn estimate(&self, hazard: &Hazard) -> Estimate {
        let slack_us = self.start_us(hazard.second) - self.end_us(hazard.first);
        let noise_us = JITTER
            * self
                .end_us(hazard.first)
                .max(self.end_us(hazard.second))
                .min(10.0 * (self.duration_us[hazard.first as usize] + self.duration_us[hazard.second as usize]));
        let bite = match slack_us {
            s if s < 0.0 => Bite::Likely,
            s if s < noise_us => Bite::Possible,
            _ => Bite::Latent,
        };
        Estimate { slack_us, bite }
    }
}
