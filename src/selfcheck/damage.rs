//! One way or several of breaking an answer, for every class.

use rand::seq::IndexedRandom;
use rand_pcg::Pcg64Mcg;
use serde_json::{Value, json};

use super::{
    End, Response, Truth, canary,
    draft::{Call, Draft, Request, chunk, document, pieces, random},
    markup, tools,
};

/// How an answer is broken.
#[derive(Clone, Copy)]
pub(super) enum Make {
    /// In the draft.
    Draft(fn(&mut Pcg64Mcg, &mut Request, &mut Draft)),
    /// In the bytes.
    Bytes(fn(&mut Pcg64Mcg, &mut Request, &mut Draft) -> Response),
}

/// One way of breaking an answer, and what the result must be called.
pub struct Kind {
    /// The truth.
    pub truth: Truth,
    pub(super) make: Make,
}

impl Kind {
    const fn new(verdict: &'static str, class: &'static str, make: Make) -> Self {
        Self { truth: Truth { verdict, class }, make }
    }
}

/// Every class but the intact answer.
pub const KINDS: &[Kind] = &[
    Kind::new("valid", "no_call", Make::Draft(no_call)),
    Kind::new("valid", "model_unknown_tool", Make::Draft(unknown_tool)),
    Kind::new("transport", "http_error", Make::Bytes(http_error)),
    Kind::new("transport", "stream_stalled", Make::Bytes(stream_stalled)),
    Kind::new("refused", "server_refused", Make::Bytes(server_refused)),
    Kind::new("refused", "request_rejected", Make::Bytes(request_rejected)),
    Kind::new("corrupted", "cross_session", Make::Draft(cross_session)),
    Kind::new("transport", "error_payload", Make::Bytes(error_payload)),
    Kind::new("transport", "bad_envelope", Make::Bytes(bad_envelope)),
    Kind::new("transport", "bad_frame", Make::Bytes(bad_frame)),
    Kind::new("transport", "stream_truncated", Make::Bytes(stream_truncated)),
    Kind::new("corrupted", "degenerate", Make::Draft(degenerate)),
    Kind::new("incomplete", "length_cutoff", Make::Draft(length_cutoff)),
    Kind::new("incomplete", "aborted", Make::Draft(aborted)),
    Kind::new("refused", "model_refusal", Make::Draft(model_refusal)),
    Kind::new("corrupted", "markup_leak", Make::Draft(markup_leak)),
    Kind::new("corrupted", "call_lost", Make::Draft(call_lost)),
    Kind::new("corrupted", "empty_response", Make::Draft(empty_response)),
    Kind::new("corrupted", "phantom_call", Make::Draft(phantom_call)),
    Kind::new("corrupted", "orphan_delta", Make::Bytes(orphan_delta)),
    Kind::new("corrupted", "call_merged", Make::Draft(call_merged)),
    Kind::new("corrupted", "args_duplicated", Make::Bytes(args_duplicated)),
    Kind::new("corrupted", "name_missing", Make::Draft(name_missing)),
    Kind::new("corrupted", "name_mangled", Make::Draft(name_mangled)),
    Kind::new("corrupted", "args_wrong_shape", Make::Draft(args_wrong_shape)),
    Kind::new("corrupted", "encoding_damage", Make::Bytes(encoding_damage)),
    Kind::new("corrupted", "args_extra_text", Make::Draft(args_extra_text)),
    Kind::new("corrupted", "args_truncated", Make::Draft(args_truncated)),
    Kind::new("corrupted", "args_malformed", Make::Draft(args_malformed)),
    Kind::new("corrupted", "args_lost", Make::Draft(args_lost)),
    Kind::new("corrupted", "markup_residue", Make::Draft(markup_residue)),
    Kind::new("corrupted", "type_stringified", Make::Draft(type_stringified)),
    Kind::new("corrupted", "schema_violation", Make::Draft(schema_violation)),
    Kind::new("corrupted", "value_altered", Make::Draft(value_altered)),
    Kind::new("corrupted", "late_delta", Make::Bytes(late_delta)),
    Kind::new("corrupted", "id_invalid", Make::Draft(id_invalid)),
];

