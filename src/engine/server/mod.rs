//! The OpenAI-compatible server: listener, routes, shutdown.
//!
//! Every answer that is no success is an error object as the OpenAI API has it. A request is read with a bound on its
//! size and its time, checked, and handed to the worker; what comes back is written as it comes. When a client goes away
//! its connection drops the receiver of its events, which the worker sees before its next step.

pub mod failure;
pub mod openai;
mod routes;
pub mod stream;

use std::{
    future::{Future, IntoFuture},
    net::SocketAddr,
    sync::{Arc, atomic::AtomicU64},
};

use axum::{
    Router,
    routing::{get, post},
    serve::ListenerExt,
};
use serde_json::Value;
use tokio::{net::TcpListener, sync::oneshot, time::sleep};

use super::{config::Serving, handle::Handle};
use crate::{
    clock::Clock,
    error::{Error, Result},
};

/// What the routes share.
#[derive(Debug)]
struct App {
    engine: Handle,
    serving: Serving,
    /// The resolved configuration, for `/health`.
    configuration: Value,
    requests: AtomicU64,
    clock: Clock,
}

/// A server that has its port and does not answer yet.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    app: Arc<App>,
}

impl Server {
    /// Takes the port; `configuration` is what `/health` shows.
    pub async fn bind(address: SocketAddr, engine: Handle, serving: Serving, configuration: Value) -> Result<Self> {
        let refused = |error| {
            Error::usage(format!("cannot listen on {address}: {error}"))
                .hint("choose another one with --port; 0 lets the system choose")
        };
        let listener = TcpListener::bind(address).await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let app = App { engine, serving, configuration, requests: AtomicU64::new(0), clock: Clock::start() };
        Ok(Self { listener, address, app: Arc::new(app) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `shutdown` is there; then takes nothing new, finishes what runs and returns, though not later than
    /// the configuration allows.
    pub async fn run(self, shutdown: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        let app = Arc::clone(&self.app);
        let (started, draining) = oneshot::channel();
        let drain = async move {
            shutdown.await;
            app.engine.drain();
            let _ = started.send(());
        };
        let patience = self.app.serving.drain_patience;
        let expired = async move {
            let _ = draining.await;
            sleep(patience).await;
        };
        // Without this the last event of a step waits for the client's acknowledgement of the one before.
        let listener = self.listener.tap_io(|connection| {
            let _ = connection.set_nodelay(true);
        });
        let serve = axum::serve(listener, router(self.app)).with_graceful_shutdown(drain);
        tokio::select! {
            served = serve.into_future() => served.map_err(|error| Error::incomplete(format!("the server failed: {error}"))),
            () = expired => {
                let message = format!("requests were still running {} s after the shutdown began", patience.as_secs_f64());
                Err(Error::incomplete(message))
            }
        }
    }
}

fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(routes::chat))
        .route("/v1/models", get(routes::models))
        .route("/v1/models/{model}", get(routes::model))
        .route("/health", get(routes::health))
        .route("/stats", get(routes::stats))
        .route("/metrics", get(routes::metrics))
        .route("/races", get(routes::races))
        .route("/lockstep", get(routes::lockstep))
        .route("/lockstep/begin", post(routes::lockstep_begin))
        .route("/lockstep/end", post(routes::lockstep_end))
        .fallback(routes::not_found)
        .method_not_allowed_fallback(routes::wrong_method)
        .with_state(app)
}
