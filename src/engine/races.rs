//! The race log as the server keeps it: how often each kind of race occurred, and which hits reached which session.
//!
//! A hit names the rows of the batch that read wrong bytes, and the batch of its step says whose rows these were. Memory
//! is bounded: the newest sessions are kept, and of each the hits of its newest answers; of an answer that has more than
//! fit, the first, since what comes after the first wrong token may follow from it. What was dropped is counted.

use std::{
    borrow::Cow,
    collections::{BTreeMap, VecDeque},
    fmt::Write as _,
    sync::Arc,
};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::tokenizer::Token;
use crate::device::sim::{RaceHit, RaceKind, Side};

/// Hits that are kept a session.
const HITS: usize = 256;
/// Sessions whose hits are kept.
const SESSIONS: usize = 512;
/// Tokens of the answer that are kept with a hit, for people to find the place in the text.
const CONTEXT: usize = 24;

/// The race hits of one decode step.
#[derive(Debug, Clone)]
pub struct StepRaces {
    /// Number of the decode step, from 0.
    pub step: u64,
    /// What replays the step's launch.
    pub replay: Option<String>,
    /// Whether this launch is the one that the configuration asks to replay.
    pub replayed: bool,
    /// The hits.
    pub hits: Vec<RaceHit>,
}

/// A row of the step's batch and what came of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) session: u32,
    pub(super) round: u32,
    /// The answer before the step.
    pub(super) answer: &'a [Token],
    /// The token that the step gave.
    pub(super) next: Token,
}

/// Everything that is kept.
#[derive(Debug, Default)]
pub(super) struct RaceLog {
    hits: u64,
    kinds: BTreeMap<Kind, u64>,
    sessions: BTreeMap<u32, Session>,
    forgotten_sessions: u64,
    replayed: Option<Value>,
}

/// What makes two hits alike: the layers of a model and the steps of a run repeat it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    order: RaceKind,
    first: (&'static str, Cow<'static, str>),
    second: (&'static str, Cow<'static, str>),
}

/// The hits of one session, oldest first.
#[derive(Debug, Default)]
struct Session {
    hits: VecDeque<Reached>,
    dropped: u64,
    /// The step of the newest.
    newest: u64,
}

/// A hit that reached a session.
#[derive(Debug)]
struct Reached {
    hit: Arc<RaceHit>,
    step: u64,
    replay: Option<Arc<str>>,
    row: u32,
    place: Arc<Place>,
}

/// Where in its answer a session stood, the same for all hits of a step.
#[derive(Debug)]
struct Place {
    round: u32,
    /// Number of the token in its answer.
    token: usize,
    /// Of the whole answer before the token: who knows what it should be finds the place without the text.
    answered: u64,
    after: Box<[Token]>,
    next: Token,
}

impl Place {
    fn of(row: &Row<'_>) -> Self {
        let Row { round, answer, next, .. } = *row;
        let after = answer[answer.len().saturating_sub(CONTEXT)..].into();
        Self { round, token: answer.len(), answered: digest(answer), after, next }
    }
}

/// The first eight bytes of the SHA-256.
fn digest(tokens: &[Token]) -> u64 {
    Sha256::digest(tokens).iter().take(8).fold(0, |head, byte| head << 8 | u64::from(*byte))
}

impl RaceLog {
    /// Files a step's hits. `rows` is its batch; a row that belongs to no session is `None`.
    pub(super) fn record(&mut self, races: StepRaces, rows: &[Option<Row<'_>>]) {
        let StepRaces { step, replay, replayed, hits } = races;
        if replayed {
            let hits: Vec<_> = hits.iter().map(|hit| describe(hit, step)).collect();
            self.replayed = Some(json!({"replay": replay, "step": step, "hits": hits}));
        }
        let replay: Option<Arc<str>> = replay.map(Into::into);
        let mut places = BTreeMap::new();
        for hit in hits {
            self.hits += 1;
            *self.kinds.entry(Kind::of(&hit)).or_default() += 1;
            let hit = Arc::new(hit);
            for &number in &hit.rows {
                // Rows behind the batch are padding.
                let Some(Some(row)) = rows.get(number as usize) else { continue };
                self.session(row.session, step).push(Reached {
                    hit: Arc::clone(&hit),
                    step,
                    replay: replay.clone(),
                    row: number,
                    place: Arc::clone(places.entry(number).or_insert_with(|| Arc::new(Place::of(row)))),
                });
            }
        }
    }

    fn session(&mut self, session: u32, step: u64) -> &mut Session {
        if !self.sessions.contains_key(&session) && self.sessions.len() == SESSIONS {
            let oldest = self.sessions.iter().min_by_key(|(_, session)| session.newest).map(|(number, _)| *number);
            self.forgotten_sessions += u64::from(oldest.and_then(|number| self.sessions.remove(&number)).is_some());
        }
        let session = self.sessions.entry(session).or_default();
        session.newest = step;
        session
    }

    /// Counts by kind, and what was replayed.
    pub(super) fn overview(&self) -> Value {
        let kinds: BTreeMap<_, _> = self.kinds.iter().map(|(kind, count)| (kind.to_string(), count)).collect();
        json!({"hits": self.hits, "kinds": kinds, "sessions": self.sessions.keys().collect::<Vec<_>>(),
            "forgotten_sessions": self.forgotten_sessions, "replayed": self.replayed})
    }

    /// The kept hits of one session, oldest first.
    pub(super) fn of(&self, number: u32) -> Value {
        let session = self.sessions.get(&number);
        let hits: Vec<_> = session.iter().flat_map(|session| session.hits.iter().map(Reached::describe)).collect();
        json!({"session": number, "dropped": session.map_or(0, |session| session.dropped),
            "forgotten_sessions": self.forgotten_sessions, "hits": hits})
    }
}

impl Session {
    fn push(&mut self, reached: Reached) {
        if self.hits.len() == HITS {
            self.dropped += 1;
            if self.hits.front().is_none_or(|oldest| oldest.began() == reached.began()) {
                return;
            }
            self.hits.pop_front();
        }
        self.hits.push_back(reached);
    }
}

impl Reached {
    /// The step of the answer's first token, which no other answer of the session shares: a running sequence decodes a
    /// token in every step.
    fn began(&self) -> u64 {
        self.step.wrapping_sub(self.place.token as u64)
    }

