//! Any server that a command starts.

use std::{net::SocketAddr, path::Path, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    process::Command,
};

use super::{Exporter, Process, Server, Start, api_key, base_url, process, supervised};
use crate::{
    drive::{Endpoint, Secret},
    env,
    error::{Error, Result},
};

/// Between two looks at a server that is starting.
const POLL: Duration = Duration::from_millis(200);

/// One question to a server that is starting.
const PROBE: Duration = Duration::from_secs(5);

pub(super) async fn start(start: &Start<'_>) -> Result<Server> {
    let address = address(start).await?;
    let words = Words { port: address.port, model: start.target.model.as_deref(), arm: start.arm };
    let mut command = words.command(start)?;
    if let Some(captures) = start.captures {
        let known = start.env.get("PYTHONPATH").map(|path| words.fill(path)).transpose()?;
        let path = known.or_else(|| env::var("PYTHONPATH"));
        command.envs(Exporter::install(captures).await?.environment(path.as_deref()));
    }
    let mut process = Process::spawn(command, process::log(start.log)?)?;
    let endpoint = Endpoint { base_url: address.url, api_key: api_key(start.target)? };
    let limit = start.target.ready.timeout;
    let ready = tokio::time::timeout(limit.0, await_ready(start, &endpoint, &mut process)).await;
    match ready {
        Ok(Ok(())) => Ok(Server { endpoint, process: Some(process) }),
        Ok(Err(error)) => Err(with_log(error, start.log)),
        Err(_) => Err(with_log(failure(start, &format!("was not ready within {limit}")), start.log)),
    }
}

/// Where the server will answer.
struct Address {
    url: String,
    port: u16,
}

/// The address that the file gives, else a free port of this machine. Refuses a port that already answers: the load
/// would go to a server that nobody meant.
async fn address(start: &Start<'_>) -> Result<Address> {
    let Some(given) = start.base_url.or(start.target.base_url.as_deref()) else {
        let asks = |text: &String| text.contains("{port}");
        if !start.command.iter().chain(start.args).chain(start.env.values()).any(asks) {
            return Err(Error::usage(format!("the command of arm `{}` does not say where it listens", start.arm))
                .hint("put {port} into its arguments, or give `base_url`"));
        }
        let port = free_port().await?;
        return Ok(Address { url: format!("http://127.0.0.1:{port}"), port });
    };
    let url = base_url(given)?;
    let parsed =
        reqwest::Url::parse(&url).map_err(|error| Error::usage(format!("`{given}` is no address: {error}")))?;
    let port = parsed.port_or_known_default().unwrap_or(80);
    let host = parsed.host_str().unwrap_or("127.0.0.1").to_owned();
    let answers = tokio::time::timeout(PROBE, TcpStream::connect((host.as_str(), port))).await;
    if matches!(answers, Ok(Ok(_))) {
        return Err(Error::usage(format!("{host}:{port} already answers, so arm `{}` cannot listen there", start.arm))
            .hint("stop the server that runs there, or leave `base_url` out and use {port}"));
    }
    Ok(Address { url, port })
}

async fn free_port() -> Result<u16> {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let port = TcpListener::bind(any).await.and_then(|listener| listener.local_addr()).map(|address| address.port());
    port.map_err(|error| Error::usage(format!("no free port: {error}")))
}

/// What stands for the placeholders.
struct Words<'a> {
    port: u16,
    model: Option<&'a str>,
    arm: &'a str,
}

impl Words<'_> {
    fn fill(&self, text: &str) -> Result<String> {
        let mut filled = text.replace("{port}", &self.port.to_string()).replace("{arm}", self.arm);
        if text.contains("{model}") {
            let model = self.model.ok_or_else(|| {
                Error::usage(format!("the command of arm `{}` asks for {{model}}", self.arm))
                    .hint("give `model` in [target], or --model")
            })?;
            filled = filled.replace("{model}", model);
        }
        Ok(filled)
    }

    /// The arm's command under our supervisor, which ends the group when we are gone.
    fn command(&self, start: &Start<'_>) -> Result<Command> {
        let words = start.command.iter().chain(start.args).map(|word| self.fill(word)).collect::<Result<Vec<_>>>()?;
        let mut command = supervised(&words)?;
        for (name, value) in start.env {
            command.env(name, self.fill(value)?);
        }
        command.stdout(process::log(start.log)?);
        Ok(command)
    }
}

async fn await_ready(start: &Start<'_>, endpoint: &Endpoint, process: &mut Process) -> Result<()> {
    let http = reqwest::Client::builder()
        .connect_timeout(PROBE)
        .build()
        .map_err(|error| Error::usage(format!("cannot make requests: {error}")))?;
    let url = format!("{}/{}", endpoint.base_url, start.target.ready.path.trim_start_matches('/'));
    loop {
        if let Ok(Some(status)) = process.child.try_wait() {
            return Err(failure(start, &format!("ended before it was ready ({status})")));
        }
        let answer = authorised(http.get(&url).timeout(PROBE), endpoint.api_key.as_ref()).send().await;
        if answer.is_ok_and(|answer| answer.status().is_success()) {
            return warm_up(start, endpoint, &http).await;
        }
        tokio::time::sleep(POLL).await;
    }
}

/// One short answer before the load: the first request of many servers compiles, captures or loads.
async fn warm_up(start: &Start<'_>, endpoint: &Endpoint, http: &reqwest::Client) -> Result<()> {
    let key = endpoint.api_key.as_ref();
    let base = &endpoint.base_url;
    let model = match &start.target.model {
        Some(model) => model.clone(),
        None => first_model(authorised(http.get(format!("{base}/v1/models")), key)).await.ok_or_else(|| {
            failure(start, "lists no model under /v1/models").hint("give `model` in [target], or --model")
        })?,
    };
    let mut body = serde_json::json!({
        "model": model,
        "messages": [{ "role": "user", "content": "Say yes." }],
        "max_tokens": 1,
    });
    if let Some(members) = body.as_object_mut() {
        members.extend(start.target.extra_body.clone());
    }
    let request = authorised(http.post(format!("{base}/v1/chat/completions")).json(&body), key);
    let answer = request.send().await.map_err(|error| failure(start, &format!("failed its first request: {error}")))?;
    let status = answer.status();
    if status.is_success() {
        return Ok(());
    }
    let text: String = answer.text().await.unwrap_or_default().chars().take(300).collect();
    Err(failure(start, &format!("answered its first request with {status}: {text}")))
}

async fn first_model(request: reqwest::RequestBuilder) -> Option<String> {
    let text = request.timeout(PROBE).send().await.ok()?.text().await.ok()?;
    let models: serde_json::Value = serde_json::from_str(&text).ok()?;
    models["data"][0]["id"].as_str().map(str::to_owned)
}

fn authorised(request: reqwest::RequestBuilder, key: Option<&Secret>) -> reqwest::RequestBuilder {
    match key {
        Some(key) => request.bearer_auth(&key.0),
        None => request,
    }
}

fn failure(start: &Start<'_>, what: &str) -> Error {
    Error::usage(format!("the server of arm `{}` {what}", start.arm))
}

fn with_log(error: Error, log: &Path) -> Error {
    if error.cure().is_some() {
        return error;
    }
    match process::tail(log) {
        tail if tail.is_empty() => error.hint(format!("its log {} is empty", log.display())),
        tail => error.hint(format!("the end of {}:\n{tail}", log.display())),
    }
}
