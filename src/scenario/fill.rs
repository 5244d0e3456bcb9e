//! Seeded content: prose that fills a context, and values that fill arguments.

use rand::{Rng, RngExt};
use serde_json::{Number, Value, json};

use super::{CONTEXT_BYTES, Content};

const WORDS: &[&str] = &[
    "the",
    "order",
    "was",
    "moved",
    "to",
    "another",
    "window",
    "because",
    "delivery",
    "could",
    "not",
    "be",
    "made",
    "before",
    "noon",
    "please",
    "check",
    "whether",
    "customer",
    "agreed",
    "with",
    "new",
    "date",
    "and",
    "tell",
    "support",
    "about",
    "any",
    "change",
    "in",
    "price",
    "stock",
    "returns",
    "after",
    "review",
    "shows",
    "seven",
    "open",
    "items",
    "from",
    "march",
    "harbour",
    "depot",
    "north",
    "gate",
    "driver",
    "signed",
    "for",
    "parcel",
    "while",
    "invoice",
    "remains",
    "unpaid",
    "until",
    "manager",
    "confirms",
    "refund",
    "policy",
    "applies",
    "only",
    "when",
    "label",
    "is",
    "intact",
    "otherwise",
    "claim",
    "goes",
    "through",
    "partner",
    "desk",
];

/// Each phrase keeps to one script, as real text does.
const PHRASES: &[&str] = &[
    "Grüße aus Köln",
    "çok güzel",
    "naïve café",
    "Żółć i gęśl",
    "Москва слезам",
    "Ελλάδα",
    "東京タワー",
    "漢字かな",
    "안녕하세요",
    "שלום",
    "مرحبا",
    "नमस्ते",
    "🙂🚚📦",
    "👩\u{200d}💻",
    "e\u{301}te\u{301}",
    "½ ≤ ¾",
    "“quoted”",
    "𝛼𝛽𝛾",
];

const ESCAPES: &[&str] = &["\"", "\\", "\n", "\t", "/", "\\n", "\u{1}", "\u{7f}", "\r\n", "{\"", "\"}", "\\u0041", "'"];

const WHOLE: &[i64] = &[
    0,
    -1,
    9_007_199_254_740_991,
    -9_007_199_254_740_991,
    9_007_199_254_740_993,
    i64::MAX,
    i64::MIN,
    2_147_483_648,
    -2_147_483_649,
    1_000_000_007,
];

const REAL: &[f64] = &[0.1, -0.5, 1e-7, 5e-324, 1.797_693_134_862_315_7e308, 123_456.789, 1e21, -2.5e-10];

/// What runs are made of.
const RUN: &str = "0";

/// Prose of exactly `bytes` bytes.
pub(super) fn prose(rng: &mut impl Rng, bytes: usize) -> String {
    let mut text = String::with_capacity(bytes + 16);
    while text.len() < bytes {
        text.push_str(pick(rng, WORDS));
        text.push_str(if rng.random_ratio(1, 12) { ".\n" } else { " " });
    }
    text.truncate(bytes);
    text
}

/// Bytes of filler between two runs, the first run included.
pub(super) const RUN_PERIOD: usize = 2000;

/// Prose of exactly `bytes` bytes in which a run of `run` bytes comes back every [`RUN_PERIOD`] bytes.
pub(super) fn filler(rng: &mut impl Rng, bytes: usize, run: usize) -> String {
    let mut text = prose(rng, bytes);
    // Prose is ASCII: bytes are replaced one by one.
    for begin in (0..bytes).step_by(RUN_PERIOD) {
        let run = begin..(begin + run).min(bytes);
        text.replace_range(run.clone(), &RUN.repeat(run.len()));
    }
    text
}

/// The longest run that a dictated text may hold: one byte more would repeat the context that decides the next byte.
pub(super) fn longest_run() -> String {
    RUN.repeat(CONTEXT_BYTES)
}

/// Text of the wanted kind, at least `bytes` bytes long and little more.
pub(super) fn text(rng: &mut impl Rng, content: Content, bytes: usize) -> String {
    let mut text = String::new();
    while text.len() < bytes {
        let piece = match content {
            Content::Unicode | Content::Escaped => pick(rng, PHRASES),
            Content::Escapes if rng.random_ratio(1, 2) => pick(rng, ESCAPES),
            _ => pick(rng, WORDS),
        };
        text.push_str(piece);
        if text.len() < bytes {
            text.push(' ');
        }
    }
    text
}

/// A short identifier-like word with a number: `depot-417`.
pub(super) fn label(rng: &mut impl Rng) -> String {
    format!("{}-{}", pick(rng, WORDS), rng.random_range(10..1000))
}

/// A whole number, at an edge where numbers are the content.
pub(super) fn whole(rng: &mut impl Rng, content: Content) -> Value {
    match content {
        Content::Numbers => json!(pick(rng, WHOLE)),
        _ => json!(rng.random_range(0..100_000)),
    }
}

/// A real number, at an edge where numbers are the content.
pub(super) fn real(rng: &mut impl Rng, content: Content) -> Value {
    let number = match content {
        Content::Numbers => pick(rng, REAL),
        _ => f64::from(rng.random_range(1..1_000_000)) / 100.0,
    };
    Number::from_f64(number).map_or(Value::Null, Value::Number)
}

/// One of `items`, which is not empty.
pub(super) fn pick<T: Copy>(rng: &mut impl Rng, items: &[T]) -> T {
    items[rng.random_range(0..items.len())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seed::Seed;

    #[test]
    fn prose_has_the_wanted_length_and_follows_its_seed() {
        for bytes in [0, 1, 17, 4000] {
            assert_eq!(prose(&mut Seed(1).rng(), bytes).len(), bytes);
        }
        assert_eq!(prose(&mut Seed(1).rng(), 300), prose(&mut Seed(1).rng(), 300));
        assert_ne!(prose(&mut Seed(1).rng(), 300), prose(&mut Seed(2).rng(), 300));
    }

    #[test]
    fn runs_come_back_and_change_no_length() {
        let text = filler(&mut Seed(1).rng(), 4500, 100);
        assert_eq!(text.len(), 4500);
        assert_eq!(text.match_indices(&RUN.repeat(100)).map(|(at, _)| at).collect::<Vec<_>>(), [0, 2000, 4000]);
        assert_eq!(filler(&mut Seed(1).rng(), 50, 100), RUN.repeat(50));
        assert_eq!(filler(&mut Seed(1).rng(), 900, 0), prose(&mut Seed(1).rng(), 900));
    }

    #[test]
    fn numbers_at_the_edges_survive_json() {
        for number in REAL {
            let text = serde_json::to_string(number).unwrap();
            assert_eq!(text.parse::<f64>().unwrap(), *number, "{text}");
        }
    }
}