    fn describe(&self) -> Value {
        let mut value = describe(&self.hit, self.step);
        if let Some(members) = value.as_object_mut() {
            let Place { round, token, answered, after, next } = &*self.place;
            let more = json!({"replay": self.replay.as_deref(), "row": self.row, "round": round, "token": token,
                "answered": format!("{answered:016x}"), "after": text(after), "next": text(&[*next]),
                "next_token": next});
            members.extend(more.as_object().cloned().unwrap_or_default());
        }
        value
    }
}

impl Kind {
    fn of(hit: &RaceHit) -> Self {
        let part = |side: &Side| (side.kernel, side.tensor.clone());
        Self { order: hit.kind, first: part(&hit.first), second: part(&hit.second) }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { order, first: (first, first_tensor), second: (second, second_tensor) } = self;
        match order {
            RaceKind::WriteAfterRead => write!(f, "{first}/{first_tensor} overwritten by {second}"),
            RaceKind::ReadAfterWrite => write!(f, "{second}/{second_tensor} read before {first} wrote it"),
            RaceKind::WriteAfterWrite => write!(f, "{second}/{second_tensor} overwritten late by {first}"),
        }
    }
}

/// A hit with all its parts, and in one sentence.
fn describe(hit: &RaceHit, step: u64) -> Value {
    let side = |side: &Side| json!({"op": side.op, "kernel": side.kernel, "layer": side.layer, "stream": side.stream_name, "tensor": side.tensor});
    json!({
        "step": step,
        "launch": hit.launch,
        "kind": Kind::of(hit).to_string(),
        "layer": hit.first.layer,
        "first": side(&hit.first),
        "second": side(&hit.second),
        "reader": hit.reader,
        "rows": hit.rows,
        "bytes": [hit.bytes.start, hit.bytes.end],
        "changed": hit.changed,
        "expected": hexadecimal(&hit.expected),
        "seen": hexadecimal(&hit.seen),
        "at_ns": hit.at_ns,
        "words": words(hit, step),
    })
}

fn words(hit: &RaceHit, step: u64) -> String {
    let RaceHit { first, second, bytes, changed, .. } = hit;
    let layer = first.layer.map_or_else(String::new, |layer| format!(", layer {layer}"));
    let op = |side: &Side| format!("{} on {}", side.kernel, side.stream_name);
    let what = match hit.kind {
        RaceKind::WriteAfterRead => format!(
            "{} read `{}` after {} had written `{}` over it",
            op(first),
            first.tensor,
            op(second),
            second.tensor
        ),
        RaceKind::ReadAfterWrite => {
            format!("{} read `{}` before {} had written it", op(second), second.tensor, op(first))
        }
        RaceKind::WriteAfterWrite => format!(
            "`{}` of {} was read after {} had written `{}` over it, late",
            second.tensor,
            op(second),
            op(first),
            first.tensor
        ),
    };
    format!(
        "step {step}{layer}: {what}: {changed} wrong reads of bytes in {:#x}..{:#x}, rows {}; at the first {} instead of {}, {:.1} µs into the \
         step",
        bytes.start,
        bytes.end,
        spans(&hit.rows),
        hexadecimal(&hit.seen),
        hexadecimal(&hit.expected),
        hit.at_ns as f64 / 1e3
    )
}

/// Ascending numbers, runs joined: `3, 7-9`.
fn spans(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let text = |run: &[u32]| match run {
        [only] => only.to_string(),
        run => format!("{}-{}", run[0], run[run.len() - 1]),
    };
    runs.map(text).collect::<Vec<_>>().join(", ")
}

fn hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        let _ = write!(text, "{}{byte:02x}", if text.is_empty() { "" } else { " " });
    }
    text
}

