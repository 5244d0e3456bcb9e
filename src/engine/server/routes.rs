//! What each route answers.

use std::{
    convert::Infallible,
    sync::{Arc, atomic::Ordering},
};

use axum::{
    Json,
    body::{Body, Bytes},
    extract::{Path, RawQuery, Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::{sync::mpsc::UnboundedReceiver, time::timeout};

use super::{
    App,
    failure::refusal,
    openai::{ChatRequest, Refusal},
    stream::{Collector, EventWriter, Identity, Reader},
};
use crate::{
    engine::{
        findings,
        lockstep::Place,
        request::{self, Event, Failure},
    },
    seed::Seed,
};

/// The number of a request's session.
pub(super) const SESSION: &str = "x-toolstorm-session";
/// The round of a request in its session.
pub(super) const ROUND: &str = "x-toolstorm-round";
/// Tokens after which the engine drops a request by itself.
pub(super) const CANCEL_AFTER: &str = "x-toolstorm-cancel-after";
/// Steps that a request waits before its admission, under lockstep.
pub(super) const THINK: &str = "x-toolstorm-think";

/// How many times the limit is read and thrown away, so that a client which sends too much gets to read the refusal.
const DISCARD: usize = 16;
/// Events that are written at once.
const EVENTS: usize = 64;

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

type Reply = Result<Response, Refusal>;

pub(super) async fn chat(State(app): State<Arc<App>>, request: Request) -> Reply {
    let (parts, body) = request.into_parts();
    let body = read(body, &app).await?;
    let order = Order::read(&parts.headers, &body, &app)?;
    drop(body);
    let identity = order.identity(&app);
    let reader = Reader::new(order.in_call, order.parallel);
    let events = app.engine.submit(order.request).map_err(|failure| refusal(&failure))?;
    if order.stream {
        let writer = EventWriter::new(reader, identity, app.serving.sse_tokens, order.include_usage);
        stream_events(writer, events).await
    } else {
        collect(Collector::new(reader), &identity, events).await
    }
}

/// A chat request that the engine can take.
struct Order {
    request: request::Request,
    in_call: bool,
    parallel: bool,
    stream: bool,
    include_usage: bool,
}

impl Order {
    fn read(headers: &HeaderMap, body: &[u8], app: &App) -> Result<Self, Refusal> {
        let place = place(headers)?;
        if app.engine.is_lockstep() && place.is_none() {
            return Err(Refusal::field(SESSION, format!("under lockstep every request carries `{SESSION}`")));
        }
        let chat = ChatRequest::parse(body)?;
        if chat.model != app.serving.model {
            return Err(unknown_model(&chat.model));
        }
        let prompt = chat.conversation.prompt();
        let limits = app.engine.limits();
        let max_tokens = chat.answer_limit(prompt.tokens.len(), limits.max_context)?;
        if !limits.admit(prompt.tokens.len(), max_tokens) {
            let message = format!("the cache has {} pages, fewer than this request takes", limits.pages);
            return Err(Refusal::field("messages", message).code("context_length_exceeded"));
        }
        let request = request::Request {
            prompt: prompt.tokens,
            max_tokens,
            cancel_after: count(headers, CANCEL_AFTER)?.filter(|after| *after > 0),
            place,
            think: count(headers, THINK)?.unwrap_or(0),
        };
        let ChatRequest { stream, include_usage, parallel, .. } = chat;
        Ok(Self { request, in_call: prompt.calls, parallel, stream, include_usage })
    }

    /// Ids are made from the session and round where there are any, so that two equal runs have equal ids.
    fn identity(&self, app: &App) -> Identity {
        let counted = app.requests.fetch_add(1, Ordering::Relaxed);
        let seed = match self.request.place {
            Some(Place { session, round }) => Seed(u64::from(session) << 32 | u64::from(round)).fork("round"),
            None => Seed(counted).fork("request"),
        };
        let created = app.clock.timestamp().as_second();
        Identity { number: seed.0, created, model: app.serving.model.clone() }
    }
}

fn unknown_model(model: &str) -> Refusal {
    let message = format!("the model `{model}` does not exist");
    let refusal = Refusal::new(404, "invalid_request_error", "model_not_found", message);
    Refusal { param: Some("model".into()), ..refusal }
}

/// Reads a body, bounded in size and time.
async fn read(body: Body, app: &App) -> Result<Vec<u8>, Refusal> {
    let (limit, patience) = (app.serving.body_limit, app.serving.body_patience);
    timeout(patience, read_bounded(body, limit)).await.unwrap_or_else(|_| {
        let message = format!("the body did not come within {} s", patience.as_secs_f64());
        Err(Refusal::new(408, "invalid_request_error", "request_timeout", message))
    })
}

async fn read_bounded(body: Body, limit: usize) -> Result<Vec<u8>, Refusal> {
    let mut chunks = body.into_data_stream();
    let (mut bytes, mut length) = (Vec::new(), 0);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| {
            Refusal::new(400, "invalid_request_error", "unreadable_body", format!("the body broke off: {error}"))
        })?;
        length += chunk.len();
        if length <= limit {
            bytes.extend_from_slice(&chunk);
        } else if length > limit * DISCARD {
            break;
        }
    }
    if length > limit {
        let message = format!("the body is larger than {limit} bytes");
        return Err(Refusal::new(413, "invalid_request_error", "request_too_large", message));
    }
    Ok(bytes)
}

