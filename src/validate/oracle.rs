//! What a response is held against, and the dictated calls against the delivered ones.

use serde::Serialize;
use serde_json::{Number, Value};
use similar::{ChangeTag, TextDiff};

use super::ExpectedCall;

/// What a response is held against, from least to most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Oracle {
    /// Form alone: neither tools nor calls are known.
    Form,
    /// The tools' names and schemas.
    Schema,
    /// The very calls that were dictated.
    Exact,
}

/// What the oracle says about the delivered calls.
#[derive(Debug, Clone, Default)]
pub struct Pairing<'a> {
    /// For every delivered call the dictated one it stands for.
    pub partners: Vec<Option<&'a ExpectedCall>>,
    /// How many dictated calls no delivered one stands for.
    pub missing: Vec<&'a ExpectedCall>,
    /// Every call came, in another order.
    pub reordered: bool,
}

/// A delivered call, as the pairing sees it.
#[derive(Debug, Clone, Copy)]
pub struct Delivered<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its argument object, where there is one.
    pub value: Option<&'a Value>,
    /// It carries no arguments.
    pub blank: bool,
}

/// Whether a delivered call may stand for a dictated one.
type Fits = fn(&Delivered<'_>, &ExpectedCall) -> bool;

impl<'a> Pairing<'a> {
    /// Pairs equal calls first, then calls of one name, then what is left, each in order.
    pub fn new(delivered: &[Delivered<'_>], dictated: &'a [ExpectedCall]) -> Self {
        let mut partners = vec![None; delivered.len()];
        let mut taken = vec![false; dictated.len()];
        let mut order = Vec::new();
        let passes: [Fits; 4] = [
            |call, wanted| call.name == wanted.name && is_same(call, &wanted.arguments),
            |call, wanted| call.name == wanted.name && !call.blank,
            |call, wanted| call.name == wanted.name,
            |call, _| !call.blank,
        ];
        for (pass, fits) in passes.iter().enumerate() {
            for (position, call) in delivered.iter().enumerate() {
                if partners[position].is_some() {
                    continue;
                }
                let free = (0..dictated.len()).find(|&at| !taken[at] && fits(call, &dictated[at]));
                if let Some(at) = free {
                    taken[at] = true;
                    partners[position] = Some(&dictated[at]);
                    if pass == 0 {
                        order.push((position, at));
                    }
                }
            }
        }
        let left: Vec<usize> = (0..dictated.len()).filter(|&at| !taken[at]).collect();
        order.sort_unstable();
        let reordered =
            left.is_empty() && order.len() == delivered.len() && order.windows(2).any(|pair| pair[0].1 > pair[1].1);
        Self { partners, missing: left.into_iter().map(|at| &dictated[at]).collect(), reordered }
    }
}

fn is_same(call: &Delivered<'_>, wanted: &Value) -> bool {
    match call.value {
        Some(value) => is_equal(value, wanted),
        None => call.blank && wanted.as_object().is_some_and(serde_json::Map::is_empty),
    }
}

/// Equal as JSON: the order of keys does not count, nor how a number is written.
pub fn is_equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => is_same_number(left, right),
        (Value::Array(left), Value::Array(right)) => {
            left.len() == right.len() && left.iter().zip(right).all(|(left, right)| is_equal(left, right))
        }
        (Value::Object(left), Value::Object(right)) => {
            left.len() == right.len()
                && left.iter().all(|(key, value)| right.get(key).is_some_and(|other| is_equal(value, other)))
        }
        _ => left == right,
    }
}

/// Whole numbers are compared exactly; a double would call neighbours above 2^53 equal.
fn is_same_number(left: &Number, right: &Number) -> bool {
    match (whole(left), whole(right)) {
        (Some(left), Some(right)) => left == right,
        _ => left.as_f64() == right.as_f64(),
    }
}

fn whole(number: &Number) -> Option<i128> {
    if let Some(small) = number.as_i64() {
        return Some(small.into());
    }
    if let Some(large) = number.as_u64() {
        return Some(large.into());
    }
    let double = number.as_f64()?;
    (double.fract() == 0.0 && double.abs() < 1e38).then_some(double as i128)
}

