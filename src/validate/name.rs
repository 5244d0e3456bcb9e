//! Function names: put together from their pieces, and compared with the declared ones.

use std::borrow::Cow;

use super::assemble::Slot;

/// How the pieces of a name fit together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pieces {
    /// One name, once or several times.
    Whole,
    /// One name in pieces.
    Fragments,
    /// Pieces that contradict each other.
    Conflict,
    /// Two different declared names.
    TwoNames,
}

/// The name of a call and how it came about.
pub fn assemble(slot: &Slot, declared: impl Fn(&str) -> bool) -> (Cow<'_, str>, Pieces) {
    let pieces = &slot.names;
    let [first, .., last] = pieces.as_slice() else {
        return (Cow::Borrowed(pieces.first().map_or("", String::as_str)), doubled(slot, &declared));
    };
    let joined = pieces.concat();
    if declared(&joined) {
        return (Cow::Owned(joined), Pieces::Fragments);
    }
    let grows = pieces.windows(2).all(|pair| pair[1].starts_with(pair[0].as_str()));
    if grows && declared(last) {
        return (Cow::Borrowed(last), Pieces::Fragments);
    }
    if declared(first) {
        let other = pieces.iter().any(|piece| piece != first && declared(piece));
        let only = pieces.iter().all(|piece| piece == first);
        let pieces = if other {
            Pieces::TwoNames
        } else if only {
            Pieces::Whole
        } else {
            Pieces::Conflict
        };
        return (Cow::Borrowed(first), pieces);
    }
    (Cow::Owned(joined), Pieces::Fragments)
}

/// One piece that came more than once may still be half of a name that repeats itself.
fn doubled(slot: &Slot, declared: &impl Fn(&str) -> bool) -> Pieces {
    match slot.names.first() {
        Some(name) if slot.name_resent && !declared(name) && declared(&name.repeat(2)) => Pieces::Fragments,
        _ => Pieces::Whole,
    }
}

/// Why `name`, which nobody declared, is damage and not a tool that the model made up.
pub fn damage(name: &str, declared: &[&str]) -> Option<String> {
    if matches!(name, "null" | "None" | "none" | "undefined" | "nil" | "NaN") {
        return Some(format!("the name is the word {name:?}"));
    }
    let legal = |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '.' | ':' | '/');
    if let Some(illegal) = name.chars().find(|&character| !legal(character)) {
        return Some(format!("{illegal:?} cannot stand in a name"));
    }
    declared.iter().filter(|tool| !tool.is_empty()).find_map(|tool| {
        if name.starts_with(tool) || name.ends_with(tool) || is_inside(tool, name) {
            return Some(format!("extra text beside the declared name `{tool}`"));
        }
        is_cut_inside_word(name, tool).then(|| format!("the declared name `{tool}` is cut in mid-word"))
    })
}

/// Whether `name` holds `tool` between separators that no tool's own name has: `functions.get_weather:0`.
fn is_inside(tool: &str, name: &str) -> bool {
    name.split(['.', ':', '/']).any(|part| part == tool)
}

/// Whether `name` is `tool` with its head or tail missing, a cut being inside a word.
fn is_cut_inside_word(name: &str, tool: &str) -> bool {
    let Some(start) = tool.find(name).filter(|_| name.len() > 1 && name != tool) else { return false };
    let bytes = tool.as_bytes();
    let end = start + name.len();
    let torn = |at: usize| {
        let (before, after) = (bytes[at - 1], bytes[at]);
        is_inside_word(before, after)
    };
    let separator = |byte: u8| !byte.is_ascii_alphanumeric();
    (start > 0 && (torn(start) || separator(bytes[start])))
        || (end < tool.len() && (torn(end) || separator(bytes[end - 1])))
}

/// Two neighbours of one word: letters, and no new word by its capital.
fn is_inside_word(before: u8, after: u8) -> bool {
    let capital = before.is_ascii_lowercase() && after.is_ascii_uppercase();
    before.is_ascii_alphanumeric() && after.is_ascii_alphanumeric() && !capital
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[&str]) -> (String, Pieces) {
        let slot = Slot { names: names.iter().map(ToString::to_string).collect(), ..Slot::default() };
        let (name, pieces) = assemble(&slot, |name| matches!(name, "get_weather" | "search_docs"));
        (name.into_owned(), pieces)
    }

    #[test]
    fn pieces_are_assigned_first_and_appended_second() {
        assert_eq!(named(&["get_weather"]), ("get_weather".to_owned(), Pieces::Whole));
        assert_eq!(named(&["get_", "weather"]), ("get_weather".to_owned(), Pieces::Fragments));
        assert_eq!(named(&["get_", "get_weather"]), ("get_weather".to_owned(), Pieces::Fragments));
        assert_eq!(named(&["get_weather", "null"]), ("get_weather".to_owned(), Pieces::Conflict));
        assert_eq!(named(&["get_weather", "search_docs"]), ("get_weather".to_owned(), Pieces::TwoNames));
        assert_eq!(named(&[]), (String::new(), Pieces::Whole));
    }

    #[test]
    fn damage_is_told_from_invention() {
        let declared = ["get_weather", "QuickJS_run_js"];
        for name in [
            "functions.get_weather",
            "get_weather:0",
            "functions.get_weather:0",
            "get_weather</arg",
            "get_wea",
            "eather",
            "get_",
            "get_weather ",
            "null",
            "get weather",
            "get_weatherget_weather",
            "JS_run_j",
            "погода",
        ] {
            assert!(damage(name, &declared).is_some(), "{name}");
        }
        for name in ["get_stock_price", "run_js", "get", "weather", "JS_run_js", "GetWeather", "get-weather"] {
            assert_eq!(damage(name, &declared), None, "{name}");
        }
    }
}
