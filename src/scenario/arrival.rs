//! When sessions start.

use serde::{Deserialize, Serialize};

/// The arrival process of sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Arrival {
    /// A session starts when another one ends: a fixed number is in flight.
    #[default]
    Closed,
    /// One every `1 / rate` seconds, whatever the server does.
    Constant,
    /// Exponential gaps of mean `1 / rate` seconds.
    Poisson,
    /// `concurrency` at once, then a pause that keeps the mean rate.
    Burst,
}
