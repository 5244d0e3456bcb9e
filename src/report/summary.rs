//! The numbers that every writer prints, and the line of `calls.jsonl`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::parity::Parity;
use crate::validate::{Class, Quirk};
pub use crate::{
    run::{CallRecord, Progress, Selfcheck},
    scenario::Expect,
};

/// Name and version of the summary's format. Fields may be added under one number; none changes or goes.
pub const SCHEMA: &str = "toolstorm-summary/1";

/// The answer of a gate, for an arm and for a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Every expectation was met.
    Pass,
    /// Corruption above the allowance, or none where it was expected.
    Fail,
    /// Too little was seen to say.
    Inconclusive,
}

/// One finished run, as `summary.json` has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// [`SCHEMA`].
    pub schema: String,
    /// The answer of the whole run.
    pub verdict: Outcome,
    /// Why, in one sentence.
    pub reason: String,
    /// The result folder.
    pub result_dir: Option<String>,
    /// Wall time of the run in seconds.
    pub wall_s: f64,
    /// Name of the matrix or scenario.
    pub name: String,
    /// The version of toolstorm that ran it.
    pub version: String,
    /// The run's seed.
    pub seed: u64,
    /// SHA-256 of everything that decides the workload: two runs with one value sent the same sessions.
    pub workload_sha256: String,
    /// The part of the sessions that was driven: `slice:1/4`.
    pub partition: Option<String>,
    /// Whether the run was stopped before its end.
    pub interrupted: bool,
    /// What the harness found about itself before the run, where it was asked to look.
    #[serde(default)]
    pub selfcheck: Option<Selfcheck>,
    /// Confidence of every interval and bound.
    pub confidence: f64,
    /// The arms, in the file's order.
    pub arms: Vec<ArmSummary>,
}

/// One arm of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ArmSummary {
    /// The arm's name.
    pub name: String,
    /// The environment of its server.
    pub env: BTreeMap<String, String>,
    /// Extra arguments of its server.
    #[serde(default)]
    pub args: Vec<String>,
    /// Sessions in flight at once.
    pub concurrency: u32,
    /// Launches of its server.
    pub launches: u32,
    /// Launches that failed.
    pub launches_failed: u32,
    /// Sessions that the plan has.
    pub sessions_planned: u64,
    /// Planned sessions that were never driven; none where time or a sequential test decides how many there are.
    #[serde(default)]
    pub sessions_missing: u64,
    /// Sessions that were started, warm-up aside.
    pub sessions_started: u64,
    /// Sessions in the denominator: in start order, up to the first that did not end, less those that infrastructure
    /// cut short.
    pub sessions_judged: u64,
    /// Of these, sessions with a corrupted call.
    pub sessions_corrupted: u64,
    /// Corrupted over judged; null where nothing was judged.
    pub session_corruption_rate: Option<f64>,
    /// What the launches say about each other, where there are at least two.
    #[serde(default)]
    pub launch_effect: Option<LaunchEffect>,
    /// Two-sided Clopper–Pearson bounds of that rate; under a sequential test bounds that hold at every look.
    pub session_corruption_rate_interval: Option<[f64; 2]>,
    /// One-sided Clopper–Pearson upper bound of that rate; under a sequential test one that holds at every look.
    pub session_corruption_rate_upper: Option<f64>,
    /// Calls in the denominator: before and including the first corruption of their session.
    pub calls: u64,
    /// Of these, corrupted ones.
    pub calls_corrupted: u64,
    /// Corrupted over judged calls.
    pub corruption_rate: Option<f64>,
    /// Bounds of that rate by a bootstrap of whole sessions; where none or all of the calls are corrupted, those of the
    /// session rate.
    #[serde(default)]
    pub corruption_rate_interval: Option<[f64; 2]>,
    /// Rounds in the denominator.
    pub rounds: u64,
    /// Of these, corrupted ones.
    pub rounds_corrupted: u64,
    /// Corrupted over judged rounds.
    pub round_corruption_rate: Option<f64>,
    /// In which round sessions were first corrupted: round to sessions.
    pub first_corruption_round: BTreeMap<u32, u64>,
    /// Calls after the first corruption of their session, outside every rate.
    pub calls_after_corruption: u64,
    /// Calls by class.
    pub classes: BTreeMap<Class, u64>,
    /// Responses outside the denominator, by class.
    pub infra: BTreeMap<Class, u64>,
    /// What the first of these said.
    #[serde(default)]
    pub infra_first: Option<String>,
    /// Tolerated deviations.
    pub quirks: BTreeMap<Quirk, u64>,
    /// Responses that the harness itself cancelled.
    pub cancelled: u64,
    /// Responses with `finish_reason: tool_calls`.
    pub count_finish_reason_tool_calls: u64,
    /// Calls that are JSON and meet their schema.
    pub count_successful_tool_call: u64,
    /// Successful over all calls.
    pub schema_accuracy: Option<f64>,
    /// Finish reasons other than `stop` and `tool_calls`.
    pub finish_others_detail: BTreeMap<String, u64>,
    /// Hazards of the captured graphs, where the arm asked for the analysis.
    pub hazards: Option<u64>,
    /// The tensors whose early drop or missing event explains them.
    #[serde(default)]
    pub hazard_tensors: Vec<String>,
    /// Why they are not known, or not all of them, where the arm asked for them.
    #[serde(default)]
    pub hazards_failure: Option<String>,
    /// Race hits that the engine logged, where it says.
    pub race_hits: Option<u64>,
    /// These by kind: who read what, and who wrote over it; null where no server has a race log.
    #[serde(default)]
    pub races: Option<BTreeMap<String, u64>>,
    /// Why the race log of a launch could not be read.
    #[serde(default)]
    pub races_failure: Option<String>,
    /// What each probe of the engine found first, in the first launch in which one found something.
    #[serde(default)]
    pub findings: Vec<String>,
    /// Share of busy time with two or more streams active, where the engine says.
    pub overlap_share: Option<f64>,
    /// Mean virtual time of a decode step, where the engine says.
    pub virtual_step_us: Option<f64>,
    /// Other counters of the server at the end: probes, cache, queue.
    #[serde(default)]
    pub server: BTreeMap<String, f64>,
    /// `{mean,median,p90,p95,p99}_{ttft,tpot,itl,e2el}_ms`, `client_queue_time`, `schedule_delay`, `requested_rate`,
    /// `achieved_rate`, `stall_pct`.
    #[serde(flatten)]
    pub latency: BTreeMap<String, f64>,
    /// Where the arm's sequential test stands, if it has one.
    #[serde(default)]
    pub sequential: Option<Progress>,
    /// How the forms of the same turns agree, where they were asked.
    #[serde(default)]
    pub parity: Option<Parity>,
    /// What the arm must show.
    pub expect: Expect,
    /// Whether it did.
    pub verdict: Outcome,
    /// Why, in one sentence.
    pub reason: String,
}

/// How alike the sessions of one launch are.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LaunchEffect {
    /// Launches with judged sessions.
    pub launches: usize,
    /// The correlation of sessions in one launch; null where nothing varies.
    pub correlation: Option<f64>,
    /// By what factor the variance of the session rate exceeds that of independent sessions.
    pub design_effect: f64,
    /// Bounds of the session rate that allow for it (Korn and Graubard).
    pub interval: [f64; 2],
}

impl Summary {
    /// The arm called `name`.
    pub fn arm(&self, name: &str) -> Option<&ArmSummary> {
        self.arms.iter().find(|arm| arm.name == name)
    }
}
