//! What happens in a run: all that the journal and the reports ever see.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{CallRecord, Races};
pub use crate::drive::SessionEnd;
use crate::validate::parity::Forms;

/// One event; a line of the journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RunEvent {
    /// A run begins, or goes on.
    RunStarted {
        /// The run's identifier.
        id: String,
        /// SHA-256 of the plan: a journal goes on only under the plan that began it.
        plan_sha256: String,
        /// When.
        started_at: String,
        /// What the harness found about itself before, where it was asked to look.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        selfcheck: Option<Selfcheck>,
    },
    /// A server is up and its sessions start. Voids what an earlier start of the launch said about these sessions.
    LaunchStarted {
        /// Number of the launch.
        launch: u32,
        /// Its arm.
        arm: String,
        /// Its seed.
        seed: u64,
        /// The sessions to drive; empty where time decides.
        sessions: Vec<u64>,
        /// The resolved configuration, where the server tells.
        config: Value,
        /// When.
        started_at: String,
    },
    /// A server did not start.
    LaunchFailed {
        /// Number of the launch.
        launch: u32,
        /// Its arm.
        arm: String,
        /// Why.
        reason: String,
    },
    /// A session starts.
    SessionStarted {
        /// Number of the launch.
        launch: u32,
        /// Number of the session.
        session: u64,
        /// Whether it is outside every rate.
        warmup: bool,
        /// From its planned to its actual start.
        schedule_delay_ms: f64,
        /// Of that, waiting for a place.
        client_queue_ms: f64,
        /// Since the launch's first start.
        offset_ms: f64,
    },
    /// A response was judged.
    Answered(Box<Answer>),
    /// The turn of the response before was asked in other forms, outside every rate.
    Compared {
        /// Number of the launch.
        launch: u32,
        /// Number of the session.
        session: u64,
        /// Number of the round.
        round: u32,
        /// What each form is called.
        forms: Forms,
    },
    /// A session is over.
    SessionEnded {
        /// Number of the launch.
        launch: u32,
        /// Number of the session.
        session: u64,
        /// How.
        end: SessionEnd,
        /// Rounds that were answered.
        rounds: u32,
    },
    /// All sessions of a launch are over and its server is gone.
    LaunchEnded {
        /// Number of the launch.
        launch: u32,
        /// False where the run was interrupted.
        complete: bool,
        /// What the server counted.
        server: BTreeMap<String, f64>,
        /// Hazards of the captured graphs, where asked for.
        hazards: Option<u64>,
        /// The tensors that explain them.
        #[serde(default)]
        hazard_tensors: Vec<String>,
        /// Why they are not known, or not all of them, where they were asked for.
        #[serde(default)]
        hazards_failure: Option<String>,
        /// What each probe of the server found first.
        #[serde(default)]
        findings: Vec<String>,
        /// What the server's race log holds, where it has one.
        #[serde(default)]
        races: Option<Races>,
        /// Why it could not be read.
        #[serde(default)]
        races_failure: Option<String>,
        /// From the first session's start to the last one's end.
        wall_ms: f64,
    },
    /// The run is over.
    RunEnded {
        /// Whether it was stopped before its end.
        interrupted: bool,
        /// Its wall time.
        wall_ms: f64,
    },
}

/// A self-check that the harness has passed before a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Selfcheck {
    /// Sessions played.
    pub sessions: u64,
    /// Sessions at once.
    pub concurrency: u64,
    /// Responses judged.
    pub responses: u64,
    /// Of these, faulty ones.
    pub faulty: u64,
    /// Share of the faulty ones that got their verdict and class.
    pub recall: Option<f64>,
    /// Responses that were called worse than they are.
    pub false_positives: u64,
}

/// One judged response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Number of the launch.
    pub launch: u32,
    /// Number of the session.
    pub session: u64,
    /// Number of the round.
    pub round: u32,
    /// Whether the harness itself cut it; such a response is counted apart and judged not.
    pub cancelled: bool,
    /// How often the request was sent again before this response.
    pub retries: u32,
    /// HTTP status; 0 where no response came.
    pub status: u16,
    /// Time from sending to the status line.
    pub first_byte_ms: Option<f64>,
    /// Mean time between output tokens.
    pub tpot_ms: Option<f64>,
    /// Gaps between output events, in microseconds.
    pub itl_us: Vec<u32>,
    /// Of a corrupted response, the race hits behind it in words, where the server has a race log.
    #[serde(default)]
    pub why: Vec<String>,
    /// Its calls; one record with a null name where there are none.
    pub calls: Vec<CallRecord>,
}
