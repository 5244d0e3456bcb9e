//! One request over HTTP, every wait bounded, every byte kept.

use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use super::{
    conversation::Turn,
    latency::{self, Timing},
};
use crate::{
    clock::Clock,
    error::{Error, Result},
    sse::{Decoder, Event},
    validate::{Ending, assemble::BODY_LIMIT},
};

/// Bytes of a small document at most.
const SMALL: usize = 4 << 20;

/// Where requests go.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// Address up to and without `/v1`.
    pub base_url: String,
    /// The key itself; never written anywhere.
    pub api_key: Option<Secret>,
}

/// A text that no log shows.
#[derive(Clone)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[secret]")
    }
}

/// How long the parts of a request may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Opening a connection.
    pub connect: Duration,
    /// Silence before the status line.
    pub first_byte: Duration,
    /// Silence inside the body.
    pub stall: Duration,
    /// All of it.
    pub total: Duration,
    /// Whether the client itself cuts a cancelled answer; under lockstep the engine does, at an exact step.
    pub cuts: bool,
}

/// A response as it came.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    /// HTTP status; 0 where no response came.
    pub status: u16,
    /// The `content-type` header.
    pub content_type: Option<String>,
    /// The body.
    pub body: Vec<u8>,
    /// How it ended.
    pub ending: Ending,
    /// Whether the harness cut it.
    pub cut: bool,
    /// What the transport said.
    pub note: Option<String>,
    /// When the request was sent, since the clock's origin.
    pub sent: Duration,
}

/// Sends requests to one endpoint.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    endpoint: Endpoint,
    limits: Limits,
    clock: Clock,
}

