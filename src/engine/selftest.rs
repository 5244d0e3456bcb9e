//! Random dictated calls through a model, byte for byte: what a healthy engine must answer.

use std::fmt::Write;

use rand::RngExt;
use serde_json::{Map, Value, json};

use super::{
    DecodeRow, Prefill, TokenModel,
    chat::{LEAD, OPEN},
    tokenizer::{CALL, TURN_END, TURN_START, Token},
};
use crate::{device::kernel::LONG, error::Result, seed::Seed};

const CHUNK: usize = 512;
const PAGE: u32 = crate::device::kernel::PAGE_TOKENS as u32;

/// How much runs at a time, and how long a conversation may get.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Conversations that decode in one batch.
    pub rows: u32,
    /// Longest context, in tokens; a conversation that would outgrow it starts over.
    pub context: u32,
    /// Turns that are dictated in all.
    pub turns: u32,
}

/// What came of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Turns that were dictated.
    pub turns: u32,
    /// Calls in them.
    pub calls: u32,
    /// Turns that came back with a wrong byte.
    pub wrong: u32,
    /// Tokens decoded.
    pub tokens: u64,
    /// What the first wrong turn should have been, and was.
    pub first: Option<(String, String)>,
}

/// One conversation and its place in the caches.
struct Conversation {
    rng: rand_pcg::Pcg64Mcg,
    tokens: Vec<Token>,
    /// Tokens whose cache entries are written.
    cached: u32,
    pages: Vec<u32>,
    window_page: u32,
    expected: Vec<Token>,
    answered: Vec<Token>,
    waiting: bool,
}

/// Dictates random turns to `model` and compares. Leases pages `1..=rows * context / 256` and window pages `1..=rows`.
pub fn dictate(model: &mut impl TokenModel, load: Load, seed: Seed) -> Result<Outcome> {
    let pages = load.context.div_ceil(PAGE);
    let mut outcome = Outcome::default();
    let mut conversations: Vec<Conversation> =
        (0..load.rows).map(|number| Conversation::new(seed.index(u64::from(number)), number, pages)).collect();
    loop {
        for conversation in conversations.iter_mut().filter(|conversation| conversation.waiting) {
            if outcome.turns < load.turns {
                outcome.turns += 1;
                outcome.calls += conversation.dictate(load.context);
                conversation.prefill(model)?;
            }
        }
        let mut running: Vec<&mut Conversation> = conversations.iter_mut().filter(|c| !c.waiting).collect();
        if running.is_empty() {
            return Ok(outcome);
        }
        let rows: Vec<DecodeRow<'_>> = running.iter().map(|conversation| conversation.row()).collect();
        let next = model.decode(&rows)?;
        drop(rows);
        outcome.tokens += next.len() as u64;
        for (conversation, token) in running.iter_mut().zip(next) {
            conversation.take(token, &mut outcome);
        }
    }
}

impl Conversation {
    fn new(seed: Seed, number: u32, pages: u32) -> Self {
        Self {
            rng: seed.rng(),
            tokens: Vec::new(),
            cached: 0,
            pages: (1 + number * pages..=(number + 1) * pages).collect(),
            window_page: number + 1,
            expected: Vec::new(),
            answered: Vec::new(),
            waiting: true,
        }
    }

    /// Appends a turn that dictates one to four calls; returns how many.
    fn dictate(&mut self, context: u32) -> u32 {
        let (calls, text) = loop {
            let calls = [1, 1, 1, 2, 3, 4][self.rng.random_range(0..6)];
            let lines: Vec<String> = (0..calls).map(|_| random_call(&mut self.rng)).collect();
            let text = lines.join("\n");
            if !is_ambiguous(&format!("{LEAD}{text}")) && text.len() < 900 {
                break (calls, text);
            }
        };
        let filler: String = (0..self.rng.random_range(50..600))
            .map(|_| char::from(b"the quick brown fox jumps over lazy dogs "[self.rng.random_range(0..41)]))
            .collect();
        if self.tokens.len() + filler.len() + 2 * text.len() + 400 > context as usize {
            self.tokens.clear();
            self.cached = 0;
        }
        if self.tokens.is_empty() {
            self.tokens.push(TURN_START);
            self.tokens.extend_from_slice(b"system\ntools: get_weather, lookup_order");
        }
        self.tokens.extend([TURN_END, TURN_START]);
        self.tokens.extend_from_slice(format!("user\n{filler}\n{LEAD}{text}").as_bytes());
        self.tokens.extend([TURN_END, TURN_START]);
        self.tokens.extend_from_slice(b"assistant\n");
        self.tokens.push(CALL);
        self.tokens.extend_from_slice(format!("{LEAD}{OPEN}").as_bytes());
        self.expected = text.as_bytes()[OPEN.len()..].to_vec();
        self.answered.clear();
        self.waiting = false;
        calls
    }

