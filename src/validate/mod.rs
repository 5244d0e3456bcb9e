//! The judge: what a response is called. One verdict a response, one a call; the first matching rule wins.
//!
//! [`judge`] is pure: it sees the bytes as they came ([`Observation`]) and what the harness knows
//! ([`Expectation`]), and reads no clock, no file and no network.

pub mod arguments;
pub mod assemble;
pub mod canary;
pub mod degenerate;
pub mod fault;
pub mod frame;
pub mod json;
pub mod markup;
pub mod name;
pub mod oracle;
pub mod parity;
pub mod record;
pub mod rules;
pub mod text;
pub mod tools;

use std::{collections::BTreeSet, sync::Arc};

use serde_json::Value;

pub use assemble::{Answer, Reader};
pub use canary::Canaries;
pub use fault::{Class, Quirk, Verdict};
pub use oracle::Oracle;
pub use rules::Mask;
pub use tools::Tools;

/// How the transport of a response ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ending {
    /// The body ended cleanly.
    #[default]
    Eof,
    /// The connection was reset or closed inside the body.
    Reset,
    /// Nothing came for the whole stall time-out, with the connection open.
    Stall,
    /// No response at all: refused, timed out before the status line, name not resolved.
    NoResponse,
}

/// One response as it came from the wire.
#[derive(Debug, Clone, Default)]
pub struct Observation<'a> {
    /// HTTP status; 0 where no response came.
    pub http_status: u16,
    /// The `content-type` header.
    pub content_type: Option<&'a str>,
    /// Whether the request asked for a stream.
    pub stream: bool,
    /// The body after HTTP de-chunking.
    pub body: &'a [u8],
    /// How it ended.
    pub ending: Ending,
}

/// The request's `tool_choice`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No call may be made.
    None,
    /// At least one call must be made.
    Required,
    /// This function must be called.
    Named(String),
}

/// A call that the oracle dictated.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpectedCall {
    /// Function name.
    pub name: String,
    /// Arguments, as a JSON value.
    pub arguments: Value,
    /// The dictated argument text, where byte-wise comparison is meant too.
    pub text: Option<String>,
}

/// What the harness knows about a request when it judges the response.
#[derive(Debug, Clone, Default)]
pub struct Expectation {
    /// The `tools` array of the request; cheap to clone, compiled once.
    pub tools: Tools,
    /// The request's tools are not known: names and schemas are not judged.
    pub tools_unknown: bool,
    /// The `tool_choice` of the request.
    pub tool_choice: ToolChoice,
    /// The calls that the response must hold, in order; `None` where no oracle is known.
    pub calls: Option<Vec<ExpectedCall>>,
    /// This session's nonce.
    pub own_canary: Option<String>,
    /// Nonces of other sessions.
    pub foreign_canaries: Vec<String>,
    /// Tool names that only other sessions declared.
    pub foreign_tools: Vec<String>,
    /// Every canary of the run, shared between its sessions; the own one is never held against a response.
    pub canaries: Option<Arc<Canaries>>,
    /// The prompt asked for a sentence that quotes call markup.
    pub prompt_asks_for_markup: bool,
    /// Call markup beside the built-in families, from the scenario.
    pub extra_markup: Vec<String>,
}

impl Expectation {
    /// The strongest oracle that this knows.
    pub fn oracle(&self) -> Oracle {
        match (&self.calls, self.tools_unknown) {
            (Some(_), _) => Oracle::Exact,
            (None, false) => Oracle::Schema,
            (None, true) => Oracle::Form,
        }
    }
}

/// The judgement of one reassembled call.
#[derive(Debug, Clone, PartialEq)]
pub struct CallJudgement {
    /// Function name as it came.
    pub name: String,
    /// The call's id as it came.
    pub id: Option<String>,
    /// Raw argument text as it came.
    pub arguments: String,
    /// The verdict.
    pub verdict: Verdict,
    /// The class.
    pub class: Class,
    /// One sentence a person can act on: where the text stops being right.
    pub detail: Option<String>,
}

/// The judgement of one response.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The verdict of the response.
    pub verdict: Verdict,
    /// Its class.
    pub class: Class,
    /// One sentence: why.
    pub detail: Option<String>,
    /// The calls, in order.
    pub calls: Vec<CallJudgement>,
    /// Deviations that the verdict tolerates.
    pub quirks: BTreeSet<Quirk>,
    /// The finish reason as it came; a missing one is `None`, never "stop".
    pub finish_reason: Option<String>,
    /// Text content as it came.
    pub content: String,
    /// `usage.completion_tokens`, where reported.
    pub completion_tokens: Option<u64>,
}

/// Judges one response.
pub fn judge(observation: &Observation<'_>, expectation: &Expectation) -> Judgement {
    judge_masked(observation, expectation, Mask::default())
}

/// Judges one response with some rules off, to prove that each of them is needed.
pub fn judge_masked(observation: &Observation<'_>, expectation: &Expectation, mask: Mask) -> Judgement {
    let answer = Reader::read(observation.stream, observation.body);
    rules::judge(observation, expectation, &answer, mask)
}

/// Judges a response whose body a [`Reader`] has read as it came.
pub fn judge_answer(observation: &Observation<'_>, expectation: &Expectation, answer: &Answer) -> Judgement {
    rules::judge(observation, expectation, answer, Mask::default())
}
