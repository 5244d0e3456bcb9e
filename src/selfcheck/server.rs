//! The server: one route, every answer by script.

use std::{convert::Infallible, io, sync::Arc};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::Response as Answer,
    routing::{get, post},
};
use futures::{StreamExt, stream};
use tokio::net::TcpListener;

use super::{End, Mix, Response, Script};
use crate::seed::Seed;

/// Plays the scripts of `seed` on `listener` until the task is dropped.
pub async fn serve(listener: TcpListener, seed: Seed, mix: Mix) -> io::Result<Infallible> {
    let router = Router::new()
        .route("/health", get(|| async { "ok" }))
        .route("/v1/chat/completions", post(play))
        .with_state(Arc::new((seed, mix)));
    axum::serve(listener, router).await?;
    Err(io::Error::other("the server ended"))
}

async fn play(State(state): State<Arc<(Seed, Mix)>>, headers: HeaderMap, _request: Bytes) -> Answer {
    let number = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()?.parse().ok());
    let (Some(session), Some(round)) = (number("x-toolstorm-session"), number("x-toolstorm-round")) else {
        let mut answer = Answer::new(Body::from("the session and round headers are missing"));
        *answer.status_mut() = StatusCode::BAD_REQUEST;
        return answer;
    };
    send(Script::new(state.0, session, round, state.1).response)
}

/// Writes each piece on its own, so that the client's reads end anywhere.
fn send(response: Response) -> Answer {
    let pieces = stream::iter(response.pieces).then(|piece| async {
        tokio::task::yield_now().await;
        Ok::<_, io::Error>(Bytes::from(piece))
    });
    let body = match response.end {
        End::Clean => Body::from_stream(pieces),
        End::Stall => Body::from_stream(pieces.chain(stream::pending())),
        End::Reset => Body::from_stream(pieces.chain(stream::iter([Err(io::ErrorKind::ConnectionReset.into())]))),
    };
    let mut answer = Answer::new(body);
    *answer.status_mut() = StatusCode::from_u16(response.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    answer.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(response.content_type));
    answer
}
