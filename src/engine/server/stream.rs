//! Tokens to an answer: server-sent events as they come, or one object at the end.
//!
//! What does not change from one event to the next is written once a request; an event is that, the escaped piece of
//! text, and a tail.

use std::fmt::Write;

use serde_json::{Value, json};

use super::{failure::refusal, openai::Refusal};
use crate::engine::{
    parser::{Answer, Delta, Parser},
    request::{Event, Finish, Usage},
    tokenizer::Token,
};

/// What every form of an answer says about itself.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The number from which the ids of the answer and its calls are made.
    pub number: u64,
    /// When the request came, in seconds since the Unix epoch.
    pub created: i64,
    /// The model's name.
    pub model: String,
}

impl Identity {
    fn id(&self) -> String {
        format!("chatcmpl-{:016x}", self.number)
    }

    fn call_id(&self, index: u32) -> String {
        format!("call_{:016x}{index:02x}", self.number)
    }
}

/// Parses an answer's tokens and leaves out what the request does not want.
#[derive(Debug)]
pub struct Reader {
    parser: Parser,
    parallel: bool,
}

impl Reader {
    /// A reader of an answer that starts inside a call or not, and may hold many calls or one.
    pub fn new(in_call: bool, parallel: bool) -> Self {
        Self { parser: Parser::new(in_call), parallel }
    }

    fn push(&mut self, token: Token, out: &mut Vec<Delta>) {
        self.parser.push(token, out);
    }

    /// Ends the answer and says why it ended, as the API spells it.
    fn finish(&mut self, finish: Finish, out: &mut Vec<Delta>) -> &'static str {
        self.parser.finish(finish == Finish::Stop, out);
        match finish {
            Finish::Length => "length",
            _ if self.parser.calls() > 0 => "tool_calls",
            _ => "stop",
        }
    }

    fn wants(&self, delta: &Delta) -> bool {
        match delta {
            Delta::Content(_) => true,
            Delta::Call { index, .. } | Delta::Arguments { index, .. } => self.parallel || *index == 0,
        }
    }
}

/// Writes an answer as server-sent events.
#[derive(Debug)]
pub struct EventWriter {
    reader: Reader,
    identity: Identity,
    head: String,
    include_usage: bool,
    /// Tokens in one event, and those that wait for it.
    tokens: usize,
    held: usize,
    deltas: Vec<Delta>,
    started: bool,
}

impl EventWriter {
    /// A writer of events of `tokens` tokens each.
    pub fn new(reader: Reader, identity: Identity, tokens: usize, include_usage: bool) -> Self {
        let head = format!(
            "data: {{\"id\":\"{}\",\"object\":\"chat.completion.chunk\",\"created\":{},\"model\":{},\"choices\":[",
            identity.id(),
            identity.created,
            Value::from(identity.model.as_str()),
        );
        Self { reader, identity, head, include_usage, tokens, held: 0, deltas: Vec::new(), started: false }
    }

    /// Writes what `event` calls for; false when nothing follows.
    pub fn write(&mut self, event: Event, out: &mut String) -> bool {
        match event {
            Event::Token(token) => {
                self.reader.push(token, &mut self.deltas);
                self.held += 1;
                if self.held >= self.tokens {
                    self.flush(out);
                }
                true
            }
            Event::Finished(finish, usage) => {
                self.finish(finish, usage, out);
                false
            }
            Event::Failed(failure) => {
                self.flush(out);
                let _ = write!(out, "data: {}\n\n", refusal(&failure).body());
                false
            }
        }
    }

    fn finish(&mut self, finish: Finish, usage: Usage, out: &mut String) {
        if finish == Finish::Cancelled {
            self.flush(out);
            return;
        }
        let reason = self.reader.finish(finish, &mut self.deltas);
        self.flush(out);
        self.choice("{}", &format!("\"{reason}\""), out);
        if self.include_usage {
            let _ = write!(out, "{}],\"usage\":{}}}\n\n", self.head, usage_object(usage));
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn flush(&mut self, out: &mut String) {
        self.held = 0;
        if !self.started {
            self.started = true;
            self.choice("{\"role\":\"assistant\",\"content\":\"\"}", "null", out);
        }
        let mut deltas = std::mem::take(&mut self.deltas);
        for delta in deltas.drain(..).filter(|delta| self.reader.wants(delta)) {
            let rendered = self.delta(&delta);
            self.choice(&rendered, "null", out);
        }
        self.deltas = deltas;
    }

    fn delta(&self, delta: &Delta) -> String {
        match delta {
            Delta::Content(text) => format!("{{\"content\":{}}}", quoted(text)),
            Delta::Call { index, name } => format!(
                "{{\"tool_calls\":[{{\"index\":{index},\"id\":\"{}\",\"type\":\"function\",\"function\":{{\"name\":{},\
                 \"arguments\":\"\"}}}}]}}",
                self.identity.call_id(*index),
                quoted(name),
            ),
            Delta::Arguments { index, text } => {
                format!("{{\"tool_calls\":[{{\"index\":{index},\"function\":{{\"arguments\":{}}}}}]}}", quoted(text))
            }
        }
    }

    fn choice(&self, delta: &str, reason: &str, out: &mut String) {
        let usage = if self.include_usage { ",\"usage\":null" } else { "" };
        let head = &self.head;
        let _ = write!(
            out,
            "{head}{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{reason}}}]{usage}}}\n\n"
        );
    }
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("a string is always JSON")
}

fn usage_object(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    })
}

