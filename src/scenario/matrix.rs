//! The keys of a matrix file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Arrival, Range, Span};
use crate::error::{Error, Result};

/// A matrix file: one workload, several configurations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matrix {
    /// The matrix's name.
    pub name: String,
    /// The scenario: a shipped one's name, or a path from this file.
    pub scenario: String,
    /// Sessions an arm.
    #[serde(default = "default_sessions")]
    pub sessions: u64,
    /// Sessions in flight at once.
    #[serde(default = "default_concurrency")]
    pub concurrency: u32,
    /// Rounds a session, in the place of the scenario's.
    pub rounds: Option<Range>,
    /// Bytes of a session's first prompt, in the place of the scenario's.
    pub context: Option<Range>,
    /// In which order launches run.
    #[serde(default)]
    pub order: Order,
    /// Launches an arm.
    #[serde(default = "one")]
    pub repetitions: u32,
    /// Make the whole run a function of its seeds (built-in target only).
    #[serde(default)]
    pub lockstep: bool,
    /// The run's seed.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// When sessions start.
    #[serde(default)]
    pub arrival: Arrival,
    /// Sessions a second, for open arrivals.
    pub rate: Option<f64>,
    /// Start sessions for this long instead of counting them.
    pub duration: Option<Span>,
    /// Sessions started in this time are not counted.
    #[serde(default)]
    pub warmup: Span,
    /// Reach full concurrency over this time.
    #[serde(default)]
    pub ramp: Span,
    /// Limit of opening a connection.
    #[serde(default = "default_connect_timeout")]
    pub connect_timeout: Span,
    /// Limit of silence before the first byte.
    #[serde(default = "default_first_byte_timeout")]
    pub first_byte_timeout: Span,
    /// Limit of silence inside a response.
    #[serde(default = "default_stall_timeout")]
    pub stall_timeout: Span,
    /// Limit of one whole request.
    #[serde(default = "default_timeout")]
    pub timeout: Span,
    /// Times a request that got no response is sent again.
    #[serde(default)]
    pub retries: u32,
    /// Where the load goes.
    #[serde(default)]
    pub target: TargetSpec,
    /// Environment of every arm's server.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The configurations.
    #[serde(default, rename = "arm")]
    pub arms: Vec<ArmSpec>,
    /// Cartesian product, instead of or times the arms.
    #[serde(default)]
    pub axes: Axes,
    /// What lets an arm pass.
    #[serde(default)]
    pub gate: Gate,
    /// What to search for.
    pub bisect: Option<BisectSpec>,
    /// Stop an arm once this test has decided.
    pub until: Option<UntilSpec>,
}

/// The `[until]` table: a sequential test of the session corruption rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rule", rename_all = "kebab-case", deny_unknown_fields)]
pub enum UntilSpec {
    /// Wald's probability ratio test of `p0` against `p1`.
    Sprt {
        /// The rate that is good enough; above 0.
        p0: f64,
        /// The rate that is not.
        p1: f64,
        /// Share of false alarms.
        alpha: f64,
        /// Share of misses.
        beta: f64,
    },
    /// A bound that holds at every look.
    AlwaysValid {
        /// The rate in question.
        limit: f64,
        /// Confidence of each conclusion.
        confidence: f64,
    },
}

const fn default_sessions() -> u64 {
    80
}

const fn default_concurrency() -> u32 {
    64
}

const fn one() -> u32 {
    1
}

const fn default_seed() -> u64 {
    1
}

const fn default_connect_timeout() -> Span {
    Span::seconds(10)
}

const fn default_first_byte_timeout() -> Span {
    Span::seconds(600)
}

const fn default_stall_timeout() -> Span {
    Span::seconds(60)
}

const fn default_timeout() -> Span {
    Span::seconds(600)
}

/// In which order launches run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// Every arm once, then every arm again: drift of the machine hits all alike.
    #[default]
    Interleaved,
    /// All repetitions of an arm before the next arm.
    Sequential,
}

/// The kind of target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TargetKind {
    /// This very binary's `serve`, one child process a launch.
    #[default]
    Builtin,
    /// A command that starts a server, one process group a launch.
    Command,
    /// A server that someone else runs.
    Url,
}

