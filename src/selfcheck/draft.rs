//! An answer before it is bytes: calls, text, frames, in the many ways in which servers write the same answer.

use rand::{RngExt, seq::IndexedRandom};
use rand_pcg::Pcg64Mcg;
use serde_json::{Value, json};

use super::{Dictated, End, Response, Script, Truth, canary, tools};

/// What is asked.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) session: u64,
    pub(super) tools: Vec<Value>,
    pub(super) tool_choice: &'static str,
    pub(super) dictated: Vec<Dictated>,
    pub(super) has_oracle: bool,
    pub(super) stream: bool,
}

/// Values that are hard on a parser and none the less right.
const TEXTS: [&str; 12] = [
    "plain words",
    "東京都 🚀 naïve Besançon",
    "    if x:\n        return \"1\"\n",
    "path C:\\Users\\me\\new",
    "a\tb \u{1}c \u{2028} d",
    "quoted <|im_end|> and </tool_call>",
    "wow!!!!!!!!!!!!!!!!!!",
    "{\"inner\": [1, 2, {}]}",
    "null",
    "Lyonский is dictated",
    "e\u{301} 👩‍👩‍👧 x",
    "  spaces  ",
];

impl Request {
    /// The request of a round; two rounds in three dictate two calls.
    pub(super) fn new(rng: &mut Pcg64Mcg, session: u64) -> Self {
        let tools = tools(session);
        let names: Vec<String> =
            tools.iter().filter_map(|tool| Some(tool["function"]["name"].as_str()?.to_owned())).collect();
        let nonce = canary(session);
        let pick = |rng: &mut Pcg64Mcg, texts: &[&str]| texts.choose(rng).copied().unwrap_or_default().to_owned();
        let note = |rng: &mut Pcg64Mcg| {
            let text = pick(rng, &TEXTS);
            json!({
                "nonce": nonce, "seq": random(rng, 1 << 54), "text": format!("{text} #{}", random(rng, 1_000_000)),
                "tags": (0..random(rng, 4)).map(|tag| format!("t{tag}")).collect::<Vec<_>>(),
                "mode": pick(rng, &["append", "replace"]),
                "options": {"depth": random(rng, 9), "strict": random(rng, 2) == 1},
            })
        };
        let mut dictated = vec![Dictated { name: names[0].clone(), arguments: note(rng) }];
        if random(rng, 3) > 0 {
            let order = format!("{}_{:03}_{:02}", 1 + random(rng, 9), random(rng, 1000), random(rng, 100));
            dictated.push(Dictated { name: names[1].clone(), arguments: json!({"nonce": nonce, "order": order}) });
        }
        if random(rng, 4) == 0 {
            dictated.push(Dictated { name: names[2].clone(), arguments: json!({}) });
        }
        Self { session, tools, tool_choice: "auto", dictated, has_oracle: true, stream: random(rng, 4) > 0 }
    }

    /// Joins the request with its response.
    pub(super) fn close(self, response: Response, truth: Truth) -> Script {
        let neighbours = [self.session + 1, self.session + 2];
        Script {
            tools: self.tools,
            tool_choice: self.tool_choice,
            dictated: self.has_oracle.then_some(self.dictated),
            canary: canary(self.session),
            foreign_canaries: neighbours.map(canary).to_vec(),
            foreign_tools: neighbours
                .iter()
                .flat_map(|&session| tools(session))
                .filter_map(|tool| Some(tool["function"]["name"].as_str()?.to_owned()))
                .collect(),
            stream: self.stream,
            response,
            truth,
        }
    }
}

/// A number below `limit`.
pub(super) fn random(rng: &mut Pcg64Mcg, limit: u64) -> u64 {
    rng.random_range(0..limit)
}

/// One call of an answer.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) index: u64,
    pub(super) id: Value,
    pub(super) name: Value,
    pub(super) arguments: Value,
}

impl Call {
    /// The argument text; empty where the arguments are no string.
    pub(super) fn text(&self) -> String {
        self.arguments.as_str().unwrap_or_default().to_owned()
    }

    pub(super) fn set_text(&mut self, text: impl Into<String>) {
        self.arguments = Value::String(text.into());
    }

    fn entry(&self) -> Value {
        json!({"index": self.index, "id": self.id, "type": "function",
            "function": {"name": self.name, "arguments": self.arguments}})
    }
}

/// How the pieces of a call are sent.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Manner {
    /// Id and name come with every fragment.
    pub(super) resend: bool,
    /// Fragments carry null ids and names.
    pub(super) nulls: bool,
    /// No index.
    pub(super) no_index: bool,
    /// Fragments of several calls alternate.
    pub(super) interleave: bool,
}