    fn prefill(&mut self, model: &mut impl TokenModel) -> Result<()> {
        let end = self.tokens.len() as u32 - 1;
        while self.cached < end {
            let range = self.cached..end.min(self.cached + CHUNK as u32);
            self.cached = range.end;
            model.prefill(&Prefill {
                tokens: &self.tokens,
                range,
                page_table: &self.pages,
                window_page: self.window_page,
                resumed: false,
                session: None,
            })?;
        }
        Ok(())
    }

    fn row(&self) -> DecodeRow<'_> {
        let position = self.tokens.len() as u32 - 1;
        DecodeRow {
            token: self.tokens[position as usize],
            position,
            page_table: &self.pages,
            window_page: self.window_page,
            session: None,
        }
    }

    fn take(&mut self, token: Token, outcome: &mut Outcome) {
        self.cached += 1;
        if token != TURN_END && self.answered.len() < self.expected.len() + 32 {
            self.tokens.push(token);
            self.answered.push(token);
            return;
        }
        self.waiting = true;
        if self.answered != self.expected {
            outcome.wrong += 1;
            let text = |tokens: &[Token]| String::from_utf8_lossy(tokens).into_owned();
            outcome.first.get_or_insert_with(|| (text(&self.expected), text(&self.answered)));
            // What follows a wrong answer is another conversation, so that one fault is counted once.
            self.tokens.clear();
            self.cached = 0;
        }
    }
}

/// Whether a context as long as the long match stands twice in `text`, so that what follows it is not determined.
pub fn is_ambiguous(text: &str) -> bool {
    let mut seen = std::collections::BTreeSet::new();
    text.as_bytes().windows(LONG as usize).any(|window| !seen.insert(window))
}

fn random_call(rng: &mut impl RngExt) -> String {
    const NAMES: [&str; 5] = ["get_weather", "lookup_order", "update_ticket", "search_docs", "transfer_funds"];
    const KEYS: [&str; 8] = ["city", "order_id", "note", "path", "amount", "customer", "when", "tags"];
    let mut arguments = Map::new();
    for _ in 0..rng.random_range(1..6) {
        arguments.insert(KEYS[rng.random_range(0..KEYS.len())].to_owned(), random_value(rng, 0));
    }
    let arguments = Value::Object(arguments).to_string();
    let arguments = if rng.random() { arguments } else { escape(&arguments) };
    format!("{{\"name\": \"{}\", \"arguments\": {arguments}}}", NAMES[rng.random_range(0..NAMES.len())])
}

fn random_value(rng: &mut impl RngExt, depth: u32) -> Value {
    let mut text = |alphabet: &str, most: usize| -> String {
        let alphabet: Vec<char> = alphabet.chars().collect();
        (0..rng.random_range(0..most)).map(|_| alphabet[rng.random_range(0..alphabet.len())]).collect()
    };
    let plain = text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 -/\"\\\n", 60);
    let wide = text("ÀéñüЖ漢字🙂", 7);
    match rng.random_range(0..8) {
        0 => json!(plain),
        1 => json!(rng.random_range(-1_000_000_000_000i64..1_000_000_000_000)),
        2 => json!([Value::Null, json!(true), json!(false)][rng.random_range(0..3)]),
        3 => json!([plain, "alpha", rng.random_range(0..100)]),
        4 if depth < 2 => json!({"name": random_value(rng, depth + 1), "b": {"c": rng.random::<f64>()}}),
        5 => json!(""),
        6 => json!(rng.random::<u64>()),
        _ => json!(wide),
    }
}

/// Replaces everything outside ASCII by `\u` escapes.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        if character.is_ascii() {
            out.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{host::HostModel, model::Model, toggles::Toggles};

    fn toggles(pairs: &[(&str, &str)]) -> Toggles {
        let common = [("TOOLSTORM_MAX_CONTEXT", "4096"), ("TOOLSTORM_ORDER", "host")];
        Toggles::resolve(common.iter().chain(pairs).copied()).unwrap()
    }

    #[test]
    fn the_host_rule_answers_every_call() {
        let load = Load { rows: 4, context: 4096, turns: 300 };
        let outcome = dictate(&mut HostModel::new(64), load, Seed(1)).unwrap();
        assert_eq!((outcome.wrong, outcome.turns), (0, 300), "{:?}", outcome.first);
    }

    #[test]
    fn one_eager_stream_answers_every_call_in_both_formats() {
        for keys in ["0", "1"] {
            let toggles = toggles(&[
                ("TOOLSTORM_CUDA_GRAPH", "0"),
                ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"),
                ("SGLANG_DSV4_BF16_INDEX_K", keys),
                ("TOOLSTORM_MAX_BATCH", "32"),
                ("TOOLSTORM_BUCKETS", "32"),
            ]);
            let mut model = Model::new(&toggles, 32 * 16).unwrap();
            let load = Load { rows: 32, context: 4096, turns: 150 };
            let outcome = dictate(&mut model, load, Seed(2)).unwrap();
            assert_eq!(outcome.wrong, 0, "bf16 = {keys}: {:?}", outcome.first);
            assert!(outcome.calls > 150 && outcome.tokens > 10_000, "{outcome:?}");
        }
    }
}