/// Where the load goes.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TargetSpec {
    /// The kind.
    pub kind: TargetKind,
    /// `command`: program and arguments; `{port}`, `{model}` and `{arm}` are filled in.
    pub command: Vec<String>,
    /// `builtin`: further arguments of `serve`.
    pub args: Vec<String>,
    /// When the server is ready.
    pub ready: Ready,
    /// How long the server may take to end before its group is killed.
    pub stop_timeout: Option<Span>,
    /// Model name to ask for; the server's first one where none is given.
    pub model: Option<String>,
    /// `url`: address of the server, with or without `/v1`.
    pub base_url: Option<String>,
    /// Name of the variable that holds the API key.
    pub api_key_env: Option<String>,
    /// Members to add to every request body.
    pub extra_body: serde_json::Map<String, Value>,
}

/// When a server counts as ready.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Ready {
    /// The path that answers with a success status.
    pub path: String,
    /// How long it may take.
    pub timeout: Span,
}

impl Default for Ready {
    fn default() -> Self {
        Self { path: "/health".into(), timeout: Span::seconds(600) }
    }
}

/// One configuration; an absent key takes the matrix's value.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ArmSpec {
    /// The arm's name.
    pub name: String,
    /// What it must show.
    pub expect: Expect,
    /// Environment of its server, over the matrix's.
    pub env: BTreeMap<String, String>,
    /// Further arguments of its server.
    pub args: Vec<String>,
    /// Another command.
    pub command: Option<Vec<String>>,
    /// Another concurrency.
    pub concurrency: Option<u32>,
    /// Another number of sessions.
    pub sessions: Option<u64>,
    /// Another number of launches.
    pub repetitions: Option<u32>,
    /// Another address, for `url` targets.
    pub base_url: Option<String>,
    /// Analyse the captured graphs too.
    pub hazards: bool,
}

/// What an arm must show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Expect {
    /// The gate applies.
    #[default]
    Clean,
    /// It must show corruption.
    Corrupt,
    /// Nothing: the arm is only reported.
    Report,
}

/// Cartesian product over the arms.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Axes {
    /// Values of the concurrency.
    pub concurrency: Vec<u32>,
    /// Values of environment variables.
    pub env: BTreeMap<String, Vec<String>>,
}

/// What lets an arm pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Gate {
    /// Corrupted sessions that an arm may have.
    pub max_corruption: u64,
    /// Largest one-sided upper bound of the session corruption rate.
    pub max_upper: f64,
    /// Largest share of responses lost to transport or refused.
    pub max_infra: f64,
    /// Fewer judged sessions than this are inconclusive.
    pub min_sessions: u64,
    /// Confidence of the bounds.
    pub confidence: f64,
    /// Further conditions on the summary's fields: `corruption_rate_upper<0.01`.
    pub thresholds: Vec<String>,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            max_corruption: 0,
            max_upper: 0.05,
            max_infra: 0.01,
            min_sessions: 1,
            confidence: 0.95,
            thresholds: Vec::new(),
        }
    }
}

impl Gate {
    /// Refuses numbers that no run can be held against; not being finite, some could not even be written down.
    pub(crate) fn check(&self) -> Result<()> {
        for (key, share) in [("max_upper", self.max_upper), ("max_infra", self.max_infra)] {
            if !(0.0..=1.0).contains(&share) {
                return Err(Error::usage(format!("`gate.{key}` is {share}, not a share between 0 and 1")));
            }
        }
        if !(self.confidence > 0.5 && self.confidence < 1.0) {
            return Err(Error::usage(format!(
                "`gate.confidence` is {}: it must lie between 0.5 and 1",
                self.confidence
            )));
        }
        Ok(())
    }
}

/// The `[bisect]` table.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BisectSpec {
    /// The good configuration: an arm's name or an environment.
    pub good: Option<Endpoint>,
    /// The bad configuration.
    pub bad: Option<Endpoint>,
    /// What may differ; all differences of good and bad where none is given.
    pub toggles: Vec<Toggle>,
    /// Posterior at which the search ends.
    pub confidence: Option<f64>,
    /// Sessions that the search may spend.
    pub max_sessions: Option<u64>,
    /// Sessions of one probe.
    pub sessions_per_probe: Option<u64>,
}

/// One end of a bisection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected an arm's name or a table of environment variables")]
pub enum Endpoint {
    /// An arm of the matrix.
    Arm(String),
    /// An environment.
    Env(BTreeMap<String, String>),
}

/// One difference between good and bad.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Toggle {
    /// An environment variable.
    pub name: Option<String>,
    /// Or an argument of the server.
    pub arg: Option<String>,
    /// Its value in the good configuration; absent means unset.
    pub good: Option<String>,
    /// Its value in the bad configuration; absent means unset.
    pub bad: Option<String>,
}