/// An answer.
#[derive(Debug, Clone)]
pub(super) struct Draft {
    pub(super) stream: bool,
    pub(super) content: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<Call>,
    /// What else stands in the message or the last delta.
    pub(super) extra: Value,
    pub(super) finish: Value,
    pub(super) native_finish: Option<&'static str>,
    pub(super) done: bool,
    pub(super) manner: Manner,
    pub(super) space: &'static str,
    pub(super) newline: &'static str,
    pub(super) noise: &'static [&'static str],
}

impl Draft {
    /// The intact answer to a request.
    pub(super) fn new(rng: &mut Pcg64Mcg, request: &Request) -> Self {
        let calls = request.dictated.iter().enumerate().map(|(index, call)| Call {
            index: index as u64,
            id: json!(format!("call_{:06x}_{index}", random(rng, 1 << 24))),
            name: json!(call.name),
            arguments: json!(write(rng, &call.arguments)),
        });
        let calls = calls.collect();
        let content = ["", "", "Checking the order.", "\n\n", "Ich prüfe das — 少々お待ちください。"];
        let reasoning = ["", "The user wants a note stored, then the order."];
        Self {
            stream: request.stream,
            content: content.choose(rng).copied().unwrap_or_default().to_owned(),
            reasoning: reasoning.choose(rng).copied().unwrap_or_default().to_owned(),
            calls,
            extra: json!({}),
            finish: json!("tool_calls"),
            native_finish: None,
            done: true,
            manner: Manner::default(),
            space: "",
            newline: "\n",
            noise: &[],
        }
    }

    /// Ways in which servers deviate without breaking anything.
    pub(super) fn deviate(&mut self, rng: &mut Pcg64Mcg) {
        self.space = [" ", ""].choose(rng).copied().unwrap_or_default();
        self.newline = ["\n", "\r\n", "\r"].choose(rng).copied().unwrap_or_default();
        self.manner = Manner {
            resend: random(rng, 8) == 0,
            nulls: random(rng, 8) == 0,
            no_index: random(rng, 8) == 0,
            interleave: random(rng, 4) == 0,
        };
        // Without an index only the id tells the calls apart, so every fragment carries it.
        self.manner.resend |= self.manner.no_index;
        self.manner.nulls &= !self.manner.resend;
        match random(rng, 8) {
            0 => self.finish = json!("stop"),
            1 if self.stream => self.done = false,
            2 if self.stream => self.finish = Value::Null,
            _ => {}
        }
        if random(rng, 3) == 0 {
            self.noise = &[
                ": comment",
                "data: : keepalive",
                "data:",
                "id: 7\ndata: {\"choices\":[],\"usage\":null}",
                "retry: 5",
            ];
        }
        if random(rng, 6) == 0 {
            for call in &mut self.calls {
                call.index += 1;
            }
        }
    }

    /// The answer as bytes, in pieces.
    pub(super) fn respond(&self, rng: &mut Pcg64Mcg) -> Response {
        if self.stream {
            let frames = self.frames(rng);
            self.stream_of(rng, frames)
        } else {
            document(rng, self.unary().to_string().as_bytes())
        }
    }

