//! A run: plan, arms, launches, journal, resume.
//!
//! A [`Plan`] is everything that decides a run, resolved from file and flags. The runner turns it into [`RunEvent`]s;
//! the journal, the terminal and every report see nothing else.

mod event;
mod evidence;
pub mod journal;
mod record;
pub mod replay;
mod resolve;
mod resume;
mod runner;
mod settings;
mod until;
mod why;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use event::{Answer, RunEvent, Selfcheck, SessionEnd};
pub use record::CallRecord;
pub use resolve::{Overrides, resolve};
pub use resume::{Todo, remaining};
pub use runner::{Consumer, Finished, Runner, evidence_folder, folder_name, log_name};
pub use settings::check_settings;

pub use until::{Progress, Until, Watch};
pub use why::Races;

use crate::{
    scenario::{Arrival, Expect, Gate, Order, Scenario, Span, TargetSpec},
    seed::Seed,
};

/// Everything that decides a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Name of the matrix or scenario.
    pub name: String,
    /// The run's seed.
    pub seed: u64,
    /// What the sessions are made of.
    pub scenario: Scenario,
    /// How they are sent.
    pub load: Load,
    /// Where they go.
    pub target: TargetSpec,
    /// The configurations.
    pub arms: Vec<Arm>,
    /// In which order launches run.
    pub order: Order,
    /// What lets an arm pass.
    pub gate: Gate,
    /// The part of the sessions to drive.
    pub partition: Option<Partition>,
}

/// How sessions are sent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Whether the engine steps only when every expected session is there.
    pub lockstep: bool,
    /// When sessions start.
    pub arrival: Arrival,
    /// Sessions a second, for open arrivals.
    pub rate: Option<f64>,
    /// Start sessions for this long instead of counting them.
    pub duration: Option<Span>,
    /// Sessions started in this time are not counted.
    pub warmup: Span,
    /// Reach full concurrency over this time.
    pub ramp: Span,
    /// Limit of opening a connection.
    pub connect_timeout: Span,
    /// Limit of silence before the first byte.
    pub first_byte_timeout: Span,
    /// Limit of silence inside a response.
    pub stall_timeout: Span,
    /// Limit of one whole request.
    pub timeout: Span,
    /// Times a request that got no response is sent again.
    pub retries: u32,
    /// Stop an arm once this test has decided.
    #[serde(default)]
    pub until: Option<Until>,
}

/// One configuration, resolved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arm {
    /// The arm's name.
    pub name: String,
    /// What it must show.
    pub expect: Expect,
    /// Environment of its server.
    pub env: BTreeMap<String, String>,
    /// Further arguments of its server.
    pub args: Vec<String>,
    /// Its command, for `command` targets.
    pub command: Vec<String>,
    /// Its address, for `url` targets.
    pub base_url: Option<String>,
    /// Sessions in flight at once.
    pub concurrency: u32,
    /// Sessions a launch.
    pub sessions: u64,
    /// Launches.
    pub repetitions: u32,
    /// Whether the captured graphs are analysed too.
    pub hazards: bool,
}

/// One launch of an arm's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Number in the run, from 0.
    pub number: u32,
    /// Index of its arm.
    pub arm: usize,
    /// Repetition of its arm, from 0.
    pub repetition: u32,
}

/// A part of the sessions: every `of`-th, from the `part`-th.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// Which part, from 1.
    pub part: u64,
    /// Of how many.
    pub of: u64,
}

impl Plan {
    /// The launches in the order in which they run. Their numbers do not depend on the order.
    pub fn launches(&self) -> Vec<Launch> {
        let mut launches = Vec::new();
        for (arm, spec) in self.arms.iter().enumerate() {
            for repetition in 0..spec.repetitions {
                launches.push(Launch { number: launches.len() as u32, arm, repetition });
            }
        }
        if self.order == Order::Interleaved {
            launches.sort_by_key(|launch| (launch.repetition, launch.arm));
        }
        launches
    }

    /// The arm of a launch.
    pub fn arm(&self, launch: u32) -> Option<&Arm> {
        self.launches().into_iter().find(|other| other.number == launch).map(|launch| &self.arms[launch.arm])
    }

    /// The numbers of the sessions that a launch of `arm` drives.
    pub fn sessions(&self, arm: &Arm) -> Vec<u64> {
        let mine = |number: &u64| self.partition.is_none_or(|partition| number % partition.of == partition.part - 1);
        (0..arm.sessions).filter(mine).collect()
    }

    /// The seed of the workload: the same for every arm.
    pub fn workload_seed(&self) -> Seed {
        Seed(self.seed).fork("workload")
    }

    /// The seed of a launch: the same for every arm in one repetition, another in the next.
    pub fn launch_seed(&self, repetition: u32) -> Seed {
        Seed(self.seed).fork("launch").index(u64::from(repetition))
    }

    /// The environment of the server of a launch of `arm`, repetition and number of sessions given.
    pub fn environment(&self, arm: &Arm, repetition: u32, sessions: usize) -> BTreeMap<String, String> {
        let mut env = arm.env.clone();
        env.insert("TOOLSTORM_SEED".into(), self.launch_seed(repetition).to_string());
        // Set where there is none, too: servers inherit what our own environment says.
        let lockstep = if self.load.lockstep { sessions.to_string() } else { String::new() };
        env.insert("TOOLSTORM_LOCKSTEP".into(), lockstep);
        env
    }

    /// SHA-256 of what decides the sessions' content.
    pub fn workload_sha256(&self) -> String {
        digest(&(&self.scenario, self.seed))
    }

    /// SHA-256 of the whole plan, its partition aside.
    pub fn sha256(&self) -> String {
        digest(&Self { partition: None, ..self.clone() })
    }
}

/// SHA-256 of a value's JSON text.
fn digest(value: &impl Serialize) -> String {
    let text = serde_json::to_vec(value).unwrap_or_default();
    crate::scenario::hex(&Sha256::digest(&text))
}
