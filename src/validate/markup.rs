//! Call markup of the common model families, where it must not be: in content, reasoning, names, keys and values.
//!
//! Texts are normalised first, so that one marker stands for its variants: ASCII lower case, every kind of vertical bar
//! as `|`, doubled bars as one, `▁` as `_`.

use std::borrow::Cow;

use serde_json::Value;

use super::json;

/// What a marker proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A call is being written.
    Call,
    /// A control token of the chat template; no call by itself.
    Turn,
}

/// The markers of one family.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// Its name in messages.
    pub name: &'static str,
    /// Its markers, normalised.
    pub markers: &'static [&'static str],
    /// What they prove.
    pub kind: Kind,
}

/// Every family, most telling first. Anything shaped like `<|word|>` or `<…tool_call…>` counts without an entry here.
/// `<tool_call_id>` does not: in prose such a tag holds the place of a value.
pub const FAMILIES: &[Family] = &[
    Family { name: "DSML", markers: &["<|dsml", "</|dsml", "|dsml|", "<dsml"], kind: Kind::Call },
    Family { name: "MiniMax", markers: &["]<]minimax[>[", "<minimax:", "</minimax:"], kind: Kind::Call },
    Family { name: "GLM", markers: &["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"], kind: Kind::Call },
    Family {
        name: "Hermes/Qwen",
        markers: &[
            "<tool_call>",
            "</tool_call>",
            "<tool_calls>",
            "</tool_calls>",
            "<function=",
            "</function>",
            "<parameter=",
            "</parameter>",
            "<toolcall>",
            "</toolcall>",
            "<function_call>",
            "</function_call>",
            "✿function✿",
            "✿args✿",
        ],
        kind: Kind::Call,
    },
    Family {
        name: "invoke",
        markers: &["<function_calls>", "</function_calls>", "<invoke name=", "</invoke>", "<parameter name="],
        kind: Kind::Call,
    },
    Family {
        name: "Gemma",
        markers: &["<|tool_call>", "<tool_call|>", "<start_function_call>", "<end_function_call>"],
        kind: Kind::Call,
    },
    Family {
        name: "Mistral",
        markers: &["[tool_calls]", "[/tool_calls]", "[tool_results]", "[call_id]"],
        kind: Kind::Call,
    },
    Family { name: "Llama", markers: &["<|python_tag|>"], kind: Kind::Call },
    Family { name: "Phi", markers: &["functools["], kind: Kind::Call },
    Family {
        name: "harmony",
        markers: &["<|channel|>", "<|message|>", "<|call|>", "<|constrain|>", "to=functions.", "<|recipient|>"],
        kind: Kind::Call,
    },
    Family {
        name: "chat template",
        markers: &["<|\"|>", "<escape>", "<start_of_turn>", "<end_of_turn>", "[/inst]", "]~b]", "[e~["],
        kind: Kind::Turn,
    },
];

/// What names a tag of calls, wherever it stands in the tag.
const SPEAKING: &[&str] = &[
    "tool_call",
    "toolcall",
    "tool_use",
    "tool_sep",
    "function_call",
    "python_tag",
    "python_start",
    "python_end",
    "action_start",
    "action_end",
    "|plugin|",
];

/// A marker found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hit {
    /// The family it belongs to.
    pub family: &'static str,
    /// The marker, normalised.
    pub marker: String,
    /// What it proves.
    pub kind: Kind,
}

impl Hit {
    fn new(family: &'static str, marker: &str, kind: Kind) -> Self {
        Self { family, marker: marker.to_owned(), kind }
    }
}

/// The most telling marker in `text`; `extra` are markers of the scenario.
pub fn find(text: &str, extra: &[String]) -> Option<Hit> {
    if let Some(marker) = extra.iter().find(|marker| !marker.is_empty() && text.contains(marker.as_str())) {
        return Some(Hit::new("scenario", marker, Kind::Call));
    }
    if !text.bytes().any(|byte| matches!(byte, b'<' | b'[' | b']' | b'=') || byte >= 0x80) {
        return None;
    }
    let normal = normalise(text);
    let mut best = None;
    let mut take = |hit: Hit| {
        if best.as_ref().is_none_or(|best: &Hit| hit.kind < best.kind) {
            best = Some(hit);
        }
    };
    for (at, character) in normal.char_indices() {
        if matches!(character, '<' | '[' | ']' | '|' | 't' | 'f' | '✿')
            && let Some(hit) = at_position(&normal[at..])
        {
            let found = hit.kind;
            take(hit);
            if found == Kind::Call {
                break;
            }
        }
    }
    if text.contains("[ARGS]{") || text.contains("[ARGS] {") {
        take(Hit::new("Mistral", "[args]", Kind::Call));
    }
    if normal.trim_end().ends_with("</s>") {
        take(Hit::new("chat template", "</s>", Kind::Turn));
    }
    best
}