fn choose<'t>(rng: &mut Pcg64Mcg, texts: &[&'t str]) -> &'t str {
    texts.choose(rng).copied().unwrap_or_default()
}

/// The first call, whose arguments are never empty.
fn victim(draft: &mut Draft) -> &mut Call {
    &mut draft.calls[0]
}

/// Rewrites the first call's arguments as a value.
fn alter(draft: &mut Draft, request: &Request, change: impl FnOnce(&mut Value)) {
    let mut arguments = request.dictated[0].arguments.clone();
    change(&mut arguments);
    victim(draft).set_text(arguments.to_string());
}

/// Leaves the oracle out. Values that look like damage are right only because they were dictated.
fn without_oracle(request: &mut Request, draft: &mut Draft) {
    request.has_oracle = false;
    alter(draft, request, |value| value["text"] = json!("plain"));
}

fn prose(rng: &mut Pcg64Mcg, draft: &mut Draft) {
    draft.calls.clear();
    draft.finish = json!("stop");
    let text = choose(rng, &["The order is on its way.", "Done — 完了しました。", "I would need the order number."]);
    text.clone_into(&mut draft.content);
}

fn no_call(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    request.has_oracle = false;
    prose(rng, draft);
}

fn unknown_tool(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    without_oracle(request, draft);
    victim(draft).name = json!(choose(rng, &["lookup_weather", "browser.open", "send-mail", "Calculator"]));
}

fn status(status: u16, text: &str) -> Response {
    Response { status, content_type: "text/plain", pieces: vec![text.as_bytes().to_vec()], end: End::Clean }
}

fn http_error(rng: &mut Pcg64Mcg, _: &mut Request, _: &mut Draft) -> Response {
    status([500, 502, 504, 301][random(rng, 4) as usize], "Internal Server Error")
}

fn server_refused(rng: &mut Pcg64Mcg, _: &mut Request, _: &mut Draft) -> Response {
    let code = [429, 503][random(rng, 2) as usize];
    status(code, choose(rng, &["{\"error\":{\"message\":\"overloaded\"}}", "slow down", ""]))
}

fn request_rejected(rng: &mut Pcg64Mcg, _: &mut Request, _: &mut Draft) -> Response {
    status([400, 404, 413, 422][random(rng, 4) as usize], "{\"error\":{\"message\":\"cannot decode arguments\"}}")
}

/// A stream that lost everything from a random frame on.
fn headless_tail(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) -> Response {
    (request.stream, draft.stream, draft.done) = (true, true, false);
    let mut frames = draft.frames(rng);
    let kept = 1 + random(rng, frames.len() as u64 - 1) as usize;
    frames.truncate(kept);
    draft.stream_of(rng, frames)
}

fn stream_stalled(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) -> Response {
    let response = headless_tail(rng, request, draft);
    Response { end: End::Stall, ..response }
}

fn stream_truncated(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) -> Response {
    let mut response = headless_tail(rng, request, draft);
    if random(rng, 2) == 0 {
        response.end = End::Reset;
        response.pieces.push(b"data: {\"id\":\"chatcmpl".to_vec());
    }
    response
}

fn cross_session(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    let neighbour = request.session + 1 + random(rng, 2);
    match random(rng, 4) {
        0 => alter(draft, request, |value| value["nonce"] = json!(canary(neighbour))),
        1 => draft.content = format!("...and so {} prefers trains.", canary(neighbour)),
        2 => draft.reasoning = format!("The user {} wants a note.", canary(neighbour)),
        _ => victim(draft).name = tools(neighbour)[0]["function"]["name"].clone(),
    }
}

