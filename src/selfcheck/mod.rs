//! A server with known faults, played at full load against the harness itself.
//!
//! [`Script`] decides from a seed what is asked in one round of one session, what the server answers, and what that answer
//! must be called. The truth comes from how the answer was made: nothing here knows the judge.

mod damage;
mod draft;
mod load;
mod markup;
mod score;
mod server;

use rand::{RngExt, seq::IndexedRandom};
use rand_pcg::Pcg64Mcg;
use serde_json::{Value, json};

pub use damage::KINDS;
pub use load::{Ask, Load, Played, play};
pub use score::{Outcome, Score};
pub use server::serve;

use crate::seed::Seed;

/// What a response must be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Truth {
    /// Verdict.
    pub verdict: &'static str,
    /// Class.
    pub class: &'static str,
}

/// How a body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Cleanly.
    Clean,
    /// The connection is cut.
    Reset,
    /// Nothing more comes.
    Stall,
}

/// What the server sends.
#[derive(Debug, Clone)]
pub struct Response {
    /// HTTP status.
    pub status: u16,
    /// `content-type`.
    pub content_type: &'static str,
    /// The body, in the pieces in which it is written.
    pub pieces: Vec<Vec<u8>>,
    /// How it ends.
    pub end: End,
}

impl Response {
    /// The whole body.
    pub fn body(&self) -> Vec<u8> {
        self.pieces.concat()
    }
}

/// A call that the request dictates.
#[derive(Debug, Clone, PartialEq)]
pub struct Dictated {
    /// Function name.
    pub name: String,
    /// Arguments.
    pub arguments: Value,
}

/// One round of one session: the request, the response and the truth about it.
#[derive(Debug, Clone)]
pub struct Script {
    /// The tools of the request.
    pub tools: Vec<Value>,
    /// The `tool_choice` of the request.
    pub tool_choice: &'static str,
    /// The dictated calls; `None` where the round has no oracle.
    pub dictated: Option<Vec<Dictated>>,
    /// This session's nonce.
    pub canary: String,
    /// Nonces of neighbours.
    pub foreign_canaries: Vec<String>,
    /// Tools that only neighbours declare.
    pub foreign_tools: Vec<String>,
    /// Whether a stream is asked for.
    pub stream: bool,
    /// What the server sends.
    pub response: Response,
    /// What that must be called.
    pub truth: Truth,
}

/// What is mixed.
#[derive(Debug, Clone, Copy)]
pub struct Mix {
    /// Faulty responses in a thousand.
    pub faulty_permille: u32,
}

impl Script {
    /// The round `round` of `session`, intact or with a fault of any class.
    pub fn new(seed: Seed, session: u64, round: u64, mix: Mix) -> Self {
        let mut rng = seed.fork("selfcheck").index(session).index(round).rng();
        if rng.random_range(0..1000) >= mix.faulty_permille {
            return Self::intact(&mut rng, session);
        }
        let kind = &KINDS[rng.random_range(0..KINDS.len())];
        Self::faulty(&mut rng, session, kind)
    }

    /// A fresh instance of a class. Several ways of breaking an answer share one class.
    pub fn of_class(seed: Seed, session: u64, class: &str) -> Option<Self> {
        let kinds: Vec<&damage::Kind> = KINDS.iter().filter(|kind| kind.truth.class == class).collect();
        let mut rng = seed.fork(class).index(session).rng();
        let kind = kinds.choose(&mut rng)?;
        Some(Self::faulty(&mut rng, session, kind))
    }

    /// An answer without a fault.
    fn intact(rng: &mut Pcg64Mcg, session: u64) -> Self {
        let truth = Truth { verdict: "valid", class: "ok" };
        let mut request = draft::Request::new(rng, session);
        let mut draft = draft::Draft::new(rng, &request);
        draft.deviate(rng);
        request.dictated.truncate(draft.calls.len());
        let response = draft.respond(rng);
        request.close(response, truth)
    }

    fn faulty(rng: &mut Pcg64Mcg, session: u64, kind: &damage::Kind) -> Self {
        let mut request = draft::Request::new(rng, session);
        let mut draft = draft::Draft::new(rng, &request);
        let response = match kind.make {
            damage::Make::Bytes(make) => make(rng, &mut request, &mut draft),
            damage::Make::Draft(make) => {
                make(rng, &mut request, &mut draft);
                draft.respond(rng)
            }
        };
        request.close(response, kind.truth)
    }
}

/// The nonce of a session.
pub fn canary(session: u64) -> String {
    format!("S-{session:05}-{:04X}", Seed(session).fork("canary").0 & 0xFFFF)
}

/// The tools of a session; neighbours share no name.
fn tools(session: u64) -> Vec<Value> {
    let tag = tag(session);
    let tool = |name: String, properties: Value| {
        let required: Vec<String> = properties.as_object().map(|map| map.keys().cloned().collect()).unwrap_or_default();
        json!({"type": "function", "function": {"name": name, "description": name, "parameters": {
            "type": "object", "properties": properties, "required": required, "additionalProperties": false,
        }}})
    };
    vec![
        tool(
            format!("store_note_{tag}"),
            json!({
                "nonce": {"type": "string"},
                "seq": {"type": "integer"},
                "text": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "mode": {"type": "string", "enum": ["append", "replace"]},
                "options": {"type": "object", "properties": {"depth": {"type": "integer"}, "strict": {"type": "boolean"}},
                    "required": ["depth", "strict"], "additionalProperties": false},
            }),
        ),
        tool(format!("find_order_{tag}"), json!({"nonce": {"type": "string"}, "order": {"type": "string"}})),
        tool(format!("server_time_{tag}"), json!({})),
    ]
}

fn tag(session: u64) -> String {
    const LETTERS: &[u8] = b"bcdfghjkmpqrstvwxz";
    let mut rest = session + 1000;
    let mut tag = String::new();
    while rest > 0 {
        tag.push(char::from(LETTERS[(rest % LETTERS.len() as u64) as usize]));
        rest /= LETTERS.len() as u64;
    }
    tag
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_same_seed_plays_the_same_bytes() {
        let mix = Mix { faulty_permille: 500 };
        let mut bodies = BTreeSet::new();
        for session in 0..50 {
            let (first, second) = (Script::new(Seed(1), session, 0, mix), Script::new(Seed(1), session, 0, mix));
            assert_eq!(first.response.pieces, second.response.pieces);
            assert_eq!(first.truth, second.truth);
            bodies.insert(first.response.body());
        }
        assert!(bodies.len() >= 45, "only {} different bodies", bodies.len());
    }

    #[test]
    fn every_class_has_fresh_instances() {
        for kind in KINDS {
            let bodies: BTreeSet<_> = (0..20)
                .map(|session| {
                    let script = Script::of_class(Seed(7), session, kind.truth.class).unwrap();
                    assert_eq!(script.truth.class, kind.truth.class);
                    (script.response.status, script.response.body())
                })
                .collect();
            assert!(bodies.len() >= 3, "{}: {} bodies", kind.truth.class, bodies.len());
        }
    }

    #[test]
    fn neighbours_share_no_tool() {
        let names =
            |session| tools(session).iter().map(|tool| tool["function"]["name"].to_string()).collect::<Vec<_>>();
        let all: BTreeSet<_> = (0..6000).flat_map(names).collect();
        assert_eq!(all.len(), 18_000);
    }
}
