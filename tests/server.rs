//! The server over real HTTP: what it answers, what it refuses, what it survives, and what it gives back.
//!
//! A paced model takes a step when the test lets it, so "within one step" is checked by steps and not by time.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt, future::join_all};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, oneshot},
    task::JoinHandle,
};
use toolstorm::{
    device::Identity,
    engine::{
        Activity, DecodeRow, Prefill, TokenModel,
        chat::{Call, LEAD, render},
        config::{Limits, Serving},
        gate::Gate,
        handle::Handle,
        host::HostModel,
        lockstep::Lockstep,
        request::Request,
        server::Server,
        snapshot::Snapshot,
        toggles::Toggles,
        tokenizer::Token,
    },
    error::{Error, Result},
};

const MODEL: &str = "toolstorm-copy";
/// Longer than anything takes here; nothing passes because time does.
const LONG: Duration = Duration::from_mins(1);

/// Decode steps that may be taken; `None` is as many as one likes.
#[derive(Debug, Default, Clone)]
struct Pace(Arc<(Mutex<Option<u64>>, Condvar)>);

impl Pace {
    fn stopped() -> Self {
        let pace = Self::default();
        *pace.0.0.lock().unwrap() = Some(0);
        pace
    }

    fn allow(&self, steps: u64) {
        if let Some(left) = &mut *self.0.0.lock().unwrap() {
            *left += steps;
        }
        self.0.1.notify_all();
    }

    fn free(&self) {
        *self.0.0.lock().unwrap() = None;
        self.0.1.notify_all();
    }

    fn step(&self) {
        let mut left = self.0.1.wait_while(self.0.0.lock().unwrap(), |left| *left == Some(0)).unwrap();
        if let Some(left) = &mut *left {
            *left -= 1;
        }
    }
}

/// Every batch that was decoded: the sessions of its rows.
type Batches = Arc<Mutex<Vec<Vec<Option<u32>>>>>;

struct PacedModel {
    model: HostModel,
    pace: Pace,
    batches: Batches,
    trouble: Arc<AtomicU8>,
}

/// What befalls the next decode step.
const NOTHING: u8 = 0;
const ERROR: u8 = 1;
const PANIC: u8 = 2;

impl TokenModel for PacedModel {
    fn prefill(&mut self, chunk: &Prefill<'_>) -> Result<()> {
        self.model.prefill(chunk)
    }

    fn decode(&mut self, rows: &[DecodeRow<'_>]) -> Result<Vec<Token>> {
        self.pace.step();
        match self.trouble.swap(NOTHING, Ordering::Relaxed) {
            ERROR => return Err(Error::usage("the device is gone")),
            PANIC => panic!("as the test wants it"),
            _ => {}
        }
        self.batches.lock().unwrap().push(rows.iter().map(|row| row.session).collect());
        self.model.decode(rows)
    }

    fn activity(&self) -> Activity {
        self.model.activity()
    }

    fn device(&self) -> Identity {
        Identity { backend: "none", name: "a test".to_owned() }
    }
}

/// A server in this process, and a client to it.
struct TestServer {
    url: String,
    client: Client,
    engine: Handle,
    pace: Pace,
    batches: Batches,
    trouble: Arc<AtomicU8>,
    stop: Option<oneshot::Sender<()>>,
    served: JoinHandle<Result<()>>,
}

#[derive(Default)]
struct Setup {
    limits: Limits,
    serving: Serving,
    pace: Pace,
    lockstep: Option<(u32, u32)>,
    patience: Option<Duration>,
}

impl Setup {
    async fn start(self) -> TestServer {
        let Self { limits, serving, pace, lockstep, patience } = self;
        let gate = lockstep
            .map(|(sessions, concurrency)| Gate::new(Lockstep::new(sessions, concurrency), patience.unwrap_or(LONG)));
        let batches = Batches::default();
        let trouble = Arc::default();
        let model = HostModel::new(limits.pages);
        let (pace_, batches_, trouble_) = (pace.clone(), Arc::clone(&batches), Arc::clone(&trouble));
        let model = move || Ok(PacedModel { model, pace: pace_, batches: batches_, trouble: trouble_ });
        let engine = Handle::start(limits, gate, model).unwrap();
        let address = "127.0.0.1:0".parse().unwrap();
        let server = Server::bind(address, engine.clone(), serving, json!({"test": true})).await.unwrap();
        let url = format!("http://{}", server.address());
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(server.run(async move {
            let _ = stopped.await;
        }));
        TestServer { url, client: Client::new(), engine, pace, batches, trouble, stop: Some(stop), served }
    }
}

impl TestServer {
    async fn post(&self, path: &str, body: impl Into<reqwest::Body>, headers: &[(&str, String)]) -> reqwest::Response {
        let mut request = self.client.post(format!("{}{path}", self.url)).body(body);
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        request.send().await.unwrap()
    }