    /// One document.
    pub(super) fn unary(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if self.content.is_empty() {
            message["content"] = Value::Null;
        }
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = json!(self.reasoning);
        }
        if !self.calls.is_empty() {
            message["tool_calls"] = self.calls.iter().map(Call::entry).collect();
        }
        merge(&mut message, &self.extra);
        let mut choice = json!({"index": 0, "message": message, "finish_reason": self.finish});
        if let Some(reason) = self.native_finish {
            choice["native_finish_reason"] = json!(reason);
        }
        json!({"id": "chatcmpl-s", "object": "chat.completion", "created": 1, "model": "selfcheck",
            "choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}})
    }

    /// The chunks of the stream, the last one with the finish reason.
    pub(super) fn frames(&self, rng: &mut Pcg64Mcg) -> Vec<Value> {
        let mut deltas = vec![json!({"role": "assistant", "content": null})];
        deltas.extend(pieces(rng, &self.reasoning).into_iter().map(|piece| json!({"reasoning_content": piece})));
        deltas.extend(pieces(rng, &self.content).into_iter().map(|piece| json!({"content": piece})));
        let calls: Vec<Vec<Value>> = self.calls.iter().map(|call| self.deltas(rng, call)).collect();
        if self.manner.interleave {
            let longest = calls.iter().map(Vec::len).max().unwrap_or(0);
            for at in 0..longest {
                deltas.extend(calls.iter().filter_map(|call| call.get(at)).map(|entry| json!({"tool_calls": [entry]})));
            }
        } else {
            deltas.extend(calls.iter().flatten().map(|entry| json!({"tool_calls": [entry]})));
        }
        if self.extra != json!({}) {
            deltas.push(self.extra.clone());
        }
        let mut frames: Vec<Value> = deltas.iter().map(|delta| chunk(delta, &Value::Null)).collect();
        if !self.finish.is_null() {
            let mut last = chunk(&json!({}), &self.finish);
            if let Some(reason) = self.native_finish {
                last["choices"][0]["native_finish_reason"] = json!(reason);
            }
            frames.push(last);
        }
        frames
    }

    /// The opener and the fragments of a call.
    fn deltas(&self, rng: &mut Pcg64Mcg, call: &Call) -> Vec<Value> {
        let mut opener = call.entry();
        opener["function"]["arguments"] = json!("");
        let mut entries = vec![opener];
        if call.arguments.is_string() {
            for piece in pieces(rng, &call.text()) {
                let mut entry = json!({"index": call.index, "function": {"arguments": piece}});
                if self.manner.resend {
                    entry["id"] = call.id.clone();
                    entry["function"]["name"] = call.name.clone();
                } else if self.manner.nulls {
                    entry["id"] = Value::Null;
                    entry["function"]["name"] = Value::Null;
                }
                entries.push(entry);
            }
        } else {
            entries[0]["function"]["arguments"] = call.arguments.clone();
        }
        if self.manner.no_index {
            for entry in &mut entries {
                if let Some(map) = entry.as_object_mut() {
                    map.remove("index");
                }
            }
        }
        entries
    }

    /// An event stream of chunks.
    pub(super) fn stream_of(&self, rng: &mut Pcg64Mcg, frames: Vec<Value>) -> Response {
        let frames = frames.into_iter().map(|frame| frame.to_string().into_bytes()).collect();
        self.stream_of_bytes(rng, frames)
    }

    /// An event stream of payloads.
    pub(super) fn stream_of_bytes(&self, rng: &mut Pcg64Mcg, frames: Vec<Vec<u8>>) -> Response {
        let mut body = Vec::new();
        for frame in frames {
            if !self.noise.is_empty() && random(rng, 3) == 0 {
                let noise = self.noise.choose(rng).copied().unwrap_or_default();
                body.extend_from_slice(noise.replace('\n', self.newline).as_bytes());
                body.extend_from_slice(self.newline.repeat(2).as_bytes());
            }
            body.extend_from_slice(b"data:");
            body.extend_from_slice(self.space.as_bytes());
            body.extend_from_slice(&frame);
            body.extend_from_slice(self.newline.repeat(2).as_bytes());
        }
        if self.done {
            body.extend_from_slice(format!("data:{}[DONE]{}", self.space, self.newline.repeat(2)).as_bytes());
        }
        Response { status: 200, content_type: "text/event-stream", pieces: cut(rng, &body), end: End::Clean }
    }
}

/// A response of one JSON document.
pub(super) fn document(rng: &mut Pcg64Mcg, body: &[u8]) -> Response {
    Response { status: 200, content_type: "application/json", pieces: cut(rng, body), end: End::Clean }
}

/// A chunk of a stream.
pub(super) fn chunk(delta: &Value, finish: &Value) -> Value {
    json!({"id": "chatcmpl-s", "object": "chat.completion.chunk", "created": 1, "model": "selfcheck",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
}

fn merge(into: &mut Value, from: &Value) {
    for (key, value) in from.as_object().into_iter().flatten() {
        into[key] = value.clone();
    }
}

/// Arguments as text: with or without white space, with or without escapes beyond ASCII.
pub(super) fn write(rng: &mut Pcg64Mcg, arguments: &Value) -> String {
    let text = match random(rng, 3) {
        0 => serde_json::to_string_pretty(arguments).unwrap_or_default(),
        _ => arguments.to_string(),
    };
    if random(rng, 4) > 0 {
        return text;
    }
    let mut escaped = String::new();
    for character in text.chars() {
        if character.is_ascii() {
            escaped.push(character);
        } else {
            let mut units = [0; 2];
            escaped.extend(character.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    escaped
}

/// A text in one to eight pieces.
pub(super) fn pieces(rng: &mut Pcg64Mcg, text: &str) -> Vec<String> {
    let characters: Vec<char> = text.chars().collect();
    let count = 1 + random(rng, 8) as usize;
    let size = characters.len().div_ceil(count).max(1);
    characters.chunks(size).map(|piece| piece.iter().collect()).collect()
}

/// A body in writes of any size, through the middle of characters and escapes.
fn cut(rng: &mut Pcg64Mcg, body: &[u8]) -> Vec<Vec<u8>> {
    let mut rest = body;
    let mut pieces = Vec::new();
    let most = [40, 400, 4000].choose(rng).copied().unwrap_or(400);
    while !rest.is_empty() {
        let size = (1 + random(rng, most) as usize).min(rest.len());
        let (head, tail) = rest.split_at(size);
        pieces.push(head.to_vec());
        rest = tail;
    }
    pieces
}