fn at_position(rest: &str) -> Option<Hit> {
    for family in FAMILIES {
        if let Some(marker) = family.markers.iter().find(|marker| rest.starts_with(**marker)) {
            return Some(Hit::new(family.name, marker, family.kind));
        }
    }
    if !rest.starts_with('<') {
        return None;
    }
    token(rest).or_else(|| cut_off(rest))
}

/// Tokens by shape: `<|word|>`, and tags whose name speaks of tool calls.
fn token(rest: &str) -> Option<Hit> {
    let limit = rest.char_indices().nth(48).map_or(rest.len(), |(at, _)| at);
    if let Some((_, tag)) = rest[1..limit].split_once(':')
        && ["invoke", "function_calls", "parameter name=", "tool_call"].iter().any(|word| tag.starts_with(word))
        && !rest[1..limit - tag.len()].contains([' ', '>', '\n'])
    {
        return Some(Hit::new("namespaced tag", &rest[..limit - tag.len()], Kind::Call));
    }
    let end = rest[..limit].find('>')?;
    let token = &rest[..=end];
    let inner = &token[1..end];
    if inner.contains(['<', '\n', '{']) {
        return None;
    }
    let speaks_of_calls = SPEAKING.iter().any(|word| inner.contains(word)) && !inner.ends_with("_id");
    let control = inner.len() > 2 && inner.starts_with('|') && inner.ends_with('|');
    match (control, speaks_of_calls) {
        (true, false) => Some(Hit::new("chat template", token, Kind::Turn)),
        (true, true) => Some(Hit::new("control token", token, Kind::Call)),
        (false, true) if !inner.contains(' ') => Some(Hit::new("tag", token, Kind::Call)),
        _ => None,
    }
}

/// A marker that the end of the text cuts off.
fn cut_off(rest: &str) -> Option<Hit> {
    const SHORTEST: usize = 5;
    if rest.len() < SHORTEST || rest.len() > 48 {
        return None;
    }
    let known = FAMILIES
        .iter()
        .find(|family| family.markers.iter().any(|marker| marker.starts_with('<') && marker.starts_with(rest)));
    if let Some(family) = known {
        return Some(Hit::new(family.name, rest, family.kind));
    }
    let word = rest.strip_prefix("<|")?;
    let is_word = word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    is_word.then(|| Hit::new("control token", rest, if word.contains("tool") { Kind::Call } else { Kind::Turn }))
}

fn normalise(text: &str) -> Cow<'_, str> {
    if text.is_ascii() && !text.contains("||") && !text.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Cow::Borrowed(text);
    }
    let mut normal = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '|' | '｜' | '‖' | '│' | '❘' | '∣' | '¦' | '┃' => {
                if !normal.ends_with('|') {
                    normal.push('|');
                }
            }
            '▁' => normal.push('_'),
            _ => normal.push(character.to_ascii_lowercase()),
        }
    }
    Cow::Owned(normal)
}

/// Whether the whole of `content` is a call written without any marker of calls, of a tool called as `declared` says.
pub fn is_bare_call(content: &str, declared: impl Fn(&str) -> bool) -> bool {
    let text = uncover(content.trim());
    if text.starts_with(['{', '[']) && json_calls(text, &declared) {
        return true;
    }
    pythonic(text, &declared) || name_then_object(text, &declared) || react(text, &declared)
}

/// The text without what only covers it: thoughts, tokens of the chat template, a pair of tags, a fence, `print(…)`.
fn uncover(text: &str) -> &str {
    let mut inner = text.rsplit_once("</think>").map_or(text, |(_, after)| after.trim());
    loop {
        let before = inner.len();
        inner = unfence(untag(inner));
        inner = inner.strip_prefix(">>>").unwrap_or(inner);
        inner = inner.strip_prefix("print(").and_then(|rest| rest.strip_suffix(')')).unwrap_or(inner);
        inner = inner.strip_prefix("default_api.").unwrap_or(inner).trim();
        if inner.len() == before {
            return inner;
        }
    }
}

