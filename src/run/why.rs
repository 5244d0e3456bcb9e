//! Why a call was corrupted, as far as the server's race log tells: the hits that reached the session's row, in words.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    drive::Exchange,
    scenario::hex,
    validate::{ExpectedCall, Verdict},
};

/// Hits that are told in full; all of them are in the file of the evidence.
const TOLD: usize = 6;
/// How the built-in engine begins a call; an answer that must be a call begins behind it.
const OPENING: &str = "{\"name\": \"";
/// The token with which the built-in engine ends an answer.
const END: u8 = 0xF9;

/// The race log at a launch's end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Races {
    /// Hits by kind: who read what, and who wrote over it.
    pub kinds: BTreeMap<String, u64>,
    /// The launch that the engine was told to replay, if it was.
    #[serde(default)]
    pub replayed: Option<Value>,
}

impl Races {
    /// What `GET /races` says.
    pub(super) fn read(page: Value) -> Result<Self, String> {
        serde_json::from_value(page).map_err(|error| error.to_string())
    }
}

/// The race hits behind a corrupted response.
#[derive(Debug)]
pub(super) struct Why {
    /// What the server said of the session, each hit of the corrupted round with `at_first_wrong_byte`; nothing where it
    /// could not be read.
    pub(super) log: Option<Value>,
    /// The same in sentences.
    pub(super) lines: Vec<String>,
}

impl Why {
    /// Of a corrupted response to a driver that asked for the race log; else nothing.
    pub(super) fn of(exchange: &Exchange, result: &Path) -> Option<Self> {
        let log = exchange.races.as_ref().filter(|_| exchange.judgement.verdict == Verdict::Corrupted)?;
        let mut log = match log {
            Ok(log) => log.clone(),
            Err(error) => {
                return Some(Self { log: None, lines: vec![format!("the race log could not be read: {error}")] });
            }
        };
        let dropped = log["dropped"].as_u64().unwrap_or_default();
        let dictated = exchange.turn.expectation.calls.as_ref().and_then(|calls| dictated(calls));
        let broke = |hit: &Value| dictated.as_ref().is_some_and(|dictated| broke(hit, dictated));
        let hits = log["hits"].as_array_mut().map_or(&mut [][..], Vec::as_mut_slice);
        let in_round = |hit: &Value| hit["round"] == exchange.turn.round;
        // A request that was cut and sent again may have been damaged both times: the last time is this answer's.
        let wrong_step = hits.iter().rfind(|hit| in_round(hit) && broke(hit)).map(|hit| hit["step"].clone());
        let mut lines = Vec::new();
        let (mut exact, mut round, mut earlier) = (Vec::new(), Vec::new(), 0);
        for hit in hits {
            if !in_round(hit) {
                earlier += 1;
                continue;
            }
            let here = wrong_step.as_ref() == Some(&hit["step"]);
            hit["at_first_wrong_byte"] = here.into();
            if here { exact.push(hit.clone()) } else { round.push(hit.clone()) }
        }
        let words = |hit: &Value| {
            let part = |name: &str| hit[name].as_str().unwrap_or_default().to_owned();
            format!("row {}, after `{}`: {}", hit["row"], part("after").escape_debug(), part("words"))
        };
        let replay = |hits: &[Value]| hits.last().and_then(|hit| Some(hit["replay"].as_str()?.to_owned()));
        if !exact.is_empty() {
            lines.push("in the step of the first wrong byte:".to_owned());
            lines.extend(exact.iter().take(TOLD).map(words));
        }
        if !round.is_empty() {
            let also = match (exact.is_empty(), &dictated) {
                (false, _) => "in other steps of this answer",
                (true, None) => "in steps of this answer, whose first wrong byte nobody knows",
                (true, Some(_)) if dropped > 0 => {
                    "none that was kept in the step of the first wrong byte; in other steps"
                }
                (true, Some(_)) => "none in the step of the first wrong byte; in other steps of this answer",
            };
            lines.push(format!("{also}, {} in all, the newest first:", round.len()));
            lines.extend(round.iter().rev().take(TOLD).map(words));
        }
        if exact.is_empty() && round.is_empty() {
            lines.push("no race hit reached this session's row in this round".to_owned());
        }
        if earlier > 0 {
            lines.push(format!(
                "{earlier} hits in earlier rounds, their other forms included, whose cache entries this one may read"
            ));
        }
        if dropped > 0 {
            lines.push(format!("{dropped} hits of the session were dropped"));
        }
        if let Some(token) = replay(&exact).or_else(|| replay(&round)) {
            lines.push(format!("the step again: toolstorm replay {token}{}", output_dir(result)));
        }
        Some(Self { log: Some(log), lines })
    }
}

/// The flag by which `replay` finds the result, where it does not lie in the usual place.
fn output_dir(result: &Path) -> String {
    match result.parent() {
        Some(parent) if parent != Path::new("results") => format!(" --output-dir {}", parent.display()),
        _ => String::new(),
    }
}