/// Tokens as text; a control token is no UTF-8 and shows as U+FFFD.
fn text(tokens: &[Token]) -> String {
    String::from_utf8_lossy(tokens).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{LifetimeId, StreamId};

    fn hit(rows: &[u32]) -> RaceHit {
        let side = |op, kernel, stream_name: &'static str, tensor: &'static str| Side {
            op,
            kernel,
            layer: Some(2),
            stream: StreamId(op),
            stream_name: stream_name.into(),
            lifetime: LifetimeId(op),
            tensor: tensor.into(),
        };
        RaceHit {
            launch: 40,
            kind: RaceKind::WriteAfterRead,
            first: side(3, "topk_select", "indexer", "logits"),
            second: side(7, "ffn_up", "main", "ffn_up"),
            reader: 3,
            rows: rows.to_vec(),
            bytes: 0x100..0x180,
            changed: 9,
            expected: vec![0, 0x80],
            seen: vec![1, 2],
            at_ns: 41_250,
        }
    }

    fn races(step: u64, rows: &[u32]) -> StepRaces {
        StepRaces { step, replay: Some("ts1-00".into()), replayed: false, hits: vec![hit(rows)] }
    }

    fn row(session: u32) -> Row<'static> {
        Row { session, round: 1, answer: b"{\"ref\": \"0-", next: b'7' }
    }

    #[test]
    fn a_hit_reaches_the_sessions_of_its_rows() {
        let mut log = RaceLog::default();
        // Row 1 belongs to no session, and row 9 is padding.
        log.record(races(5, &[1, 2, 9]), &[Some(row(30)), None, Some(row(31))]);
        assert_eq!(log.of(30)["hits"], json!([]));
        let kept = log.of(31);
        let [only] = kept["hits"].as_array().unwrap().as_slice() else { panic!("{kept}") };
        assert_eq!((&only["row"], &only["token"], &only["next"]), (&json!(2), &json!(11), &json!("7")));
        assert_eq!((&only["after"], &only["replay"]), (&json!("{\"ref\": \"0-"), &json!("ts1-00")));
        // printf '{"ref": "0-' | sha256sum | cut -c -16
        assert_eq!((&only["answered"], &only["next_token"]), (&json!("17139d25abbd28b7"), &json!(0x37)));
        assert_eq!(
            only["words"],
            "step 5, layer 2: topk_select on indexer read `logits` after ffn_up on main had written `ffn_up` over it: 9 wrong \
             reads of bytes in 0x100..0x180, rows 1-2, 9; at the first 01 02 instead of 00 80, 41.2 µs into the step"
        );
        let overview = log.overview();
        assert_eq!(overview["kinds"], json!({"topk_select/logits overwritten by ffn_up": 1}));
        assert_eq!(overview["sessions"], json!([31]));
    }

    #[test]
    fn old_hits_and_old_sessions_make_room_and_are_counted() {
        let mut log = RaceLog::default();
        for step in 0..300 {
            log.record(races(step, &[0]), &[Some(row(1))]);
        }
        let kept = log.of(1);
        assert_eq!((kept["hits"].as_array().unwrap().len(), &kept["dropped"]), (HITS, &json!(300 - HITS)));
        assert_eq!(kept["hits"][HITS - 1]["step"], 299);
        for session in 2..=SESSIONS as u32 + 2 {
            log.record(races(300 + u64::from(session), &[0]), &[Some(row(session))]);
        }
        assert_eq!(log.sessions.len(), SESSIONS);
        assert_eq!((&log.of(1)["hits"], &log.overview()["forgotten_sessions"]), (&json!([]), &json!(2)));
        assert_eq!(log.overview()["hits"], 300 + SESSIONS as u64 + 1);
    }

    #[test]
    fn of_a_long_answer_the_first_hits_are_kept() {
        let mut log = RaceLog::default();
        log.record(races(3, &[0]), &[Some(row(1))]);
        let answer = [b'x'; 300];
        for token in 0..300 {
            let row = Row { session: 1, round: 2, answer: &answer[..token], next: b'x' };
            log.record(races(100 + token as u64, &[0]), &[Some(row)]);
        }
        let kept = log.of(1);
        let tokens: Vec<_> = kept["hits"].as_array().unwrap().iter().map(|hit| hit["token"].clone()).collect();
        assert_eq!(tokens, (0..HITS).collect::<Vec<_>>(), "the hit of the earlier answer made room");
        assert_eq!(kept["dropped"], 301 - HITS);
    }
}
