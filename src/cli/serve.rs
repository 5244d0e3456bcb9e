//! `toolstorm serve`: the built-in engine as an OpenAI-compatible server.

use std::{
    fmt::Write,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use serde_json::{Map, Value, json};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use super::examples;
use crate::{
    engine::{
        cache::PAGE_TOKENS,
        config::{Limits, Serving},
        findings,
        gate::Gate,
        handle::Handle,
        lockstep::Lockstep,
        model::{Model, backend},
        selftest::{Load, dictate},
        server::Server,
        toggles::{Toggles, VARIABLES, Variable},
    },
    env,
    error::{Error, Result},
    exit,
    report::terminal::Console,
};

/// How often a server looks whether a probe found something.
const PROBED: Duration = Duration::from_secs(1);

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
    /// Requests that may wait for a place in the batch; the next one is answered with 429
    #[arg(long, default_value_t = 1024, value_name = "N")]
    queue: usize,
    /// Print every environment variable that is read, as Markdown, and serve nothing
    #[arg(long)]
    list_variables: bool,
    /// Dictate so many random turns to the model, compare byte for byte, and serve nothing
    #[arg(long, hide = true, value_name = "TURNS")]
    self_test: Option<u32>,
}

/// Serves until SIGTERM or SIGINT, then drains.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    if args.list_variables {
        console.say(variables_page().trim_end());
        return Ok(exit::PASS);
    }
    let mut toggles = Toggles::resolve(env::all())?;
    toggles.device = backend(toggles.device);
    if let Some(turns) = args.self_test {
        return self_test(&toggles, turns, console);
    }
    let limits = Limits::new(&toggles, args.queue);
    let gate = toggles.lockstep.map(|size| {
        let patience = Duration::from_secs(u64::from(toggles.lockstep_wait));
        Gate::new(Lockstep::new(size.sessions, size.concurrency), patience)
    });
    let serving = Serving::new(&toggles, &args.model);
    let configuration = configuration(&toggles, &limits, &serving);
    let pages = limits.pages;
    let engine = Handle::start(limits, gate, move || Model::new(&toggles, pages))?;
    let (probed, mut told) = (engine.clone(), Vec::new());
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
        tokio::select! {
            served = serve(server, signals) => served,
            () = tell_findings(&probed, &mut told, console) => Ok(()),
        }
    })?;
    let found = probed.snapshot().engine;
    tell_new(findings::first(&found), &mut told, console);
    tell_new(findings::tallies(&found), &mut told, console);
    Ok(exit::PASS)
}

/// Random dictated turns through the model as the toggles make it; passes when every byte came back.
fn self_test(toggles: &Toggles, turns: u32, console: Console) -> Result<u8> {
    let load = Load { rows: toggles.max_batch, context: toggles.max_context, turns };
    let pages = load.rows * load.context.div_ceil(PAGE_TOKENS);
    let mut model = Model::new(toggles, pages)?;
    let outcome = dictate(&mut model, load, toggles.seed.fork("self-test"))?;
    console.emit(
        &json!({"turns": outcome.turns, "calls": outcome.calls, "wrong": outcome.wrong, "tokens": outcome.tokens}),
    );
    console.say(format!(
        "{} of {} turns wrong ({} calls, {} tokens)",
        outcome.wrong, outcome.turns, outcome.calls, outcome.tokens
    ));
    if let Some((expected, answered)) = outcome.first {
        console.say(format!("first wrong turn: `{answered}` instead of `{expected}`"));
    }
    Ok(if outcome.wrong == 0 { exit::PASS } else { exit::FAIL })
}

/// What `/health` shows of the configuration: every toggle as it resolved, and what follows from them.
fn configuration(toggles: &Toggles, limits: &Limits, serving: &Serving) -> Value {
    let variables: Map<_, _> = toggles.resolved().map(|(name, value)| (name.to_owned(), value.into())).collect();
    json!({"variables": variables, "limits": limits, "serving": serving})
}

/// Examples, then every toggle.
pub(super) fn long_help() -> String {
    let mut text = format!("{}\n\nThe engine's toggles are environment variables:\n", examples::SERVE);
    for variable in VARIABLES {
        let default = if variable.default.is_empty() { "unset" } else { variable.default };
        let _ = write!(text, "\n  {} [{default}]\n      {}; takes {}", variable.name, variable.meaning, variable.takes);
    }
    text
}

/// `docs/ENVIRONMENT.md`.
fn variables_page() -> String {
    let mut page = "# Environment variables\n\nWritten by `toolstorm serve --list-variables`; a test compares.\n\n\
                    ## The engine's toggles\n\nRead once, when `toolstorm serve` starts. A value that its variable does not take, \
                    and a variable that starts\nwith `TOOLSTORM_` and is not here, are errors. `GET /health` shows what \
                    they resolved to.\n\n| variable | default | takes | meaning |\n|---|---|---|---|\n"
        .to_owned();
    for Variable { name, default, takes, meaning, .. } in VARIABLES {
        let default = if default.is_empty() { "unset" } else { default };
        let _ = writeln!(page, "| `{name}` | {default} | {takes} | {meaning} |");
    }
    page.push_str("\n## Outside the engine\n\n| variable | meaning |\n|---|---|\n");
    for env::Variable { name, meaning } in env::VARIABLES {
        let _ = writeln!(page, "| `{name}` | {meaning} |");
    }
    page
}

/// The one line on stdout, which tells whoever started the server where it is.
fn announce(console: Console, server: &Server, model: &str) {
    let url = format!("http://{}", server.address());
    let line = json!({"listening": url, "url": url, "model": model, "pid": std::process::id()});
    Console { json: true, ..console }.emit(&line);
}

/// Writes each probe's first finding to the log soon after it was made; never ends.
async fn tell_findings(engine: &Handle, told: &mut Vec<String>, console: Console) {
    loop {
        tokio::time::sleep(PROBED).await;
        tell_new(findings::first(&engine.snapshot().engine), told, console);
    }
}

fn tell_new(lines: Vec<String>, told: &mut Vec<String>, console: Console) {
    for line in lines {
        if !told.contains(&line) {
            console.note(&line);
            told.push(line);
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_variables_is_up_to_date() {
        let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/ENVIRONMENT.md")).unwrap();
        let cure = "run `toolstorm serve --list-variables > docs/ENVIRONMENT.md`";
        assert!(page == variables_page(), "docs/ENVIRONMENT.md is out of date: {cure}");
    }

    #[test]
    fn help_lists_every_toggle() {
        let help = long_help();
        assert!(VARIABLES.iter().all(|variable| help.contains(variable.name)));
    }
}