/// Where two values differ first, and how.
pub fn difference(got: &Value, wanted: &Value) -> String {
    let mut path = String::new();
    let (got, wanted) = descend(got, wanted, &mut path);
    let place = if path.is_empty() { "the arguments".to_owned() } else { path };
    match (got, wanted) {
        (Some(Value::String(got)), Some(Value::String(wanted))) => format!("{place}: {}", diff(wanted, got)),
        (None, Some(wanted)) => format!("{place}: missing, {} was dictated", short(wanted)),
        (Some(got), None) => format!("{place}: {} was not dictated", short(got)),
        (Some(got), Some(wanted)) => format!("{place}: {} instead of {}", short(got), short(wanted)),
        (None, None) => place,
    }
}

fn descend<'a>(got: &'a Value, wanted: &'a Value, path: &mut String) -> (Option<&'a Value>, Option<&'a Value>) {
    match (got, wanted) {
        (Value::Object(left), Value::Object(right)) => {
            let keys = right.keys().chain(left.keys());
            for key in keys {
                let (got, wanted) = (left.get(key), right.get(key));
                if let (Some(got), Some(wanted)) = (got, wanted) {
                    if !is_equal(got, wanted) {
                        path.push('/');
                        path.push_str(key);
                        return descend(got, wanted, path);
                    }
                } else {
                    path.push('/');
                    path.push_str(key);
                    return (got, wanted);
                }
            }
            (Some(got), Some(wanted))
        }
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            let place = left.iter().zip(right).position(|(left, right)| !is_equal(left, right));
            let Some(at) = place else { return (Some(got), Some(wanted)) };
            path.push('/');
            path.push_str(&at.to_string());
            descend(&left[at], &right[at], path)
        }
        _ => (Some(got), Some(wanted)),
    }
}

fn short(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 60 { format!("{}…", text.chars().take(60).collect::<String>()) } else { text }
}

/// A small diff of two texts: what is missing in `[-…-]`, what is new in `{+…+}`.
pub fn diff(wanted: &str, got: &str) -> String {
    const LONGEST: usize = 400;
    const CONTEXT: usize = 12;
    let common = wanted.bytes().zip(got.bytes()).take_while(|(left, right)| left == right).count();
    let start = (0..=common.saturating_sub(CONTEXT)).rev().find(|&at| wanted.is_char_boundary(at)).unwrap_or(0);
    let clip = |text: &str| text[start..].chars().take(LONGEST).collect::<String>();
    let (old, new) = (clip(wanted), clip(got));
    let mut shown = if start > 0 { "…".to_owned() } else { String::new() };
    for change in TextDiff::from_chars(old.as_str(), new.as_str()).iter_all_changes() {
        let text = change.value().escape_debug();
        let piece = match change.tag() {
            ChangeTag::Equal => text.to_string(),
            ChangeTag::Delete => format!("[-{text}-]"),
            ChangeTag::Insert => format!("{{+{text}+}}"),
        };
        shown.push_str(&piece);
    }
    shown.replace("-][-", "").replace("+}{+", "")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_compared_exactly_and_by_value() {
        assert!(is_equal(&json!(5), &json!(5.0)));
        assert!(!is_equal(&json!(9_007_199_254_740_993_i64), &json!(9_007_199_254_740_992_i64)));
        assert!(is_equal(&json!({"a": 1, "b": [1, 2]}), &json!({"b": [1, 2], "a": 1})));
    }

    #[test]
    fn the_difference_names_the_place_and_shows_a_small_diff() {
        let wanted = json!({"path": "a", "order": "7_001_22", "n": [1, 2]});
        let got = json!({"path": "a", "order": "700122", "n": [1, 2]});
        assert_eq!(difference(&got, &wanted), "/order: 7[-_-]001[-_-]22");
        assert_eq!(difference(&json!({"n": [1, 3]}), &json!({"n": [1, 2]})), "/n/1: 3 instead of 2");
        assert_eq!(difference(&json!({}), &json!({"n": 1})), "/n: missing, 1 was dictated");
    }

    #[test]
    fn equal_calls_are_paired_first() {
        let call = |city: &str| ExpectedCall { name: "w".to_owned(), arguments: json!({"c": city}), text: None };
        let dictated = [call("a"), call("b")];
        let (b, a) = (json!({"c": "b"}), json!({"c": "a"}));
        let got = [&b, &a].map(|value| Delivered { name: "w", value: Some(value), blank: false });
        let pairing = Pairing::new(&got, &dictated);
        assert!(pairing.reordered);
        assert!(pairing.missing.is_empty());
        let pairing = Pairing::new(&got[..1], &dictated);
        assert_eq!(pairing.missing.len(), 1);
        assert!(!pairing.reordered);
    }
}