fn error_payload(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) -> Response {
    let errors = [
        json!({"error": {"message": "engine failure", "type": "server_error", "code": 500}}),
        json!({"object": "error", "message": "cuda error", "code": 40000}),
        json!({"error": "out of memory"}),
    ];
    let error = errors.choose(rng).cloned().unwrap_or_default();
    if !draft.stream {
        return document(rng, error.to_string().as_bytes());
    }
    request.stream = true;
    let mut frames = draft.frames(rng);
    let at = random(rng, frames.len() as u64) as usize;
    frames.insert(at, error);
    draft.stream_of(rng, frames)
}

fn bad_envelope(rng: &mut Pcg64Mcg, _: &mut Request, _: &mut Draft) -> Response {
    let body = choose(
        rng,
        &[
            "<!doctype html><title>Sign in</title>",
            "{\"id\":\"x\",\"output\":[{\"type\":\"message\"}]}",
            "{\"choices\":null}",
            "upstream connect error",
            "[1,2]",
        ],
    );
    let body = format!("{body}{}", " ".repeat(random(rng, 50) as usize));
    Response { content_type: "text/html", ..document(rng, body.as_bytes()) }
}

fn bad_frame(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) -> Response {
    (request.stream, draft.stream) = (true, true);
    let frames = draft.frames(rng);
    let mut frames: Vec<Vec<u8>> = frames.iter().map(|frame| frame.to_string().into_bytes()).collect();
    let at = random(rng, frames.len() as u64) as usize;
    let kept = 1 + random(rng, frames[at].len() as u64 - 1) as usize;
    frames[at].truncate(kept);
    draft.stream_of_bytes(rng, frames)
}

const SOUP: [&str; 7] = ["setEmail", "ที่Bayes", "мерcadoLECT", "σταuser", "句话Plněfoll", "ありwidget", "Xкаб"];

fn degenerate(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    let unit = choose(rng, &["VTT", "I will check. ", "!", "的确", "\u{43d}\u{430} "]);
    let flood = unit.repeat(24 + random(rng, 100) as usize);
    match random(rng, 5) {
        0 => alter(draft, request, |value| value["text"] = json!(format!("a note {flood}"))),
        1 => {
            let text = victim(draft).text();
            victim(draft).set_text(format!("{}{}", &text[..2], "!".repeat(40)));
        }
        2 => {
            let text = victim(draft).text();
            let whole = text.trim_end().trim_end_matches('}').to_owned();
            victim(draft).set_text(format!("{whole}{}", "\n".repeat(60)));
            draft.finish = json!("length");
        }
        3 => draft.content = SOUP.join(" "),
        _ => draft.content = format!("Plan: keep the {flood}"),
    }
}

/// Cuts the last call in the middle and ends the answer with `reason`.
fn end_early(rng: &mut Pcg64Mcg, draft: &mut Draft, reason: &str) {
    if random(rng, 2) == 0 {
        let text = draft.calls[0].text();
        let kept = random(rng, text.chars().count() as u64) as usize;
        draft.calls.truncate(1);
        draft.calls[0].set_text(text.chars().take(kept).collect::<String>());
    }
    draft.finish = json!(reason);
}

fn length_cutoff(rng: &mut Pcg64Mcg, _: &mut Request, draft: &mut Draft) {
    end_early(rng, draft, "length");
}

fn aborted(rng: &mut Pcg64Mcg, _: &mut Request, draft: &mut Draft) {
    end_early(rng, draft, "abort");
}

fn model_refusal(rng: &mut Pcg64Mcg, _: &mut Request, draft: &mut Draft) {
    if random(rng, 2) == 0 {
        end_early(rng, draft, "content_filter");
    } else {
        draft.calls.clear();
        draft.finish = json!("stop");
        draft.extra = json!({"refusal": "I cannot help with that."});
    }
}

