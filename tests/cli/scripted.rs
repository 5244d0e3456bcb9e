//! A server that does as it is told: a faithful answer, or one of the ways in which servers fail.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};

const LEAD: &str = "Make exactly this tool call, copying every character:\n";

/// One request as it arrived.
pub(crate) struct Request {
    /// Its number, from 0.
    pub(crate) number: usize,
    /// Its headers, names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    /// Its body.
    pub(crate) body: Value,
}

/// What the server does with a request.
pub(crate) enum Act {
    /// The dictated calls, after a pause.
    Answer(Duration),
    /// The dictated calls with this change of their text.
    Damage(fn(String) -> String),
    /// The dictated lines as content, changed: what no parser has touched.
    Text(fn(String) -> String),
    /// A status and a body.
    Status(u16, &'static str),
    /// Half an answer, then silence with the connection open.
    Stall,
    /// Half an answer, then the connection closes.
    Cut,
    /// Nothing at all, with the connection open.
    Silence,
}

/// A running server; it ends with the test's process.
pub(crate) struct Scripted {
    pub(crate) url: String,
    pub(crate) seen: Arc<Mutex<Vec<Request>>>,
}

impl Scripted {
    /// A server that does what `script` says for each chat request.
    pub(crate) fn start(script: impl Fn(&Request) -> Act + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (script, counter) = (Arc::new(script), Arc::new(AtomicUsize::new(0)));
        let log = Arc::clone(&seen);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (script, counter, log) = (Arc::clone(&script), Arc::clone(&counter), Arc::clone(&log));
                std::thread::spawn(move || {
                    // A client that goes away in mid-answer is part of the tests.
                    let _ = serve(stream, &*script, &counter, &log);
                });
            }
        });
        Self { url, seen }
    }

    /// A server that answers every request faithfully.
    pub(crate) fn faithful() -> Self {
        Self::start(|_| Act::Answer(Duration::ZERO))
    }

    pub(crate) fn requests(&self) -> usize {
        self.seen.lock().unwrap().len()
    }
}

fn serve(
    mut stream: TcpStream,
    script: &dyn Fn(&Request) -> Act,
    counter: &AtomicUsize,
    log: &Mutex<Vec<Request>>,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) => headers.push((name.to_lowercase(), value.to_owned())),
            None => break,
        }
    }
    let length =
        headers.iter().find(|(name, _)| name == "content-length").map_or(0, |(_, value)| value.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    if first.starts_with("GET /v1/models") {
        return stream.write_all(&response(
            200,
            "application/json",
            &json!({"data": [{"id": "scripted"}]}).to_string(),
        ));
    }
    if !first.starts_with("POST /v1/chat/completions") {
        return stream.write_all(&response(404, "text/plain", "no such page"));
    }
    let body = serde_json::from_slice(&body).unwrap();
    let request = Request { number: counter.fetch_add(1, Ordering::SeqCst), headers, body };
    let act = script(&request);
    let answer = |change: fn(String) -> String| answer(&request.body, change);
    let bytes = match act {
        Act::Answer(pause) => {
            std::thread::sleep(pause);
            answer(|text| text)
        }
        Act::Damage(change) => answer(change),
        Act::Text(change) => {
            let content = change(dictated(&request.body).to_owned());
            unary(&json!({"role": "assistant", "content": content}), "stop")
        }
        Act::Status(status, text) => response(status, "application/json", text),
        Act::Stall | Act::Cut | Act::Silence => answer(|text| text),
    };
    let held = matches!(act, Act::Stall | Act::Silence);
    let end = match act {
        Act::Silence => 0,
        Act::Stall | Act::Cut => bytes.len() - 30,
        _ => bytes.len(),
    };
    log.lock().unwrap().push(request);
    stream.write_all(&bytes[..end])?;
    stream.flush()?;
    if held {
        std::thread::sleep(Duration::from_mins(1));
    }
    Ok(())
}

fn response(status: u16, kind: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

/// The calls that the newest turn dictates, whole or in a stream.
fn answer(body: &Value, change: fn(String) -> String) -> Vec<u8> {
    let calls: Vec<_> = dictated(body)
        .lines()
        .enumerate()
        .map(|(index, line)| {
            let (name, arguments) = line.split_once("\", \"arguments\": ").unwrap();
            let name = name.strip_prefix("{\"name\": \"").unwrap();
            let arguments = change(arguments.strip_suffix('}').unwrap().to_owned());
            json!({"index": index, "id": format!("call_{index}"), "type": "function",
                "function": {"name": name, "arguments": arguments}})
        })
        .collect();
    if body["stream"] == true {
        let chunk = |delta: Value, finish: Value| {
            let choices = json!([{"index": 0, "delta": delta, "finish_reason": finish}]);
            let chunk = json!({"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "scripted", "choices": choices});
            format!("data: {chunk}\n\n")
        };
        let mut text = chunk(json!({"role": "assistant", "content": null}), Value::Null);
        for call in calls {
            text.push_str(&chunk(json!({"tool_calls": [call]}), Value::Null));
        }
        text.push_str(&chunk(json!({}), json!("tool_calls")));
        text.push_str("data: [DONE]\n\n");
        return response(200, "text/event-stream", &text);
    }
    unary(&json!({"role": "assistant", "content": null, "tool_calls": calls}), "tool_calls")
}

/// The lines that the newest turn dictates.
fn dictated(body: &Value) -> &str {
    let turn = body["messages"].as_array().unwrap().last().unwrap()["content"].as_str().unwrap();
    turn.split_once(LEAD).unwrap().1
}

fn unary(message: &Value, finish: &str) -> Vec<u8> {
    let usage = json!({"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10});
    let choices = json!([{"index": 0, "message": message, "finish_reason": finish}]);
    let whole = json!({"id": "a", "object": "chat.completion", "created": 1, "model": "scripted", "choices": choices, "usage": usage});
    response(200, "application/json", &whole.to_string())
}