/// The text without one tag or control token at its start, with the role behind it, and one at its end.
fn untag(text: &str) -> &str {
    /// Bytes of a tag at most. Looking no further keeps the rounds of [`uncover`] linear in the text.
    const LONGEST: usize = 48;
    let is_word = |tag: &str| {
        let letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'|' | b'-');
        !tag.is_empty() && tag.bytes().all(letter)
    };
    let is_control = |tag: &str| tag.len() > 2 && tag.starts_with('|') && tag.ends_with('|');
    let opening = text.strip_prefix('<').and_then(|rest| {
        let end = rest.bytes().take(LONGEST + 1).position(|byte| byte == b'>')?;
        Some((&rest[..end], &rest[end + 1..])).filter(|(tag, _)| is_word(tag))
    });
    let closing = text.strip_suffix('>').and_then(|rest| {
        let length = rest.bytes().rev().take(LONGEST + "/<".len()).position(|byte| byte == b'<')?;
        let start = rest.len() - length;
        Some((&rest[..start - 1], &rest[start..]))
    });
    let pair = |tag: &str| closing.is_some_and(|(_, end)| end.strip_prefix('/') == Some(tag));
    match (opening, closing) {
        (Some((tag, rest)), _) if is_control(tag) => {
            let rest = rest.trim_start();
            rest.strip_prefix("assistant\n").unwrap_or(rest)
        }
        (Some((tag, rest)), Some((before, _))) if pair(tag) => &rest[..before.len().saturating_sub(tag.len() + 2)],
        (_, Some((before, tag))) if is_word(tag) && is_control(tag) => before.trim_end(),
        _ => text,
    }
}

fn unfence(text: &str) -> &str {
    let Some(inner) = text.strip_prefix("```").and_then(|rest| rest.strip_suffix("```")) else { return text };
    inner.trim_start_matches(|character: char| character.is_ascii_alphanumeric() || character == '_').trim()
}

/// One or more JSON calls and nothing else, with or without separators.
fn json_calls(text: &str, declared: &impl Fn(&str) -> bool) -> bool {
    let mut rest = text;
    while !rest.is_empty() {
        let Ok(document) = json::document(rest) else { return false };
        if !is_call(&document.value, declared) {
            return false;
        }
        rest = rest[document.end..].trim_start_matches([' ', '\n', '\r', '\t', ';', ',']);
    }
    true
}

fn is_call(value: &Value, declared: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::Array(items) => !items.is_empty() && items.iter().all(|item| is_call(item, declared)),
        Value::Object(map) => {
            if let Some(calls) = map.get("tool_calls") {
                return is_call(calls, declared);
            }
            for key in ["function", "function_call"] {
                if let Some(inner @ Value::Object(_)) = map.get(key) {
                    return is_call(inner, declared);
                }
            }
            if let (1, Some((name, Value::Object(_)))) = (map.len(), map.iter().next()) {
                return declared(name);
            }
            let name = ["name", "function", "tool", "tool_name", "action", "recipient_name"]
                .iter()
                .find_map(|key| map.get(*key)?.as_str());
            let named = name.is_some_and(|name| declared(name.strip_prefix("functions.").unwrap_or(name)));
            let keys = ["arguments", "parameters", "args", "input", "action_input", "kwargs", "params"];
            named && keys.iter().any(|key| map.contains_key(*key))
        }
        _ => false,
    }
}

/// `[name(key=value), …]`, brackets optional for one call.
fn pythonic(text: &str, declared: &impl Fn(&str) -> bool) -> bool {
    let inner = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text).trim();
    let Some((name, rest)) = inner.split_once('(') else { return false };
    let arguments = rest.strip_suffix(')');
    let literal =
        |text: &str| text.starts_with(['"', '\'', '{', '[']) || text.starts_with(|c: char| c.is_ascii_digit());
    let arguments = arguments.filter(|text| text.is_empty() || text.contains('=') || literal(text.trim()));
    declared(name.trim()) && arguments.is_some()
}

/// `Action: name` with `Action Input: …` on the line behind it.
fn react(text: &str, declared: &impl Fn(&str) -> bool) -> bool {
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty()).peekable();
    while let Some(line) = lines.next() {
        let named = line.strip_prefix("Action:").is_some_and(|name| declared(name.trim()));
        if named && lines.peek().is_some_and(|next| next.starts_with("Action Input:")) {
            return true;
        }
    }
    false
}