fn markup_leak(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    let call = &request.dictated[request.dictated.len().min(2) - 1];
    let mut arguments = call.arguments.clone();
    if arguments.get("text").is_some() {
        arguments["text"] = json!("plain");
    }
    let text = markup::write(rng, &call.name, &arguments);
    draft.calls.clear();
    draft.finish = json!("stop");
    let bare = text.starts_with('{');
    if random(rng, 3) == 0 {
        draft.reasoning = text;
        draft.content = String::new();
    } else if bare || random(rng, 2) == 0 {
        draft.content = text;
    } else {
        draft.content = format!("Let me do that.\n{text}");
    }
}

fn call_lost(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    match random(rng, 5) {
        0 => {
            draft.calls.clear();
        }
        1 => prose(rng, draft),
        2 if draft.calls.len() > 1 => {
            let at = random(rng, draft.calls.len() as u64) as usize;
            draft.calls.remove(at);
        }
        3 => {
            request.has_oracle = false;
            request.tool_choice = "required";
            prose(rng, draft);
        }
        _ => {
            request.has_oracle = false;
            let call = &draft.calls[0];
            draft.extra = json!({"function_call": {"name": call.name, "arguments": call.arguments}});
            draft.calls.clear();
            draft.finish = json!("function_call");
        }
    }
}

fn empty_response(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    request.has_oracle = false;
    prose(rng, draft);
    draft.content = choose(rng, &["", " ", "\n"]).to_owned();
}

fn phantom_call(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    if random(rng, 3) == 0 {
        without_oracle(request, draft);
        request.tool_choice = "none";
        return;
    }
    let mut extra = draft.calls[0].clone();
    extra.index = draft.calls.len() as u64;
    extra.id = json!("call_extra");
    extra.set_text(choose(rng, &["", "{}", " "]));
    draft.calls.push(extra);
}

fn orphan_delta(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) -> Response {
    (request.stream, draft.stream) = (true, true);
    let lost = draft.calls.remove(0);
    let mut frames = draft.frames(rng);
    let entry = json!({"index": lost.index, "function": {"arguments": lost.arguments}});
    let at = 1 + random(rng, frames.len() as u64 - 1) as usize;
    frames.insert(at, chunk(&json!({"tool_calls": [entry]}), &Value::Null));
    draft.stream_of(rng, frames)
}

fn call_merged(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    let other = match draft.calls.get(1) {
        Some(call) if call.text().len() > 2 => draft.calls.remove(1),
        _ => {
            let mut call = draft.calls[0].clone();
            call.set_text(json!({"nonce": canary(request.session), "order": "2"}).to_string());
            call
        }
    };
    if draft.stream && random(rng, 2) == 0 {
        draft.manner = super::draft::Manner::default();
        draft.calls.insert(1, Call { index: draft.calls[0].index, ..other });
        return;
    }
    let text = draft.calls[0].text() + choose(rng, &["", "\n", ", "]) + &other.text();
    victim(draft).set_text(text);
}

fn args_duplicated(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) -> Response {
    let text = victim(draft).text();
    if !draft.stream || random(rng, 3) == 0 {
        victim(draft).set_text(text.repeat(2));
        return draft.respond(rng);
    }
    request.stream = true;
    let call = draft.calls.remove(0);
    let mut frames = draft.frames(rng);
    let mut parts = pieces(rng, &text);
    if parts.len() < 2 {
        let half = text.chars().count() / 2;
        parts = vec![text.chars().take(half).collect(), text.chars().skip(half).collect()];
    }
    if random(rng, 2) == 0 {
        parts.insert(0, parts[0].clone());
    } else {
        parts = (1..=parts.len()).map(|count| parts[..count].concat()).collect();
    }
    let mut entries =
        vec![json!({"index": call.index, "id": call.id, "function": {"name": call.name, "arguments": ""}})];
    entries.extend(parts.iter().map(|part| json!({"index": call.index, "function": {"arguments": part}})));
    for (at, entry) in entries.into_iter().enumerate() {
        frames.insert(1 + at, chunk(&json!({"tool_calls": [entry]}), &Value::Null));
    }
    draft.stream_of(rng, frames)
}

