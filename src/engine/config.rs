//! The limits of the engine and the resolved configuration of the server.

use std::time::Duration;

use serde::{Serialize, Serializer};

use super::{cache::pages_for, scheduler, toggles::Toggles};

/// What bounds the engine's work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Sequences that run at a time.
    pub max_batch: usize,
    /// Tokens of a prompt and its answer.
    pub max_context: u32,
    /// Prompt tokens that one step prefills.
    pub prefill_chunk: u32,
    /// Pages of the cache, beside the padding page.
    pub pages: u32,
    /// Whether the pages of finished sequences are kept for requests that resend their tokens.
    pub prefix_cache: bool,
    /// Requests that may wait for a place in the batch.
    pub queue: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_batch: 64,
            max_context: 16_384,
            prefill_chunk: 512,
            pages: Self::pages_for_batch(64, 16_384),
            prefix_cache: true,
            queue: 1024,
        }
    }
}

impl Limits {
    /// What the toggles say, with a queue of so many requests; under lockstep every session finds a place in it.
    pub fn new(toggles: &Toggles, queue: usize) -> Self {
        let sessions = toggles.lockstep.map_or(0, |size| size.sessions as usize);
        Self {
            max_batch: toggles.max_batch as usize,
            max_context: toggles.max_context,
            prefill_chunk: toggles.prefill_chunk,
            pages: Self::pages_for_batch(toggles.max_batch as usize, toggles.max_context),
            prefix_cache: toggles.prefix_cache,
            queue: queue.max(sessions),
        }
    }

    /// Pages for a batch whose sequences have 8 k tokens each, and a quarter more for the prefix cache; at least one
    /// sequence of the longest context fits.
    pub fn pages_for_batch(max_batch: usize, max_context: u32) -> u32 {
        let sequence = pages_for(max_context.min(8192));
        (max_batch as u32 * sequence * 5 / 4).max(pages_for(max_context))
    }

    /// Whether a request could ever be admitted.
    pub fn admit(&self, prompt: usize, max_tokens: u32) -> bool {
        pages_for(prompt as u32 + max_tokens) <= self.pages
    }

    /// The part that the scheduler knows.
    pub fn scheduler(&self) -> scheduler::Limits {
        scheduler::Limits { max_batch: self.max_batch, prefill_chunk: self.prefill_chunk }
    }
}

/// Tokens of an answer when a request does not say.
pub const DEFAULT_MAX_TOKENS: u32 = 1024;

/// What bounds a connection and an answer's form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Serving {
    /// The name under which the model is served.
    pub model: String,
    /// Tokens in one server-sent event.
    pub sse_tokens: usize,
    /// Whether `/metrics` answers.
    pub metrics: bool,
    /// Bytes of a request's body.
    pub body_limit: usize,
    /// The longest wait for a request's body.
    #[serde(serialize_with = "seconds")]
    pub body_patience: Duration,
    /// The longest wait for running requests when the server shuts down.
    #[serde(serialize_with = "seconds")]
    pub drain_patience: Duration,
}

impl Serving {
    /// What the toggles say, under a name for the model.
    pub fn new(toggles: &Toggles, model: &str) -> Self {
        let (sse_tokens, metrics) = (toggles.sse_tokens as usize, toggles.metrics);
        Self { model: model.to_owned(), sse_tokens, metrics, ..Self::default() }
    }
}

impl Default for Serving {
    fn default() -> Self {
        Self {
            model: "toolstorm-copy".into(),
            sse_tokens: 1,
            metrics: true,
            body_limit: 4 << 20,
            body_patience: Duration::from_secs(30),
            drain_patience: Duration::from_secs(30),
        }
    }
}

fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}
