//! What the worker tells about itself, for `/stats`.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{Activity, gate::Gate};
use crate::device::Identity;

/// What the worker tells about itself.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Snapshot {
    /// What the model runs on.
    pub device: Identity,
    /// Steps taken.
    pub steps: u64,
    /// Requests waiting for a place in the batch.
    pub waiting: usize,
    /// Sequences running.
    pub running: usize,
    /// Pages of the cache.
    pub pages: u32,
    /// Pages that running sequences hold.
    pub pages_held: u32,
    /// Pages that only the prefix cache holds.
    pub pages_cached: u32,
    /// Prompt tokens prefilled.
    pub prompt_tokens: u64,
    /// Prompt tokens that the prefix cache served.
    pub cached_tokens: u64,
    /// Tokens decoded.
    pub generation_tokens: u64,
    /// Decode steps by their number of rows.
    pub batch_sizes: BTreeMap<usize, u64>,
    /// What the model tells.
    pub engine: Activity,
    /// Under lockstep, who is expected.
    pub lockstep: Option<LockstepSnapshot>,
}

/// Where lockstep stands.
#[derive(Debug, Clone, Default, Serialize)]
pub struct LockstepSnapshot {
    /// Announced sessions.
    pub sessions: u32,
    /// Sessions that run at a time.
    pub concurrency: u32,
    /// Sessions that have ended.
    pub ended: u32,
    /// Sessions without which no step is taken.
    pub expected: Vec<u32>,
    /// Those of them that have no request queued or running.
    pub missing: Vec<u32>,
    /// Why everything fails since a wait was too long.
    pub stalled: Option<String>,
}

impl LockstepSnapshot {
    pub(super) fn new(gate: &Gate, present: &BTreeSet<u32>) -> Self {
        Self {
            sessions: gate.lockstep.sessions(),
            concurrency: gate.lockstep.concurrency(),
            ended: gate.lockstep.ended(),
            expected: gate.lockstep.expected().collect(),
            missing: gate.lockstep.missing(present),
            stalled: gate.stalled().map(str::to_owned),
        }
    }
}
