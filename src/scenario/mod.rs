//! What a scenario file means: sessions, rounds, dictated calls.
//!
//! Everything here is a pure function of a file and a [`crate::seed::Seed`]: session `n` of a seed is the same session
//! in every arm, on every machine, whether or not the sessions before it were ever made.

mod arrival;
mod dictate;
pub mod file;
mod fill;
mod lint;
mod matrix;
mod range;
mod session;
mod span;
mod tool;

use serde::{Deserialize, Serialize};

pub use arrival::Arrival;
pub(crate) use dictate::hex;
pub use dictate::{Dictated, LEAD};
pub use lint::{Ambiguity, CONTEXT_BYTES, ambiguity};
pub use matrix::{
    ArmSpec, Axes, BisectSpec, Endpoint, Expect, Gate, Matrix, Order, Ready, TargetKind, TargetSpec, Toggle, UntilSpec,
};
pub use range::Range;
pub use session::{Round, Session, nonce};
pub use span::Span;

/// What the sessions of a run are made of; the keys of a scenario file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Scenario {
    /// The scenario's name.
    pub name: String,
    /// What is asked of the model, and so which oracle judges it.
    pub style: Style,
    /// Rounds a session.
    pub rounds: Range,
    /// Bytes of the first prompt: system message, tools and first turn.
    pub context: Range,
    /// Bytes by which a prompt grows from round to round, the answer aside.
    pub growth: Range,
    /// Of every 2000 bytes of context and growth, so many are one run of one byte: what separators, padding and zeroed
    /// blobs are to an index, many equally good matches.
    #[serde(skip_serializing_if = "is_zero")]
    pub run_bytes: u64,
    /// Growth ends when a prompt has this many bytes.
    pub max_context: u64,
    /// Tools offered to a session.
    pub tools: u32,
    /// Calls of a round, drawn from this list.
    pub calls: Vec<u32>,
    /// Bytes of a dictated call.
    pub answer: Range,
    /// What fills arguments, drawn from this list.
    pub content: Vec<Content>,
    /// Share of requests that ask for a stream.
    pub stream: f64,
    /// Share of rounds that are first sent and cancelled, then sent again.
    pub cancel: f64,
    /// Output events after which a cancelled request is cut.
    pub cancel_after: Range,
    /// Milliseconds between an answer and the next request.
    pub think_ms: Range,
    /// Engine steps between an answer and the next request, under lockstep.
    pub think_steps: Range,
    /// `max_tokens` of every request.
    pub max_tokens: u64,
    /// `tool_choice` of every request.
    pub tool_choice: Choice,
    /// What becomes of a session after its first corruption.
    pub poisoned: Poisoned,
    /// Markers of calls beside the judge's own table: where they stand in a text, a call has leaked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub markup: Vec<String>,
    /// In which other forms every dictated turn is asked again, to tell the parser from the engine.
    #[serde(skip_serializing_if = "Parity::is_off")]
    pub parity: Parity,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            name: "scenario".into(),
            style: Style::Dictated,
            rounds: Range(3, 7),
            context: Range(1500, 9000),
            growth: Range(200, 1500),
            run_bytes: 0,
            max_context: 14_000,
            tools: 4,
            calls: vec![1],
            answer: Range(60, 130),
            content: vec![Content::Ascii],
            stream: 0.5,
            cancel: 0.0,
            cancel_after: Range(1, 20),
            think_ms: Range(0, 0),
            think_steps: Range(1, 5),
            max_tokens: 1024,
            tool_choice: Choice::Auto,
            poisoned: Poisoned::Stop,
            markup: Vec::new(),
            parity: Parity::Off,
        }
    }
}

/// Keys that are off are left out, so that the hash of a scenario stays what it was before there were any.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde calls")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What is asked of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Style {
    /// The turn dictates the calls: every byte of the answer is known.
    Dictated,
    /// The turn describes a task: the tools' schemas are the oracle.
    Task,
}

/// What fills the arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Content {
    /// Plain words.
    Ascii,
    /// Words of many scripts, emoji, combining marks.
    Unicode,
    /// The same, written with `\u` escapes.
    Escaped,
    /// Quotes, backslashes, line breaks, control characters.
    Escapes,
    /// Objects in objects, with keys that also occur in the call's envelope.
    Nested,
    /// Numbers at the edges of their types.
    Numbers,
    /// Empty strings, arrays and objects.
    Empty,
    /// A run of one byte, as long as it can be without making the dictated text ambiguous; see `run_bytes`.
    Runs,
}

/// The request's `tool_choice`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Choice {
    /// The model decides.
    Auto,
    /// Some call must be made. Servers that constrain decoding then repair what they should not.
    Required,
}

/// What becomes of a session after its first corruption.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Poisoned {
    /// It ends.
    Stop,
    /// It goes on, with the dictated call in the place of the damaged one.
    Substitute,
    /// It goes on with the damage in its history.
    Continue,
}

/// In which other forms a turn is asked again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Parity {
    /// In none
    #[default]
    Off,
    /// Without a stream where it was streamed, and the other way round
    Form,
    /// That, and as raw text: under `tool_choice: none`, which most servers answer without their parser
    Raw,
}

impl Parity {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it by reference")]
    fn is_off(&self) -> bool {
        *self == Self::Off
    }

    /// Requests a round, the first one included.
    pub fn requests(self) -> u64 {
        match self {
            Self::Off => 1,
            Self::Form => 2,
            Self::Raw => 3,
        }
    }
}