impl Client {
    /// A client of `endpoint`.
    pub fn new(endpoint: Endpoint, limits: Limits, clock: Clock) -> Result<Self> {
        let http = reqwest::Client::builder()
            .connect_timeout(limits.connect)
            .pool_max_idle_per_host(usize::MAX)
            .tcp_nodelay(true)
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("toolstorm/", env!("CARGO_PKG_VERSION")))
            .no_proxy()
            .build()
            .map_err(|error| Error::usage(format!("cannot make an HTTP client: {error}")))?;
        Ok(Self { http, endpoint, limits, clock })
    }

    /// Sends one turn of the session that the server knows as `session`.
    pub async fn send(&self, turn: &Turn, session: u64) -> (Reply, Timing) {
        let sent = self.clock.elapsed();
        let deadline = Instant::now() + self.limits.total;
        let mut reply = Reply { sent, ..Reply::default() };
        let mut timing = Timing::default();
        let within = self.limits.first_byte.min(self.limits.total);
        match timeout(within, self.request(turn, session).send()).await {
            Err(_) => reply.fail(Ending::NoResponse, "no status line in time"),
            Ok(Err(error)) => reply.fail(Ending::NoResponse, &chain(&error)),
            Ok(Ok(response)) => {
                timing.first_byte = Some(self.since(sent));
                self.read(response, turn, deadline, &mut reply, &mut timing).await;
            }
        }
        timing.end = self.since(sent);
        (reply, timing)
    }

    async fn read(
        &self,
        mut response: reqwest::Response,
        turn: &Turn,
        deadline: Instant,
        reply: &mut Reply,
        timing: &mut Timing,
    ) {
        reply.status = response.status().as_u16();
        let kind = response.headers().get(reqwest::header::CONTENT_TYPE);
        reply.content_type = kind.and_then(|value| value.to_str().ok()).map(str::to_owned);
        let mut decoder = Decoder::new();
        loop {
            let chunk = timeout(self.limits.stall, response.chunk());
            let chunk = match timeout_at(deadline, chunk).await {
                Err(_) => return reply.fail(Ending::Stall, "not complete in time"),
                Ok(Err(_)) => return reply.fail(Ending::Stall, "silence inside the body"),
                Ok(Ok(Err(error))) => return reply.fail(Ending::Reset, &chain(&error)),
                Ok(Ok(Ok(None))) => return,
                Ok(Ok(Ok(Some(chunk)))) => chunk,
            };
            reply.body.extend_from_slice(&chunk);
            if reply.body.len() > BODY_LIMIT {
                return reply.fail(Ending::Reset, &format!("given up after {BODY_LIMIT} bytes"));
            }
            if turn.stream {
                let now = self.since(reply.sent);
                decoder.feed(&chunk, |event| {
                    if let Event::Message { data, .. } = event
                        && latency::brings_output(data)
                    {
                        timing.outputs.push(now);
                    }
                });
                let reached = |limit| timing.outputs.len() as u64 >= limit;
                if self.limits.cuts && turn.cancel_after.is_some_and(reached) {
                    reply.cut = true;
                    return;
                }
            }
        }
    }

    fn request(&self, turn: &Turn, session: u64) -> reqwest::RequestBuilder {
        let mut request = self
            .http
            .post(self.url("/v1/chat/completions"))
            .header("content-type", "application/json")
            .header("x-toolstorm-session", session)
            .header("x-toolstorm-round", turn.round);
        if let Some(tokens) = turn.cancel_after {
            request = request.header("x-toolstorm-cancel-after", tokens);
        }
        if turn.think_steps > 0 {
            request = request.header("x-toolstorm-think", turn.think_steps);
        }
        if let Some(key) = &self.endpoint.api_key {
            request = request.bearer_auth(&key.0);
        }
        request.body(turn.body.clone())
    }

    /// A small request beside the load: `None` where it fails or the server does not know the path.
    pub async fn get(&self, path: &str) -> Option<String> {
        self.text(path).await.ok()
    }

    /// As [`Self::get`], with the reason where there is no text.
    pub async fn text(&self, path: &str) -> std::result::Result<String, String> {
        small(self.ask(path).await.map_err(|error| format!("cannot reach it: {}", chain(&error)))?).await
    }

    /// As [`Self::get`] a document that not every server has: `None` where the server answers 404, else why there is none.
    pub async fn json(&self, path: &str) -> std::result::Result<Option<serde_json::Value>, String> {
        let response = self.ask(path).await.map_err(|error| chain(&error))?;
        match response.status().as_u16() {
            404 => Ok(None),
            200 => response.json().await.map(Some).map_err(|error| chain(&error)),
            status => Err(format!("the server answers {status}")),
        }
    }

    /// What `GET /health` says, if anything; an error, and why, where no server can be reached at all.
    pub async fn health(&self) -> std::result::Result<Option<String>, String> {
        match self.ask("/health").await {
            Ok(response) => Ok(small(response).await.ok()),
            Err(error) if error.is_connect() => Err(chain(&error)),
            Err(_) => Ok(None),
        }
    }

    async fn ask(&self, path: &str) -> reqwest::Result<reqwest::Response> {
        let mut request = self.http.get(self.url(path)).timeout(Duration::from_secs(10));
        if let Some(key) = &self.endpoint.api_key {
            request = request.bearer_auth(&key.0);
        }
        request.send().await
    }

    /// Posts a small document beside the load; false where it fails.
    pub async fn post(&self, path: &str, body: &serde_json::Value) -> bool {
        let request = self.http.post(self.url(path)).timeout(Duration::from_secs(30)).json(body);
        matches!(request.send().await, Ok(response) if response.status().is_success())
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.endpoint.base_url)
    }

    fn since(&self, sent: Duration) -> Duration {
        self.clock.elapsed().saturating_sub(sent)
    }
}

/// The body of a success, unless it is too large to be one of ours.
async fn small(mut response: reqwest::Response) -> std::result::Result<String, String> {
    if !response.status().is_success() {
        return Err(format!("it answers HTTP {}", response.status().as_u16()));
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| chain(&error))? {
        body.extend_from_slice(&chunk);
        if body.len() > SMALL {
            return Err(format!("given up after {SMALL} bytes"));
        }
    }
    Ok(String::from_utf8_lossy(&body).into_owned())
}

impl Reply {
    fn fail(&mut self, ending: Ending, note: &str) {
        self.ending = ending;
        self.note = Some(note.to_owned());
    }
}

/// An error and its causes in one line; the address is left out, since it may hold a secret.
fn chain(error: &reqwest::Error) -> String {
    let mut text = String::new();
    let mut next: Option<&dyn std::error::Error> = std::error::Error::source(error);
    while let Some(cause) = next {
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    if text.is_empty() { "the request failed".into() } else { text }
}