fn name_missing(rng: &mut Pcg64Mcg, _: &mut Request, draft: &mut Draft) {
    victim(draft).name = if random(rng, 2) == 0 { json!("") } else { Value::Null };
}

fn name_mangled(rng: &mut Pcg64Mcg, _: &mut Request, draft: &mut Draft) {
    let name = victim(draft).name.as_str().unwrap_or_default().to_owned();
    victim(draft).name = json!(match random(rng, 6) {
        0 => format!("{name}</arg_value>"),
        1 => format!("functions.{name}"),
        2 => format!("{name}<|channel|>commentary"),
        3 => name[..name.len() - 1].to_owned(),
        4 => "null".to_owned(),
        _ => format!("{name} "),
    });
}

fn args_wrong_shape(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    let arguments = request.dictated[0].arguments.clone();
    victim(draft).arguments = match random(rng, 3) {
        0 => arguments,
        1 => json!(json!([arguments]).to_string()),
        _ => json!(json!(arguments.to_string()).to_string()),
    };
}

fn encoding_damage(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) -> Response {
    match random(rng, 4) {
        0 => alter(draft, request, |value| value["text"] = json!("ok \u{fffd}\u{fffd}")),
        1 => {
            alter(draft, request, |value| value["text"] = json!("half @@"));
            let text = victim(draft).text().replace("@@", "\\ud83d");
            victim(draft).set_text(text);
        }
        2 => return torn_bytes(rng, request, draft, b"\xF0\x9F", b""),
        _ => return torn_bytes(rng, request, draft, b"\\ud83d", b"\\ude00"),
    }
    draft.respond(rng)
}

/// A stream in which one frame ends with `head` and the next starts with `tail`, inside an argument.
fn torn_bytes(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft, head: &[u8], tail: &[u8]) -> Response {
    (request.stream, draft.stream) = (true, true);
    alter(draft, request, |value| value["text"] = json!("torn @@%%here"));
    let text = victim(draft).text();
    let (left, right) = text.split_once("%%").unwrap_or((&text, ""));
    let call = draft.calls.remove(0);
    let mut frames: Vec<Vec<u8>> = draft.frames(rng).iter().map(|frame| frame.to_string().into_bytes()).collect();
    let entries = [
        json!({"index": call.index, "id": call.id, "function": {"name": call.name, "arguments": left}}),
        json!({"index": call.index, "function": {"arguments": format!("%%{right}")}}),
    ];
    for (at, entry) in entries.into_iter().enumerate() {
        let frame = chunk(&json!({"tool_calls": [entry]}), &Value::Null).to_string();
        let frame = replace(frame.as_bytes(), b"@@", head);
        frames.insert(1 + at, replace(&frame, b"%%", tail));
    }
    draft.stream_of_bytes(rng, frames)
}

fn replace(bytes: &[u8], mark: &[u8], with: &[u8]) -> Vec<u8> {
    match bytes.windows(mark.len()).position(|window| window == mark) {
        Some(at) => [&bytes[..at], with, &bytes[at + mark.len()..]].concat(),
        None => bytes.to_vec(),
    }
}

fn args_extra_text(rng: &mut Pcg64Mcg, _: &mut Request, draft: &mut Draft) {
    let text = victim(draft).text();
    victim(draft).set_text(match random(rng, 6) {
        0 => format!("json\n{text}"),
        1 => format!("```json\n{text}\n```"),
        2 => format!("{text}Checking the order now..."),
        3 => format!("{text}<|im_end|>"),
        4 => format!("{text}\n</tool_call>"),
        _ => format!("Sure: {text}"),
    });
}