fn place(headers: &HeaderMap) -> Result<Option<Place>, Refusal> {
    let (session, round) = (count(headers, SESSION)?, count(headers, ROUND)?);
    match (session, round) {
        (None, None) => Ok(None),
        (Some(session), Some(round)) => Ok(Some(Place { session, round })),
        (Some(_), None) => Err(Refusal::field(ROUND, format!("`{SESSION}` comes with `{ROUND}`"))),
        (None, Some(_)) => Err(Refusal::field(SESSION, format!("`{ROUND}` comes with `{SESSION}`"))),
    }
}

fn count(headers: &HeaderMap, name: &'static str) -> Result<Option<u32>, Refusal> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    number.map(Some).ok_or_else(|| Refusal::field(name, format!("`{name}` must be a whole number")))
}

/// Answers with server-sent events. The first event is awaited before the status goes out, so that a request which
/// fails before it runs gets the status of its failure.
async fn stream_events(mut writer: EventWriter, mut events: UnboundedReceiver<Event>) -> Reply {
    let mut first = String::new();
    let open = match events.recv().await {
        None => return Err(refusal(&gone())),
        Some(Event::Failed(failure)) => return Err(refusal(&failure)),
        Some(event) => writer.write(event, &mut first),
    };
    let rest = stream::unfold((writer, events, open), |(mut writer, mut events, open)| async move {
        if !open {
            return None;
        }
        let mut ready = Vec::with_capacity(EVENTS);
        if events.recv_many(&mut ready, EVENTS).await == 0 {
            ready.push(Event::Failed(gone()));
        }
        let mut text = String::new();
        let open = ready.into_iter().all(|event| writer.write(event, &mut text));
        Some((Bytes::from(text), (writer, events, open)))
    });
    let body = stream::once(async { Bytes::from(first) }).chain(rest).map(Ok::<_, Infallible>);
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::from_stream(body)).into_response())
}

async fn collect(mut answer: Collector, identity: &Identity, mut events: UnboundedReceiver<Event>) -> Reply {
    while let Some(event) = events.recv().await {
        if let Some(whole) = answer.take(event, identity) {
            return Ok(Json(whole?).into_response());
        }
    }
    Err(refusal(&gone()))
}

fn gone() -> Failure {
    Failure::Engine("its thread ended".into())
}

fn model_object(app: &App) -> Value {
    json!({
        "id": app.serving.model,
        "object": "model",
        "created": 0,
        "owned_by": "toolstorm",
        "max_model_len": app.engine.limits().max_context,
    })
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model_object(&app)]}))
}

pub(super) async fn model(State(app): State<Arc<App>>, Path(model): Path<String>) -> Reply {
    if model == app.serving.model { Ok(Json(model_object(&app)).into_response()) } else { Err(unknown_model(&model)) }
}

pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, word) = match () {
        () if app.engine.is_draining() => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        () if !app.engine.is_alive() => (StatusCode::SERVICE_UNAVAILABLE, "failed"),
        () => (StatusCode::OK, "ok"),
    };
    let device = app.engine.snapshot().device;
    let body = json!({"status": word, "model": app.serving.model, "device": device, "config": app.configuration});
    (status, Json(body)).into_response()
}

pub(super) async fn stats(State(app): State<Arc<App>>) -> Response {
    let snapshot = app.engine.snapshot();
    let mut page = json!(snapshot);
    page["findings"] = findings::first(&snapshot.engine).into();
    Json(page).into_response()
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Reply {
    if !app.serving.metrics {
        return Err(Refusal::new(404, "invalid_request_error", "metrics_off", "metrics are switched off"));
    }
    let kind = [(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")];
    Ok((kind, app.engine.metrics().render()).into_response())
}

/// Of one session with `?session=`, else of all.
pub(super) async fn races(State(app): State<Arc<App>>, RawQuery(query): RawQuery) -> Reply {
    let session = match query.as_deref().filter(|query| !query.is_empty()) {
        None => None,
        Some(query) => {
            let number = query.strip_prefix("session=").and_then(|number| number.parse().ok());
            let message = format!("`{query}`: the one parameter is `session`, a whole number");
            Some(number.ok_or_else(|| Refusal::field("session", message))?)
        }
    };
    let message = "this device keeps no race log: only the virtual GPU can know who should have written a byte";
    let none = || Refusal::new(404, "invalid_request_error", "no_race_log", message);
    Ok(Json(app.engine.races(session).ok_or_else(none)?).into_response())
}

fn no_lockstep() -> Refusal {
    let message = "this server was not started with TOOLSTORM_LOCKSTEP";
    Refusal::new(404, "invalid_request_error", "lockstep_off", message)
}

pub(super) async fn lockstep(State(app): State<Arc<App>>) -> Reply {
    let lockstep = app.engine.snapshot().lockstep.ok_or_else(no_lockstep)?;
    Ok(Json(lockstep).into_response())
}

pub(super) async fn lockstep_begin(State(app): State<Arc<App>>, request: Request) -> Reply {
    let body = announcement(&app, request).await?;
    let sessions = number(&body, "sessions")?.ok_or_else(|| missing("sessions"))?;
    let concurrency = number(&body, "concurrency")?.unwrap_or(sessions);
    let ruling = app.engine.begin(sessions, concurrency).await;
    acknowledge(ruling)
}

pub(super) async fn lockstep_end(State(app): State<Arc<App>>, request: Request) -> Reply {
    let header = count(request.headers(), SESSION)?;
    let body = announcement(&app, request).await?;
    let ruling = match (number(&body, "session")?.or(header), number(&body, "from")?) {
        (Some(session), _) => app.engine.end(session).await,
        (None, Some(first)) => app.engine.end_from(first).await,
        (None, None) => return Err(missing("session")),
    };
    acknowledge(ruling)
}

async fn announcement(app: &App, request: Request) -> Result<Value, Refusal> {
    if !app.engine.is_lockstep() {
        return Err(no_lockstep());
    }
    let body = read(request.into_body(), app).await?;
    if body.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&body).map_err(|error| {
        Refusal::new(400, "invalid_request_error", "invalid_json", format!("the body is no valid JSON: {error}"))
    })
}

fn number(body: &Value, key: &'static str) -> Result<Option<u32>, Refusal> {
    let Some(value) = body.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
    let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
    number.map(Some).ok_or_else(|| Refusal::field(key, format!("`{key}` must be a whole number")))
}

fn missing(key: &'static str) -> Refusal {
    Refusal::field(key, format!("`{key}` is missing"))
}

fn acknowledge(ruling: Result<(), Failure>) -> Reply {
    ruling.map_err(|failure| refusal(&failure))?;
    Ok(Json(json!({"ok": true})).into_response())
}

pub(super) async fn not_found(uri: Uri) -> Refusal {
    let message = format!("there is nothing at `{}`", uri.path());
    Refusal::new(404, "invalid_request_error", "unknown_url", message)
}

pub(super) async fn wrong_method(uri: Uri) -> Refusal {
    let message = format!("`{}` does not answer this method", uri.path());
    Refusal::new(405, "invalid_request_error", "method_not_allowed", message)
}
