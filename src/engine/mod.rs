//! The built-in decode engine: submit a prompt, get a token stream.
//!
//! The HTTP server parses a request into a prompt, the worker schedules it, leases its pages and has a [`TokenModel`]
//! prefill and decode it, and the tokens come back one event each.

mod batch;
pub mod cache;
pub mod canary;
pub mod chat;
pub mod config;
pub mod differential;
pub mod findings;
mod forward;
pub mod gate;
pub mod geometry;
mod graphs;
pub mod handle;
pub mod host;
pub mod lockstep;
pub mod metrics;
pub mod model;
pub mod parser;
#[cfg(test)]
mod properties;
pub mod races;
pub mod request;
pub mod scheduler;
pub mod selftest;
mod sequence;
pub mod server;
pub mod snapshot;
pub mod toggles;
pub mod tokenizer;
pub mod weights;
mod worker;

use std::ops::Range;

use serde::Serialize;

use crate::{device::Identity, error::Result};
use canary::CanaryHit;
use differential::Divergence;
use races::StepRaces;
use tokenizer::Token;

/// What the worker asks of a model: fill the caches with a part of a prompt, decode one token a row, tell what happened.
pub trait TokenModel {
    /// Writes the cache entries of a part of a prompt.
    fn prefill(&mut self, chunk: &Prefill<'_>) -> Result<()>;

    /// Writes the cache entries of every row's token and returns every row's next token.
    fn decode(&mut self, rows: &[DecodeRow<'_>]) -> Result<Vec<Token>>;

    /// Takes the race hits of the last decode step; only the virtual GPU can know them.
    fn take_races(&mut self) -> Option<StepRaces> {
        None
    }

    /// What happened so far.
    fn activity(&self) -> Activity;

    /// The device behind it.
    fn device(&self) -> Identity {
        Identity::default()
    }
}

/// A part of a prompt to prefill.
#[derive(Debug, Clone)]
pub struct Prefill<'a> {
    /// All tokens of the sequence from position 0; at least those up to the range's end.
    pub tokens: &'a [Token],
    /// The positions to process.
    pub range: Range<u32>,
    /// The page of each run of [`cache::PAGE_TOKENS`] positions.
    pub page_table: &'a [u32],
    /// The page of the sliding window's ring.
    pub window_page: u32,
    /// Whether the positions before the range came from the prefix cache, so that window and rings must be rebuilt from
    /// the tokens before it.
    pub resumed: bool,
    /// The session, for logs.
    pub session: Option<u32>,
}

/// One row of a decode step.
#[derive(Debug, Clone)]
pub struct DecodeRow<'a> {
    /// The newest token.
    pub token: Token,
    /// Its position.
    pub position: u32,
    /// The page of each run of [`cache::PAGE_TOKENS`] positions.
    pub page_table: &'a [u32],
    /// The page of the sliding window's ring.
    pub window_page: u32,
    /// The session, for logs.
    pub session: Option<u32>,
}

/// What happened in a model so far; what a backend cannot tell is `None`.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Activity {
    /// Decode steps.
    pub steps: u64,
    /// Share of the busy time in which two or more streams were active.
    pub overlap_share: Option<f64>,
    /// Mean time of a decode step on the device's clock, virtual or real, in microseconds.
    pub virtual_step_us: Option<f64>,
    /// Seconds that a real device was at work since set-up: decode steps, prefill and probes, without copies.
    pub device_busy_seconds: Option<f64>,
    /// Accesses in the race log.
    pub race_hits: Option<u64>,
    /// Index-K pages that the canary checked.
    pub canary_checks: Option<u64>,
    /// Changes of index-K pages that no store explains.
    pub canary_hits: Option<u64>,
    /// The first of them.
    pub canary_first: Option<CanaryHit>,
    /// Graph-against-eager comparisons.
    pub ge_diff_samples: Option<u64>,
    /// Comparisons that differed.
    pub ge_diff_divergences: Option<u64>,
    /// The first of them.
    pub ge_diff_first: Option<Divergence>,
}