/// `name\n{…}`, `functions.name:0{…}`.
fn name_then_object(text: &str, declared: &impl Fn(&str) -> bool) -> bool {
    let Some(brace) = text.find('{') else { return false };
    let name = text[..brace].trim();
    let name = name.strip_prefix("functions.").unwrap_or(name);
    let name = name.split_once(':').map_or(name, |(name, _)| name);
    declared(name) && json::strict(&text[brace..]).is_some_and(|value| value.is_object())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(text: &str) -> Option<Kind> {
        find(text, &[]).map(|hit| hit.kind)
    }

    #[test]
    fn every_family_is_found_whatever_its_bars_and_case() {
        for text in [
            "<｜DSML｜invoke name=\"x\">",
            "a <||DSML||parameter>",
            "<‖DSML‖",
            "</｜｜DSML｜｜tool_",
            "<TOOL_CALL>",
            "<seed:tool_call>",
            "<longcat_tool_call>{",
            "<ns:invoke name=\"x\">",
            "</ns:function_calls>",
            "<｜tool▁calls▁begin｜>",
            "<|tool_call_begin|>functions.x:0",
            "]<]minimax[>[<tool_call>",
            "[TOOL_CALLS]x[ARGS]{}",
            "x[ARGS]{\"a\":1}",
            "<|python_tag|>{",
            "commentary to=functions.get_weather",
            "<function=get_weather>",
            "text ends in <tool_ca",
            "</parameter",
            "<|tool_call>call:x{",
        ] {
            assert_eq!(kind(text), Some(Kind::Call), "{text}");
        }
        for text in ["sunny<|im_end|>", "pic.png<|\"|>", "sunny<|im_en", "done</s>"] {
            assert_eq!(kind(text), Some(Kind::Turn), "{text}");
        }
    }

    #[test]
    fn ordinary_text_has_no_markup() {
        for text in [
            "a < b || c > d",
            "usage: cmd [OPTIONS] [ARGS]...",
            "<think>Lyon again.</think>",
            "if (a<b) { x[0] = 1 }",
            "<p>hello</p>",
            "これは｜表｜です",
            "Vec<Option<u8>>",
            "Run <python_path>/bin/pip install x.",
            "POST /messages/<tool_use_id>",
            "<plugin>maven-jar-plugin</plugin>",
            "|---|---|",
        ] {
            assert_eq!(find(text, &[]), None, "{text}");
        }
    }

    #[test]
    fn markers_of_the_scenario_count() {
        assert_eq!(find("§call§ x", &["§call§".to_owned()]).map(|hit| hit.family), Some("scenario"));
    }

    #[test]
    fn bare_calls_fill_the_whole_content() {
        let declared = |name: &str| name == "run_shell";
        for text in [
            r#"{"name": "run_shell", "arguments": {"cmd": "ls"}}"#,
            "```json\n[{\"function\": {\"name\": \"run_shell\", \"arguments\": \"{}\"}}]\n```",
            r#"{"name": "run_shell", "parameters": {}}; {"name": "run_shell", "parameters": {}}"#,
            "[run_shell(cmd=\"ls\")]",
            "run_shell\n{\"cmd\": \"ls\"}",
            "functions.run_shell:0{\"cmd\": \"ls\"}",
            "<|im_start|>assistant\n{\"name\": \"run_shell\", \"arguments\": {}}<|im_end|>",
            "<think>\nso be it\n</think>\n<tools>\n{\"name\": \"run_shell\", \"arguments\": {}}\n</tools>",
            "print(default_api.run_shell(cmd=\"ls\"))",
            "run_shell(\"ls\")",
            ">>>run_shell\n{\"cmd\": \"ls\"}",
            "Thought: so.\nAction: run_shell\nAction Input: {\"cmd\": \"ls\"}",
            r#"{"run_shell": {"cmd": "ls"}}"#,
            r#"{"function_call": {"name": "run_shell", "arguments": "{}"}}"#,
        ] {
            assert!(is_bare_call(text, declared), "{text}");
        }
        for text in [
            r#"Try {"name": "run_shell", "arguments": {}}"#,
            r#"{"name": "other", "arguments": {}}"#,
            r#"{"name": "run_shell"}"#,
            "run_shell is useful",
            "run_shell(command)",
            "<p>run_shell is useful</p>",
            "Action: run_shell it, please.\nAction Input: none",
            "<run_shell></run_shell>",
            r#"{"run_shell": "ls"}"#,
            "<>",
            "<|>",
            "<a></a>",
            "",
        ] {
            assert!(!is_bare_call(text, declared), "{text}");
        }
    }
}