/// Collects an answer that is not streamed.
#[derive(Debug)]
pub struct Collector {
    reader: Reader,
    answer: Answer,
    deltas: Vec<Delta>,
}

impl Collector {
    /// An empty answer.
    pub fn new(reader: Reader) -> Self {
        Self { reader, answer: Answer::default(), deltas: Vec::new() }
    }

    /// Takes an event; the whole answer when it was the last one.
    pub fn take(&mut self, event: Event, identity: &Identity) -> Option<Result<Value, Refusal>> {
        match event {
            Event::Token(token) => {
                self.reader.push(token, &mut self.deltas);
                self.gather();
                None
            }
            Event::Finished(Finish::Cancelled, _) => {
                let message = "the request asked to be cancelled after so many tokens";
                Some(Err(Refusal::new(499, "request_cancelled", "cancelled", message)))
            }
            Event::Finished(finish, usage) => {
                let reason = self.reader.finish(finish, &mut self.deltas);
                self.gather();
                Some(Ok(self.object(identity, reason, usage)))
            }
            Event::Failed(failure) => Some(Err(refusal(&failure))),
        }
    }

    fn gather(&mut self) {
        for delta in self.deltas.drain(..) {
            if self.reader.wants(&delta) {
                self.answer.add(delta);
            }
        }
    }

    fn object(&self, identity: &Identity, reason: &str, usage: Usage) -> Value {
        let content = Value::from(self.answer.content.as_str());
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !self.answer.calls.is_empty() {
            if self.answer.content.is_empty() {
                message["content"] = Value::Null;
            }
            let calls = self.answer.calls.iter().zip(0..).map(|(call, index)| {
                json!({
                    "id": identity.call_id(index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                })
            });
            message["tool_calls"] = calls.collect();
        }
        json!({
            "id": identity.id(),
            "object": "chat.completion",
            "created": identity.created,
            "model": identity.model,
            "choices": [{"index": 0, "message": message, "logprobs": null, "finish_reason": reason}],
            "usage": usage_object(usage),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity { number: 7, created: 1, model: "m\"".into() }
    }

    fn events(text: &str) -> Vec<Event> {
        let mut events: Vec<_> = text.bytes().map(Event::Token).collect();
        events.push(Event::Finished(Finish::Stop, Usage { prompt: 10, cached: 4, completion: 3 }));
        events
    }

    fn streamed(text: &str, tokens: usize, parallel: bool) -> Vec<Value> {
        let mut writer = EventWriter::new(Reader::new(true, parallel), identity(), tokens, true);
        let mut out = String::new();
        for event in events(text) {
            writer.write(event, &mut out);
        }
        let mut chunks: Vec<_> = out.split_terminator("\n\n").map(|e| e.strip_prefix("data: ").unwrap()).collect();
        assert_eq!(chunks.pop(), Some("[DONE]"));
        chunks.into_iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
    }

    fn collected(text: &str, parallel: bool) -> Value {
        let mut collector = Collector::new(Reader::new(true, parallel));
        events(text).into_iter().find_map(|event| collector.take(event, &identity())).unwrap().unwrap()
    }

    fn arguments(chunks: &[Value], index: u64) -> String {
        let calls = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array()).flatten();
        calls.filter(|c| c["index"] == index).filter_map(|c| c["function"]["arguments"].as_str()).collect()
    }

    const TWO: &str = "f\", \"arguments\": {\"a\": \"é\\\"\"}}\n{\"name\": \"g\", \"arguments\": {}}";

    #[test]
    fn a_stream_and_an_object_say_the_same() {
        let (chunks, whole) = (streamed(TWO, 1, true), collected(TWO, true));
        let calls = whole["choices"][0]["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 2);
        for (index, call) in calls.iter().enumerate() {
            assert_eq!(call["function"]["arguments"], arguments(&chunks, index as u64));
        }
        assert_eq!(calls[0]["function"]["arguments"], "{\"a\": \"é\\\"\"}");
        let usage = chunks.last().unwrap();
        assert_eq!((&usage["usage"], usage["choices"].as_array().unwrap().len()), (&whole["usage"], 0));
        assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "tool_calls");
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
        assert!(chunks.iter().all(|chunk| chunk["id"] == whole["id"] && chunk["model"] == "m\""));
    }

    #[test]
    fn one_event_may_hold_many_tokens() {
        let (one, many) = (streamed(TWO, 1, true), streamed(TWO, 16, true));
        assert!(many.len() * 2 < one.len(), "{} and {} events", many.len(), one.len());
        assert_eq!(arguments(&one, 0), arguments(&many, 0));
    }

    #[test]
    fn without_parallel_calls_the_first_one_is_all() {
        assert_eq!(arguments(&streamed(TWO, 1, false), 1), "");
        assert_eq!(collected(TWO, false)["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_cancelled_stream_just_ends() {
        let mut writer = EventWriter::new(Reader::new(true, true), identity(), 1, false);
        let mut out = String::new();
        assert!(writer.write(Event::Token(b'f'), &mut out));
        assert!(!writer.write(Event::Finished(Finish::Cancelled, Usage::default()), &mut out));
        assert!(!out.contains("DONE") && !out.contains("finish_reason\":\""));
    }
}
