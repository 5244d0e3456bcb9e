//! `toolstorm serve`: the built-in engine as an OpenAI-compatible server.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use serde_json::json;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::{
    engine::{
        config::{Limits, Serving},
        gate::Gate,
        handle::Handle,
        host::HostModel,
        lockstep::Lockstep,
        server::Server,
    },
    env,
    error::{Error, Result},
    exit,
    report::terminal::Console,
};

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Name under which the model is served
    #[arg(long, default_value = "toolstorm-copy", value_name = "NAME")]
    model: String,
}

/// Serves until SIGTERM or SIGINT, then drains.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let limits = Limits::default();
    let gate = announced()?.map(|lockstep| Gate::new(lockstep, Duration::from_secs(60)));
    let configuration = json!({"limits": limits});
    let pages = limits.pages;
    let engine = Handle::start(limits, gate, move || Ok(HostModel::new(pages)))?;
    let serving = Serving { model: args.model.clone(), ..Serving::default() };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(|error| Error::usage(format!("cannot start the server's runtime: {error}")))?;
    let address = SocketAddr::new(args.host, args.port);
    runtime.block_on(async {
        let server = Server::bind(address, engine, serving, configuration).await?;
        let signals = signals()?;
        announce(console, &server, &args.model);
        serve(server, signals).await
    })?;
    Ok(exit::PASS)
}

fn announced() -> Result<Option<Lockstep>> {
    let Some(text) = env::var("TOOLSTORM_LOCKSTEP") else { return Ok(None) };
    let (sessions, concurrency) = text.split_once(':').unwrap_or((&text, &text));
    match (sessions.parse(), concurrency.parse()) {
        (Ok(sessions), Ok(concurrency)) if sessions > 0 && concurrency > 0 => {
            Ok(Some(Lockstep::new(sessions, concurrency)))
        }
        _ => Err(Error::usage(format!("TOOLSTORM_LOCKSTEP=`{text}` is no number of sessions"))
            .hint("write the number of sessions, or sessions:concurrency, as in 80:64")),
    }
}

/// The one line on stdout, which tells whoever started the server where it is.
fn announce(console: Console, server: &Server, model: &str) {
    let url = format!("http://{}", server.address());
    let line = json!({"listening": url, "url": url, "model": model, "pid": std::process::id()});
    Console { json: true, ..console }.emit(&line);
}

/// The first signal drains, the second one ends.
async fn serve(server: Server, signals: watch::Receiver<u32>) -> Result<()> {
    let (mut once, mut twice) = (signals.clone(), signals);
    tokio::select! {
        served = server.run(async move { let _ = once.wait_for(|signals| *signals >= 1).await; }) => served,
        _ = twice.wait_for(|signals| *signals >= 2) => Err(Error::incomplete("stopped before running requests had ended")),
    }
}

/// Counts SIGTERM and SIGINT.
fn signals() -> Result<watch::Receiver<u32>> {
    let listen = |kind| signal(kind).map_err(|error| Error::usage(format!("cannot listen for signals: {error}")));
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let (count, counted) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            count.send_modify(|signals| *signals += 1);
        }
    });
    Ok(counted)
}