    async fn chat(&self, body: &Value) -> reqwest::Response {
        self.post("/v1/chat/completions", body.to_string(), &[]).await
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        let response = self.client.get(format!("{}{path}", self.url)).send().await.unwrap();
        (response.status(), response.json().await.unwrap())
    }

    async fn until(&self, what: &str, holds: impl Fn(&Snapshot) -> bool) {
        for _ in 0..6000 {
            if holds(&self.engine.snapshot()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("never {what}: {:?}", self.engine.snapshot());
    }

    /// Lets steps pass, few enough that no answer ends of itself.
    async fn step_until(&self, what: &str, holds: impl Fn(&Snapshot) -> bool) {
        for _ in 0..25 {
            self.pace.allow(1);
            for _ in 0..20 {
                if holds(&self.engine.snapshot()) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        panic!("never {what}: {:?}", self.engine.snapshot());
    }

    async fn stop(mut self) -> Result<()> {
        self.stop.take().unwrap().send(()).unwrap();
        self.served.await.unwrap()
    }
}

/// A call in which no 28 bytes repeat those of another one, since nobody could copy such calls.
fn call(index: usize) -> Call {
    let number = index * 7919;
    let arguments =
        format!("{{\"city{index}\": \"Łódź {index}\", \"in\": {{\"name\": \"x{index}\"}}, \"n\": {number}}}");
    Call { name: format!("tool_{index}"), arguments }
}

fn dictate(calls: &[Call]) -> String {
    format!("Some words first.\n{LEAD}{}", calls.iter().map(render).collect::<Vec<_>>().join("\n"))
}

fn request(calls: &[Call], stream: bool) -> Value {
    json!({
        "model": MODEL,
        "stream": stream,
        "messages": [{"role": "user", "content": dictate(calls)}],
        "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
    })
}

/// The calls of an answer that was not streamed.
fn calls_of(answer: &Value) -> Vec<Call> {
    let calls = answer["choices"][0]["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    calls
        .iter()
        .map(|c| Call { name: text(&c["function"]["name"]), arguments: text(&c["function"]["arguments"]) })
        .collect()
}

/// The calls of a stream, and its last finish reason.
fn calls_of_stream(text: &str) -> (Vec<Call>, Option<String>) {
    let mut calls = BTreeMap::<u64, Call>::new();
    let mut reason = None;
    for data in text.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).filter(|data| *data != "[DONE]") {
        let chunk: Value = serde_json::from_str(data).unwrap();
        let choice = &chunk["choices"][0];
        reason = choice["finish_reason"].as_str().map(str::to_owned).or(reason);
        for delta in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let empty = || Call { name: String::new(), arguments: String::new() };
            let call = calls.entry(delta["index"].as_u64().unwrap()).or_insert_with(empty);
            call.name.push_str(delta["function"]["name"].as_str().unwrap_or_default());
            call.arguments.push_str(delta["function"]["arguments"].as_str().unwrap_or_default());
        }
    }
    (calls.into_values().collect(), reason)
}

#[tokio::test]
async fn dictated_calls_come_back_streamed_and_not() {
    let server = Setup::default().start().await;
    let want: Vec<_> = (0..3).map(call).collect();
    let answer: Value = server.chat(&request(&want, false)).await.json().await.unwrap();
    assert_eq!(calls_of(&answer), want);
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(answer["choices"][0]["message"]["content"], Value::Null);
    let response = server.chat(&request(&want, true)).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let text = response.text().await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"));
    assert_eq!(calls_of_stream(&text), (want, Some("tool_calls".into())));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn choice_limit_and_usage_are_honoured() {
    let server = Setup::default().start().await;
    let want = [call(1), call(2)];
    let with = |key: &str, value: Value| {
        let mut body = request(&want, false);
        body[key] = value;
        body
    };
    let answer: Value = server.chat(&with("tool_choice", json!("none"))).await.json().await.unwrap();
    assert_eq!((calls_of(&answer).len(), &answer["choices"][0]["finish_reason"]), (0, &json!("stop")));
    let answer: Value = server.chat(&with("max_tokens", json!(20))).await.json().await.unwrap();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 20);
    let answer: Value = server.chat(&with("parallel_tool_calls", json!(false))).await.json().await.unwrap();
    assert_eq!(calls_of(&answer), want[..1]);
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    let answer: Value = server.chat(&with("tool_choice", named)).await.json().await.unwrap();
    assert_eq!(calls_of(&answer), want);
    assert!(answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0, "{}", answer["usage"]);
    let mut body = request(&want, true);
    body["stream_options"] = json!({"include_usage": true});
    let text = server.chat(&body).await.text().await.unwrap();
    let usage = text.split("\n\n").find(|event| event.contains("prompt_tokens")).unwrap();
    assert!(usage.contains("\"choices\":[]"), "{usage}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_other_routes_answer() {
    let server = Setup::default().start().await;
    let (status, models) = server.get("/v1/models").await;
    assert_eq!((status, &models["data"][0]["id"]), (StatusCode::OK, &json!(MODEL)));
    assert_eq!(server.get("/v1/models/gpt-9").await.0, StatusCode::NOT_FOUND);
    let (status, health) = server.get("/health").await;
    assert_eq!((status, &health["status"], &health["config"]["test"]), (StatusCode::OK, &json!("ok"), &json!(true)));
    assert_eq!(health["device"], json!({"backend": "none", "name": "a test"}));
    server.chat(&request(&[call(1)], false)).await;
    let text = server.client.get(format!("{}/metrics", server.url)).send().await.unwrap().text().await.unwrap();
    assert!(text.contains("toolstorm_requests_total{finished_reason=\"stop\"} 1"), "{text}");
    assert!(server.get("/stats").await.1["generation_tokens"].as_u64().unwrap() > 20);
    for path in ["/", "/v1", "/v1/chat/completions/x", "/lockstep", "/races", "/races?session=0"] {
        let (status, body) = server.get(path).await;
        assert_eq!(status, StatusCode::NOT_FOUND, "{path}");
        assert!(body["error"]["message"].is_string(), "{path}");
    }
    assert_eq!(server.get("/v1/chat/completions").await.0, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(server.get("/races?round=1").await.0, StatusCode::BAD_REQUEST);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn variables_decide_what_is_served() {
    let mut seen = Vec::new();
    for (switch, sse_tokens) in [("1", "1"), ("0", "16")] {
        let variables = [("METRICS", switch), ("PREFIX_CACHE", switch), ("SSE_TOKENS", sse_tokens)];
        let toggles = Toggles::resolve(variables.map(|(name, value)| (format!("TOOLSTORM_{name}"), value))).unwrap();
        let (limits, serving) = (Limits::new(&toggles, 16), Serving::new(&toggles, MODEL));
        let server = Setup { limits, serving, ..Setup::default() }.start().await;
        let want = [call(1), call(2)];
        server.chat(&request(&want, true)).await.text().await.unwrap();
        let text = server.chat(&request(&want, true)).await.text().await.unwrap();
        assert_eq!(calls_of_stream(&text).0, want);
        let answer: Value = server.chat(&request(&want, false)).await.json().await.unwrap();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        let metrics = server.client.get(format!("{}/metrics", server.url)).send().await.unwrap().status();
        seen.push((metrics, cached, text.matches("data: ").count()));
        server.stop().await.unwrap();
    }
    let [(metrics, cached, events), (no_metrics, uncached, fewer)] = seen[..] else { panic!("{seen:?}") };
    assert_eq!((metrics, no_metrics), (StatusCode::OK, StatusCode::NOT_FOUND));
    assert!(cached > 0 && uncached == 0, "{cached} and {uncached} tokens from the prefix cache");
    assert!(events > 4 * fewer, "{events} events of one token and {fewer} of sixteen");
}

#[tokio::test]
async fn an_unknown_model_and_a_long_context_are_refused() {
    let server = Setup::default().start().await;
    let mut body = request(&[call(1)], false);
    body["model"] = json!("gpt-9");
    let response = server.chat(&body).await;
    assert_eq!(response.status(), StatusCode::NOT_FOUND);
    let error = response.json::<Value>().await.unwrap()["error"].clone();
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    let mut body = request(&[call(1)], false);
    body["messages"][0]["content"] = json!("x".repeat(20_000));
    let response = server.chat(&body).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "context_length_exceeded");
    server.stop().await.unwrap();
}

/// Bodies that are wrong in some way, in quantity: cut, with a byte changed, nested, of the wrong types.
fn malformed() -> Vec<Vec<u8>> {
    let good = request(&[call(1)], false).to_string().into_bytes();
    let mut bodies: Vec<Vec<u8>> = (0..good.len()).step_by(3).map(|at| good[..at].to_vec()).collect();
    for at in (0..good.len()).step_by(2) {
        let mut body = good.clone();
        body[at] = body[at].wrapping_mul(31).wrapping_add(at as u8);
        bodies.push(body);
    }
    for value in [json!(null), json!(true), json!(-1.5e300), json!("x"), json!([[[]]]), json!({"a": {}})] {
        for key in ["model", "messages", "tools", "tool_choice", "stream", "max_tokens", "n", "stop", "stream_options"]
        {
            let mut body = request(&[call(1)], false);
            body[key] = value.clone();
            bodies.push(body.to_string().into_bytes());
        }
    }
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        bodies.push(format!("{}1{}", open.repeat(200_000), close.repeat(200_000)).into_bytes());
        bodies.push(format!("{{\"messages\":{}", open.repeat(200_000)).into_bytes());
    }
    bodies.push(vec![0xFF; 1000]);
    bodies
}

#[tokio::test]
async fn malformed_bodies_are_refused_and_survived() {
    let server = Setup::default().start().await;
    let (mut refused, mut answered) = (0, 0);
    for body in malformed() {
        let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
        let response = server.post("/v1/chat/completions", body, &[]).await;
        let status = response.status();
        let answer = response.text().await.unwrap();
        match status.as_u16() {
            200 => answered += 1,
            400 | 404 => {
                let answer: Value = serde_json::from_str(&answer).unwrap();
                assert!(answer["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{answer} for {shown}");
                refused += 1;
            }
            other => panic!("{other}: {answer} for {shown}"),
        }
    }
    assert!(refused > 150 && answered > 0, "{refused} refused, {answered} answered");
    let answer: Value = server.chat(&request(&[call(1)], false)).await.json().await.unwrap();
    assert_eq!(calls_of(&answer), [call(1)], "the server is as it was");
    assert_eq!(server.engine.snapshot().pages_held, 0);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn too_large_a_body_is_refused() {
    let serving = Serving { body_limit: 10_000, ..Serving::default() };
    let server = Setup { serving, ..Setup::default() }.start().await;
    for size in [10_001, 100_000, 5_000_000] {
        let response =
            match server.client.post(format!("{}/v1/chat/completions", server.url)).body(vec![b' '; size]).send().await
            {
                Ok(response) => response,
                // Past a multiple of the limit the connection is closed over the client's words.
                Err(_) if size > 160_000 => continue,
                Err(error) => panic!("{size}: {error}"),
            };
        assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE, "{size}");
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "request_too_large");
    }
    assert_eq!(server.chat(&request(&[call(1)], false)).await.status(), StatusCode::OK);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_back() {
    let limits = Limits { max_batch: 1, queue: 2, ..Limits::default() };
    let server = Setup { limits, pace: Pace::stopped(), ..Setup::default() }.start().await;
    let body = request(&[call(1)], false);
    let url = format!("{}/v1/chat/completions", server.url);
    let send = || server.client.post(&url).body(body.to_string()).send();
    let running = tokio::spawn(send());
    server.until("one runs", |s| s.running == 1).await;
    let mut accepted = vec![running];
    // The engine stands in its step, so whoever is not refused at once waits in the queue.
    let refused = loop {
        let mut answer = tokio::spawn(send());
        match tokio::time::timeout(Duration::from_millis(500), &mut answer).await {
            Ok(response) => break response.unwrap().unwrap(),
            Err(_) => accepted.push(answer),
        }
    };
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers()["retry-after"].to_str().unwrap().parse::<u32>().unwrap() > 0);
    assert_eq!(refused.json::<Value>().await.unwrap()["error"]["code"], "queue_full");
    server.pace.free();
    assert!(accepted.len() >= 3, "one runs and two wait");
    for answer in accepted {
        assert_eq!(answer.await.unwrap().unwrap().status(), StatusCode::OK);
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_request_that_nobody_awaits_is_gone_after_one_step() {
    let server = Setup { pace: Pace::stopped(), ..Setup::default() }.start().await;
    let submit = |prompt: &[u8]| {
        let request = Request { prompt: prompt.to_vec(), max_tokens: 300, cancel_after: None, place: None, think: 0 };
        server.engine.submit(request).unwrap()
    };
    // Each repeats itself, so it is copied until its limit.
    let stays = submit(b"abcdefghijklmnopqrstuvwxyzabcdefghijklmnop");
    let goes = submit(b"ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFGHIJKLMNOP");
    while server.engine.snapshot().running < 2 {
        server.pace.allow(1);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let held = server.engine.snapshot().pages_held;
    drop(goes);
    let before = server.batches.lock().unwrap().len();
    // The step in progress ends; the next one is not begun with the dropped request.
    server.pace.allow(1);
    server.until("one is left", |s| s.running == 1).await;
    assert!(server.batches.lock().unwrap().len() - before <= 2);
    assert!(server.engine.snapshot().pages_held < held);
    drop(stays);
    server.pace.free();
    server.until("all is given back", |s| s.running == 0 && s.pages_held == 0).await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_client_that_goes_away_gives_its_pages_back() {
    for stream in [true, false] {
        let server = Setup { pace: Pace::stopped(), ..Setup::default() }.start().await;
        let url = format!("{}/v1/chat/completions", server.url);
        let stays = tokio::spawn(server.client.post(&url).body(request(&[call(2)], false).to_string()).send());
        // A client of its own, whose connection closes when it is dropped.
        let goes = Client::new();
        let leaving = tokio::spawn(goes.post(&url).body(request(&[call(1)], stream).to_string()).send());
        server.step_until("both run", |s| s.running == 2).await;
        leaving.abort();
        let _ = leaving.await;
        drop(goes);
        server.step_until("one is left", |s| s.running == 1).await;
        server.pace.free();
        let answer: Value = stays.await.unwrap().unwrap().json().await.unwrap();
        assert_eq!(calls_of(&answer), [call(2)]);
        let metrics = server.engine.metrics().render();
        assert!(metrics.contains("finished_reason=\"aborted\"} 1"), "the other one did not come to its end");
        server.until("all is given back", |s| s.pages_held == 0).await;
        server.stop().await.unwrap();
    }
}

#[tokio::test]
async fn many_clients_that_come_and_go_leave_nothing_behind() {
    let limits = Limits { max_batch: 8, ..Limits::default() };
    let server = Setup { limits, ..Setup::default() }.start().await;
    let clients = (0..60_usize).map(|index| {
        let client = Client::new();
        let (url, body) = (format!("{}/v1/chat/completions", server.url), request(&[call(index)], true).to_string());
        tokio::spawn(async move {
            let mut chunks = client.post(url).body(body).send().await.unwrap().bytes_stream();
            let mut text = Vec::new();
            while let Some(chunk) = chunks.next().await {
                text.extend_from_slice(&chunk.unwrap());
                if index % 3 == 0 && text.len() > index * 40 {
                    return None;
                }
            }
            Some(calls_of_stream(&String::from_utf8(text).unwrap()).0 == [call(index)])
        })
    });
    let ends: Vec<_> = join_all(clients).await.into_iter().map(std::result::Result::unwrap).collect();
    let (left, right) =
        (ends.iter().filter(|e| e.is_none()).count(), ends.iter().filter(|e| **e == Some(true)).count());
    assert_eq!(left + right, 60, "whoever stayed got exactly what was dictated");
    assert!(left >= 10, "only {left} went away");
    server.until("all is given back", |s| s.running == 0 && s.pages_held == 0).await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_request_is_cancelled_after_exactly_so_many_tokens() {
    let server = Setup::default().start().await;
    let headers = [("x-toolstorm-cancel-after", "10".to_owned())];
    let body = request(&[call(1)], true).to_string();
    let text = server.post("/v1/chat/completions", body, &headers).await.text().await.unwrap();
    assert!(!text.contains("[DONE]"));
    assert_eq!(calls_of_stream(&text).1, None);
    let stats = server.get("/stats").await.1;
    assert_eq!((&stats["generation_tokens"], &stats["pages_held"]), (&json!(10), &json!(0)));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_shutdown_finishes_what_runs_and_takes_nothing_new() {
    let server = Setup { pace: Pace::stopped(), ..Setup::default() }.start().await;
    let running = tokio::spawn(
        server
            .client
            .post(format!("{}/v1/chat/completions", server.url))
            .body(request(&[call(1)], false).to_string())
            .send(),
    );
    server.until("one runs", |s| s.running == 1).await;
    let TestServer { engine, pace, stop, served, url, .. } = server;
    stop.unwrap().send(()).unwrap();
    while !engine.is_draining() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(Client::new().get(format!("{url}/health")).send().await.is_err(), "nobody is let in");
    assert!(!served.is_finished());
    pace.free();
    let answer: Value = running.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(calls_of(&answer), [call(1)]);
    served.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_failing_step_fails_its_requests_and_no_others() {
    let server = Setup::default().start().await;
    for stream in [false, true] {
        server.trouble.store(ERROR, Ordering::Relaxed);
        let response = server.chat(&request(&[call(1)], stream)).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let error = response.json::<Value>().await.unwrap()["error"].clone();
        assert_eq!((&error["code"], &error["type"]), (&json!("engine_failed"), &json!("server_error")));
        assert_eq!(server.engine.snapshot().pages_held, 0);
        let answer: Value = server.chat(&request(&[call(2)], false)).await.json().await.unwrap();
        assert_eq!(calls_of(&answer), [call(2)]);
    }
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_engine_that_died_is_told_and_not_hidden() {
    let server = Setup::default().start().await;
    server.trouble.store(PANIC, Ordering::Relaxed);
    for _ in 0..2 {
        let response = server.chat(&request(&[call(1)], true)).await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
    let (status, health) = server.get("/health").await;
    assert_eq!((status, &health["status"]), (StatusCode::SERVICE_UNAVAILABLE, &json!("failed")));
    server.stop().await.unwrap();
}

/// A text without its times.
fn timeless(text: &str) -> String {
    text.split("\"created\":").map(|part| part.trim_start_matches(char::is_numeric)).collect()
}

/// One session under lockstep: some rounds, then its end. `delay` makes the client slow in a way of its own.
async fn session(
    server: &TestServer,
    session: u32,
    rounds: u32,
    delay: impl Fn(u32) -> u64,
) -> Vec<(StatusCode, String)> {
    let mut answers = Vec::new();
    for round in 0..rounds {
        tokio::time::sleep(Duration::from_millis(delay(round))).await;
        let mut headers = vec![("x-toolstorm-session", session.to_string()), ("x-toolstorm-round", round.to_string())];
        if (session + round) % 5 == 4 {
            headers.push(("x-toolstorm-cancel-after", "7".to_owned()));
        }
        if session % 4 == 1 {
            headers.push(("x-toolstorm-think", round.to_string()));
        }
        let mut body = request(&[call((session * 10 + round) as usize)], round % 2 == 0);
        if session == 2 && round == 1 {
            body["temperature"] = json!("wrong");
        }
        let response = server.post("/v1/chat/completions", body.to_string(), &headers).await;
        let status = response.status();
        answers.push((status, timeless(&response.text().await.unwrap())));
    }
    let end = server.post("/lockstep/end", json!({"session": session}).to_string(), &[]).await;
    assert_eq!(end.status(), StatusCode::OK);
    answers
}

/// What a run under lockstep leaves: every batch that was decoded, and every session's answers.
type Run = (Vec<Vec<Option<u32>>>, Vec<Vec<(StatusCode, String)>>);

/// `sessions` sessions, at most `concurrency` at a time: started in order, the next one when one has ended.
async fn lockstep_run(sessions: u32, concurrency: u32, slow: u64) -> Run {
    let server = Arc::new(Setup { lockstep: Some((sessions, concurrency)), ..Setup::default() }.start().await);
    let places = Arc::new(Semaphore::new(concurrency as usize));
    let mut started = Vec::new();
    for number in 0..sessions {
        let place = Arc::clone(&places).acquire_owned().await.unwrap();
        let server = Arc::clone(&server);
        started.push(tokio::spawn(async move {
            let delay = |round| u64::from(number * 7 + round * 13) * slow % 11;
            let answers = session(&server, number, 2 + number % 3, delay).await;
            drop(place);
            answers
        }));
    }
    let answers = join_all(started).await.into_iter().map(std::result::Result::unwrap).collect();
    let batches = server.batches.lock().unwrap().clone();
    assert_eq!(server.engine.snapshot().pages_held, 0);
    Arc::into_inner(server).unwrap().stop().await.unwrap();
    (batches, answers)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_lockstep_a_run_does_not_depend_on_time() {
    for (sessions, concurrency) in [(10, 4), (6, 6), (5, 1)] {
        let fast = lockstep_run(sessions, concurrency, 0).await;
        let slow = lockstep_run(sessions, concurrency, 3).await;
        let widest = fast.0.iter().map(Vec::len).max();
        assert_eq!(widest, Some(concurrency as usize), "the batches were full at times");
        assert!(fast.0 == slow.0, "the batches of {sessions} sessions, {concurrency} at a time, differ");
        assert_eq!(fast.1, slow.1, "answers of {sessions} sessions, {concurrency} at a time");
    }
}

#[tokio::test]
async fn too_few_sessions_end_in_an_error_and_not_in_a_hang() {
    let patience = Some(Duration::from_millis(200));
    let server = Setup { lockstep: Some((3, 3)), patience, ..Setup::default() }.start().await;
    let headers = |session: u32| [("x-toolstorm-session", session.to_string()), ("x-toolstorm-round", "0".to_owned())];
    let body = request(&[call(1)], true).to_string();
    let answers = join_all([0, 2].map(|s| {
        let (body, headers) = (body.clone(), headers(s));
        let server = &server;
        async move { server.post("/v1/chat/completions", body, &headers).await }
    }))
    .await;
    for answer in answers {
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        let error = answer.json::<Value>().await.unwrap()["error"].clone();
        assert_eq!(error["code"], "lockstep_stalled");
        assert!(error["message"].as_str().unwrap().ends_with("the end of: 1"), "{error}");
    }
    let later = server.post("/v1/chat/completions", body, &headers(1)).await;
    assert_eq!(later.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(server.get("/lockstep").await.1["stalled"].is_string());
    assert_eq!(server.engine.snapshot().pages_held, 0);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn sessions_that_never_start_can_be_called_off() {
    let server = Setup { lockstep: Some((80, 64)), ..Setup::default() }.start().await;
    let begun = server.post("/lockstep/begin", json!({"sessions": 40, "concurrency": 3}).to_string(), &[]).await;
    assert_eq!(begun.status(), StatusCode::OK);
    let ended = server.post("/lockstep/end", json!({"from": 2}).to_string(), &[]).await;
    assert_eq!(ended.status(), StatusCode::OK);
    assert_eq!(server.get("/lockstep").await.1["expected"], json!([0, 1]));
    let two = join_all([0, 1].map(|s| session(&server, s, 2, |_| 0))).await;
    assert!(two.iter().flatten().all(|answer| answer.0 == StatusCode::OK), "{two:?}");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn lockstep_refuses_what_it_cannot_place() {
    let server = Setup { lockstep: Some((2, 2)), ..Setup::default() }.start().await;
    let body = request(&[call(1)], false).to_string();
    let place = |session: &str, round: &str| {
        vec![("x-toolstorm-session", session.to_owned()), ("x-toolstorm-round", round.to_owned())]
    };
    for (headers, param) in [
        (vec![], "x-toolstorm-session"),
        (place("7", "0"), "x-toolstorm-session"),
        (place("x", "0"), "x-toolstorm-session"),
        (place("1", "-1"), "x-toolstorm-round"),
        (place("1", "0")[..1].to_vec(), "x-toolstorm-round"),
    ] {
        let response = server.post("/v1/chat/completions", body.clone(), &headers).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{headers:?}");
        assert_eq!(response.json::<Value>().await.unwrap()["error"]["param"], param, "{headers:?}");
    }
    let ended = server.post("/lockstep/end", "{\"session\": 9}", &[]).await;
    assert_eq!(ended.status(), StatusCode::BAD_REQUEST);
    let ended = server.post("/lockstep/end", "{}", &[]).await;
    assert_eq!(ended.status(), StatusCode::BAD_REQUEST);
    server.stop().await.unwrap();
    let free = Setup::default().start().await;
    assert_eq!(free.post("/lockstep/begin", "{}", &[]).await.status(), StatusCode::NOT_FOUND);
    free.stop().await.unwrap();
}

#[tokio::test]
async fn an_abort_under_lockstep_does_not_hang_the_others() {
    let server = Setup { lockstep: Some((2, 2)), pace: Pace::stopped(), ..Setup::default() }.start().await;
    let (url, body) = (format!("{}/v1/chat/completions", server.url), request(&[call(1)], true).to_string());
    let send = |client: &Client, session: u32| {
        let request =
            client.post(&url).body(body.clone()).header("x-toolstorm-session", session).header("x-toolstorm-round", 0);
        tokio::spawn(request.send())
    };
    let (stays, goes) = (Client::new(), Client::new());
    let (staying, going) = (send(&stays, 0), send(&goes, 1));
    server.step_until("both run", |s| s.running == 2).await;
    going.abort();
    let _ = going.await;
    drop(goes);
    server.step_until("one is missing", |s| s.lockstep.as_ref().is_some_and(|l| l.missing == [1])).await;
    server.pace.free();
    let ended = server.post("/lockstep/end", "{\"session\": 1}", &[]).await;
    assert_eq!(ended.status(), StatusCode::OK);
    let text = staying.await.unwrap().unwrap().text().await.unwrap();
    assert_eq!(calls_of_stream(&text).0, [call(1)]);
    server.stop().await.unwrap();
}

#[tokio::test]
async fn the_command_says_where_it_listens_what_it_resolved_and_drains_on_sigterm() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_toolstorm"))
        .args(["serve", "--port", "0", "--model", "m"])
        .env("SGLANG_DSV4_BF16_INDEX_K", "on")
        .env("TOOLSTORM_DEVICE", "auto")
        .env("TOOLSTORM_MAX_BATCH", "5")
        .env("TOOLSTORM_MAX_CONTEXT", "1024")
        .env("TOOLSTORM_ORDER", "pct:2")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    assert!(ready["listening"].as_str().unwrap().starts_with("http://127.0.0.1:"), "{ready}");
    assert_eq!(ready["model"], "m");
    let health = reqwest::get(format!("{}/health", ready["listening"].as_str().unwrap())).await.unwrap();
    let health: Value = health.json().await.unwrap();
    let variables = &health["config"]["variables"];
    for (name, value) in [
        ("SGLANG_DSV4_BF16_INDEX_K", "1"),
        ("TOOLSTORM_CUDA_GRAPH", "1"),
        ("TOOLSTORM_BUCKETS", "1,2,4,5"),
        ("TOOLSTORM_ORDER", "pct:2"),
    ] {
        assert_eq!(variables[name], value, "{name}");
    }
    let device = variables["TOOLSTORM_DEVICE"].as_str().unwrap();
    assert!(["sim", "cuda"].contains(&device), "the device in use is `{device}`");
    assert_eq!(health["device"]["backend"], device, "{health}");
    assert_eq!(health["config"]["limits"]["max_batch"], 5);
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