/// The tokens of the answer that makes exactly `calls`, as the built-in engine writes it; nothing where their bytes are
/// not known. A token is a byte.
fn dictated(calls: &[ExpectedCall]) -> Option<Vec<u8>> {
    let line = |call: &ExpectedCall| {
        Some(format!("{{\"name\": {}, \"arguments\": {}}}", json!(call.name), call.text.as_ref()?))
    };
    let lines = calls.iter().map(line).collect::<Option<Vec<_>>>()?.join("\n");
    let mut tokens = lines.strip_prefix(OPENING).unwrap_or_default().as_bytes().to_vec();
    tokens.push(END);
    Some(tokens)
}

/// Whether the hit's step gave the first wrong byte: all that was answered before was dictated, and this token was not.
/// The text that came says less: a parser took it apart, and what is no UTF-8 is lost from it.
fn broke(hit: &Value, dictated: &[u8]) -> bool {
    let Some(token) = hit["token"].as_u64().filter(|token| *token < dictated.len() as u64) else { return false };
    let (before, rest) = dictated.split_at(token as usize);
    hit["next_token"] != rest[0] && hit["answered"] == digest(before)
}

/// The first eight bytes of the SHA-256 in hexadecimal, as the race log has it of an answer.
fn digest(answer: &[u8]) -> String {
    hex(&Sha256::digest(answer)[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the engine is to answer to one dictated call.
    fn answer(name: &str, arguments: &str) -> Vec<u8> {
        dictated(&[call(name, arguments)]).unwrap()
    }

    fn call(name: &str, arguments: &str) -> ExpectedCall {
        ExpectedCall { name: name.into(), arguments: Value::Null, text: Some(arguments.into()) }
    }

    /// A hit in the step that gave the token numbered `token` of `answer`.
    fn hit(answer: &[u8], token: usize) -> Value {
        json!({"token": token, "answered": digest(&answer[..token]), "next_token": answer[token]})
    }

    /// The tokens of `came` whose step `broke` finds to have given the first wrong one.
    fn broken(came: &[u8], dictated: &[u8]) -> Vec<usize> {
        (0..came.len()).filter(|token| broke(&hit(came, *token), dictated)).collect()
    }

    /// `answer` with the token numbered `at` replaced.
    fn damaged(answer: &[u8], at: usize, token: u8) -> Vec<u8> {
        let mut came = answer.to_vec();
        came[at] = token;
        came
    }

    #[test]
    fn the_dictated_answer_is_what_the_engine_writes_behind_its_prompt() {
        let both = dictated(&[call("a", "{}"), call("b", "{\"c\": 1}")]).unwrap();
        assert_eq!(both, b"a\", \"arguments\": {}}\n{\"name\": \"b\", \"arguments\": {\"c\": 1}}\xf9");
        assert_eq!(dictated(&[]).unwrap(), [END]);
        assert_eq!(dictated(&[ExpectedCall { text: None, ..call("a", "{}") }]), None);
    }

    #[test]
    fn the_first_wrong_token_is_found_wherever_it_is() {
        let dictated = answer("tick", "{\"query\": \"Москва\"}");
        for at in 0..dictated.len() {
            for token in [b'x', 0x08, 0xD0, 0xFA, END].into_iter().filter(|token| *token != dictated[at]) {
                let mut came = damaged(&dictated, at, token);
                assert_eq!(broken(&came, &dictated), [at], "{token:#x}");
                // What comes after it has no say, be it right again, wrong again, missing or too long.
                came.truncate(at + 1);
                assert_eq!(broken(&came, &dictated), [at], "{token:#x}, cut");
                came.extend(vec![b'x'; dictated.len()]);
                assert_eq!(broken(&came, &dictated), [at], "{token:#x}, overlong");
            }
        }
        assert!(broken(&dictated, &dictated).is_empty());
    }

    #[test]
    fn a_damaged_separator_and_half_a_letter_are_explained() {
        // The parser takes all after the name for arguments: `, "argum\x08nts": {…}`.
        let dictated = answer("parcel_update", "{}");
        let came = damaged(&dictated, 22, 0x08);
        assert!(came.starts_with(b"parcel_update\", \"argum\x08nts"));
        assert_eq!(broken(&came, &dictated), [22]);
        // `к` is two bytes and its second one is wrong: the text that came parts one token before that.
        let dictated = answer("invoice_lookup", "{\"ref\": \"0-1-2373uhmb\", \"query\": \"Москва \"}");
        let second = dictated.len() - 10;
        let came = damaged(&dictated, second, b'2');
        assert!(String::from_utf8_lossy(&came).contains("Мос\u{fffd}2ва"));
        assert_eq!(broken(&came, &dictated), [second]);
    }

    #[test]
    fn a_hit_that_tells_no_token_explains_nothing() {
        assert!(!broke(&json!({"words": "another server's"}), &answer("a", "{}")));
        assert!(!broke(&json!({"token": 9000, "answered": "", "next_token": 1}), &answer("a", "{}")));
    }

    #[test]
    fn what_is_no_race_log_is_an_error() {
        assert!(Races::read(json!({"hits": 3})).unwrap_err().contains("kinds"));
        let page = json!({"hits": 3, "kinds": {"a/b overwritten by c": 3}, "replayed": null});
        let kinds = BTreeMap::from([("a/b overwritten by c".to_owned(), 3)]);
        assert_eq!(Races::read(page), Ok(Races { kinds, replayed: None }));
    }
}
