//! Sessions in flight: pacing, the client, latencies.
//!
//! [`drive`] sends one launch's sessions to an [`Endpoint`] and reports [`Happening`]s. It knows HTTP and nothing of the
//! server behind it. Every wait is bounded, and everything ends at once when the run is stopped.

mod client;
mod conversation;
mod latency;
mod pacing;
mod pilot;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

pub use client::{Client, Endpoint, Limits, Reply, Secret};
pub use conversation::{Common, Conversation, Step, Turn};
pub use latency::Timing;
pub use pilot::{Job, drive, judge};

use crate::validate::{
    Judgement,
    parity::{Form, Forms},
};

/// How a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SessionEnd {
    /// All rounds were answered and intact.
    Complete,
    /// A call was corrupted.
    Corrupted,
    /// The transport failed.
    Transport,
    /// The server refused.
    Refused,
    /// An answer was cut by a limit.
    Incomplete,
    /// The run was stopped.
    Interrupted,
}

/// What the driver reports.
#[derive(Debug)]
pub enum Happening {
    /// A session starts.
    Started {
        /// Its number.
        session: u64,
        /// Whether it belongs to the warm-up.
        warmup: bool,
        /// From its planned to its actual start.
        schedule_delay_ms: f64,
        /// Of that, waiting for a place.
        client_queue_ms: f64,
        /// Since the driver's start.
        offset_ms: f64,
    },
    /// A response was judged.
    Exchanged(Box<Exchange>),
    /// The same turn was asked in other forms.
    Compared(Box<Comparison>),
    /// A session is over.
    Ended {
        /// Its number.
        session: u64,
        /// How.
        end: SessionEnd,
        /// Rounds that were answered.
        rounds: u32,
    },
    /// A session cannot be made or announced: the launch is pointless.
    Failed(crate::error::Error),
}

/// One request, its response and the verdict.
#[derive(Debug)]
pub struct Exchange {
    /// Number of the session.
    pub session: u64,
    /// Whether it belongs to the warm-up.
    pub warmup: bool,
    /// The session's nonce.
    pub nonce: String,
    /// The request.
    pub turn: Turn,
    /// The response.
    pub reply: Reply,
    /// When its parts came.
    pub timing: Timing,
    /// The verdict.
    pub judgement: Judgement,
    /// Whether the session had been corrupted before.
    pub after_corruption: bool,
    /// How often the request was sent again before.
    pub retries: u32,
    /// Sessions with a request in flight when this one was sent or when it ended.
    pub neighbours: BTreeSet<u64>,
    /// Requests in flight when this one was sent, itself included.
    pub in_flight: u32,
    /// For a corrupted response, what the server's race log has of the session, where it has one, or why it could not be
    /// read.
    pub races: Option<Result<serde_json::Value, String>>,
}

/// The answers to one turn in all its forms.
#[derive(Debug)]
pub struct Comparison {
    /// Number of the session.
    pub session: u64,
    /// Number of the round.
    pub round: u32,
    /// The verdicts, that on the turn as it was first asked included.
    pub forms: Forms,
    /// The further exchanges. They are outside every rate and no part of the history.
    pub further: Vec<(Form, Exchange)>,
}