fn args_truncated(rng: &mut Pcg64Mcg, _: &mut Request, draft: &mut Draft) {
    let text = victim(draft).text();
    let length = text.trim_end().chars().count() as u64;
    let kept = 1 + random(rng, length - 1) as usize;
    victim(draft).set_text(text.chars().take(kept).collect::<String>());
}

fn args_malformed(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    let text = request.dictated[0].arguments.to_string();
    let nonce = format!("\"{}\"", canary(request.session));
    victim(draft).set_text(match random(rng, 7) {
        0 => text[2 + random(rng, 8) as usize..].to_owned(),
        1 => format!("{{'nonce': 'x', 'seq': {}, 'on': True}}", random(rng, 99)),
        2 => text.replacen(&nonce, "NaN", 1),
        3 => text.replacen(',', "", 1),
        4 => text.replacen(&nonce, "\"a\nb\"", 1),
        5 => text.replacen(&nonce, "\"C:\\Users\"", 1),
        _ => text.replacen('{', "{\"nonce\": \"twice\", ", 1),
    });
}

fn args_lost(rng: &mut Pcg64Mcg, _: &mut Request, draft: &mut Draft) {
    victim(draft).set_text(choose(rng, &["", " ", "null", "{}", "\n"]));
}

fn markup_residue(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    let marker =
        choose(rng, &["</parameter>", "<|\"|>", "</｜DSML｜parameter>", "<|im_end|>", "</arg_value>", "</function>"]);
    match random(rng, 3) {
        0 => alter(draft, request, |value| value["text"] = json!(format!("a note{marker}"))),
        1 => alter(draft, request, |value| value["options"][format!("depth{marker}")] = json!(1)),
        _ => draft.content = format!("{marker}\n"),
    }
}

fn type_stringified(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    let fields: &[&str] = [&["seq"][..], &["tags"], &["options"], &["seq", "tags", "options"]][random(rng, 4) as usize];
    alter(draft, request, |value| {
        for field in fields {
            value[*field] = json!(value[*field].to_string());
        }
    });
}

fn schema_violation(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    let way = random(rng, 5);
    alter(draft, request, |value| match way {
        0 => {
            value.as_object_mut().map(|map| map.remove("seq"));
        }
        1 => value["country"] = json!("FR"),
        2 => value["mode"] = json!("prepend"),
        3 => value["text"] = Value::Null,
        _ => value["options"]["depth"] = json!(true),
    });
}

fn value_altered(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) {
    let way = random(rng, 5);
    alter(draft, request, |value| {
        let text = value["text"].as_str().unwrap_or_default().to_owned();
        match way {
            0 => value["seq"] = json!(value["seq"].as_i64().unwrap_or_default() + 1),
            1 => value["text"] = json!(format!(" {text}")),
            2 => value["text"] = json!(text.replace('#', "")),
            3 => value["nonce"] = json!("S-00000-ZZZZ"),
            _ => value["options"]["strict"] = json!(!value["options"]["strict"].as_bool().unwrap_or_default()),
        }
    });
}

fn late_delta(rng: &mut Pcg64Mcg, request: &mut Request, draft: &mut Draft) -> Response {
    (request.stream, draft.stream) = (true, true);
    let mut frames = draft.frames(rng);
    let opener = frames.iter().position(|frame| frame["choices"][0]["delta"].get("tool_calls").is_some()).unwrap_or(0);
    frames.insert(opener, chunk(&json!({}), &json!(choose(rng, &["stop", "tool_calls"]))));
    draft.stream_of(rng, frames)
}

fn id_invalid(rng: &mut Pcg64Mcg, _: &mut Request, draft: &mut Draft) {
    if draft.calls.len() > 1 && random(rng, 2) == 0 {
        draft.calls[1].id = draft.calls[0].id.clone();
    } else {
        victim(draft).id = if random(rng, 2) == 0 { json!("") } else { Value::Null };
    }
}
