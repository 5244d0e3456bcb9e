//! The line of `calls.jsonl`.

use serde::{Deserialize, Serialize};

use crate::validate::{Class, Quirk, Verdict};

/// One judged call: a line of `calls.jsonl`. A response that yields no call has one line with a null `name`.
///
/// Fields that may differ between two equal runs end in `_ms` or `_at`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallRecord {
    /// Number of the session, from 0, in start order.
    pub session: u64,
    /// Number of the round in its session, from 0.
    pub round: u32,
    /// Number of the call in its response, from 0.
    pub call: u32,
    /// The arm.
    pub arm: String,
    /// Number of the server's launch in the run, from 0.
    pub launch: u32,
    /// The launch seed: `TOOLSTORM_SEED` of the server.
    pub seed: u64,
    /// The model asked.
    pub model: String,
    /// Whether a stream was asked for.
    pub stream: bool,
    /// Function name as it came.
    pub name: Option<String>,
    /// Raw argument text as it came.
    pub arguments: Option<String>,
    /// The verdict.
    pub verdict: Verdict,
    /// The class.
    pub class: Class,
    /// Where the text stops being right.
    pub detail: Option<String>,
    /// Verdict of the whole response.
    pub response_verdict: Verdict,
    /// Class of the whole response.
    pub response_class: Class,
    /// Whether the session had been corrupted before: outside every rate.
    pub after_corruption: bool,
    /// Whether the session belongs to the warm-up: outside every rate.
    pub warmup: bool,
    /// Quirks of the response; on its first call only, so that sums are right.
    pub quirks: Vec<Quirk>,
    /// SHA-256 of the dictated call line; null without an oracle.
    pub expected_sha256: Option<String>,
    /// The session's nonce.
    pub nonce: String,
    /// The finish reason as it came.
    pub finish_reason: Option<String>,
    /// Output tokens of the response, as the server reports them.
    pub output_tokens: Option<u64>,
    /// Requests of this launch that were in flight when this one was sent, itself included.
    pub in_flight_at: u32,
    /// Bytes of the request's body: what the prompt's length is where a server reports no usage.
    #[serde(default)]
    pub prompt_bytes: u64,
    /// Time to the first output token.
    pub ttft_ms: Option<f64>,
    /// Time from sending to the last byte.
    pub e2el_ms: Option<f64>,
    /// Wall time of sending.
    pub started_at: String,
    /// Number of the request in its launch: sessions in order, rounds in order.
    pub data_index: u64,
    /// SHA-256 of the request's body.
    pub request_sha256: String,
    /// Whether every call of the response is JSON that meets its schema.
    pub tool_calls_valid: bool,
    /// As `e2el_ms`, under the vendor verifiers' name.
    pub duration_ms: Option<f64>,
}
