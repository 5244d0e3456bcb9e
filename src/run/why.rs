//! Why a call was corrupted, as far as the server's race log tells: the hits that reached the session's row, in words.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{drive::Exchange, validate::Verdict};

/// Hits that are told in full; all of them are in the file of the evidence.
const TOLD: usize = 6;
/// How the built-in engine begins a call; an answer that must be a call begins behind it.
const OPENING: &str = "{\"name\": \"";
/// Characters before the first wrong one that must agree with the answer at a hit's step.
const AGREEING: usize = 4;

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
        let broken = first_wrong(exchange);
        let mut lines = Vec::new();
        let (mut exact, mut round, mut earlier) = (Vec::new(), Vec::new(), 0);
        for hit in log["hits"].as_array_mut().into_iter().flatten() {
            if hit["round"] != exchange.turn.round {
                earlier += 1;
                continue;
            }
            let here = broken.as_ref().is_some_and(|(before, wrong)| broke(hit, before, wrong));
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
            let also = if exact.is_empty() { "none in the step of the first wrong byte; " } else { "" };
            lines.push(format!("{also}in other steps of this answer, {} in all, the newest first:", round.len()));
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
        match log["dropped"].as_u64() {
            Some(dropped) if dropped > 0 => lines.push(format!("{dropped} older hits of the session were dropped")),
            _ => {}
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

/// What came before the first wrong character of the first corrupted call, as the built-in engine writes it, and what
/// came from there on.
fn first_wrong(exchange: &Exchange) -> Option<(String, String)> {
    let dictated = exchange.turn.expectation.calls.as_ref()?;
    let calls = &exchange.judgement.calls;
    let place = calls.iter().position(|call| call.verdict == Verdict::Corrupted)?;
    let line = |name: &str, arguments: &str| format!("{OPENING}{name}\", \"arguments\": {arguments}}}");
    let wanted = dictated.get(place)?;
    let wanted = line(&wanted.name, wanted.text.as_ref()?);
    let came = line(&calls[place].name, &calls[place].arguments);
    let shared =
        wanted.chars().zip(came.chars()).take_while(|(a, b)| a == b).map(|(letter, _)| letter.len_utf8()).sum();
    let (before, wrong) = came.split_at(shared);
    Some((before.to_owned(), wrong.to_owned()))
}

/// Whether the hit's step gave the first wrong byte: the answer before it ends alike, and this byte came next.
fn broke(hit: &Value, before: &str, wrong: &str) -> bool {
    let after = hit["after"].as_str().unwrap_or_default();
    let agreeing = after.chars().rev().zip(before.chars().rev()).take_while(|(a, b)| a == b).count();
    // What is kept of the answer may begin inside a letter, and may reach back to before the call.
    let whole = after.trim_start_matches('\u{fffd}').chars().count().min(before.chars().count());
    let next = hit["next"].as_str().unwrap_or_default();
    let first_call = hit["token"] == after.len() && before.strip_prefix(OPENING) == Some(after);
    let same_place = first_call || agreeing >= whole && agreeing >= AGREEING;
    same_place && (wrong.is_empty() || next == "\u{fffd}" || wrong.starts_with(next))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_step_of_the_first_wrong_byte_is_found_by_what_was_answered_before() {
        let hit = |after: &str, next: &str| json!({"token": 60, "after": after, "next": next});
        let (before, wrong) = ("{\"city\": \"Köln\", \"ref\": \"0-", "7x\"}");
        assert!(broke(&hit("ln\", \"ref\": \"0-", "7"), before, wrong));
        assert!(broke(&hit("\u{fffd}ln\", \"ref\": \"0-", "7"), before, wrong), "cut inside a letter");
        assert!(!broke(&hit("\u{fffd}", "7"), "", wrong), "nothing to compare");
        assert!(!broke(&hit("ln\", \"ref\": \"0-", "8"), before, wrong), "another byte came");
        assert!(!broke(&hit("ln\", \"ref\": \"1-", "7"), before, wrong), "another place");
        assert!(broke(&hit("n\", \"arguments\": {\"a\": \"", "b"), "{\"a\": \"", "bc"), "reaches back before the text");
        assert!(broke(&hit("\"ref\": \"0-", "\u{fffd}"), before, ""), "the answer ended");
        let early = json!({"token": 2, "after": "ti", "next": "x"});
        assert!(broke(&early, "{\"name\": \"ti", "xket"), "all that was answered by then");
        assert!(!broke(&early, "{\"name\": \"tick", "x"), "later");
    }

    #[test]
    fn what_is_no_race_log_is_an_error() {
        assert!(Races::read(json!({"hits": 3})).unwrap_err().contains("kinds"));
        let page = json!({"hits": 3, "kinds": {"a/b overwritten by c": 3}, "replayed": null});
        let kinds = BTreeMap::from([("a/b overwritten by c".to_owned(), 3)]);
        assert_eq!(Races::read(page), Ok(Races { kinds, replayed: None }));
    }
}
