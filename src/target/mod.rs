//! Where the load goes: a URL, a command, or this very binary as a server.
//!
//! A [`Server`] is a running one with an address. Dropping it ends what was started, with its whole process group.

mod builtin;
mod command;
pub mod hazards;
mod process;
pub mod supervise;
mod url;

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    path::{Path, PathBuf},
};

pub use hazards::{Exporter, Hazards};
pub use process::Process;
use tokio::process::Command;

use crate::{
    drive::{Client, Endpoint, Secret},
    env,
    error::{Error, Result},
    scenario::{TargetKind, TargetSpec},
};

/// One launch of a server.
#[derive(Debug)]
pub struct Start<'a> {
    /// The target of the matrix.
    pub target: &'a TargetSpec,
    /// The arm's name.
    pub arm: &'a str,
    /// The arm's environment, launch seed and lockstep included.
    pub env: &'a BTreeMap<String, String>,
    /// The arm's further arguments.
    pub args: &'a [String],
    /// The arm's command.
    pub command: &'a [String],
    /// The arm's address.
    pub base_url: Option<&'a str>,
    /// Where the server's output goes.
    pub log: &'a Path,
    /// Where a command's captured graphs go, where they are wanted.
    pub captures: Option<&'a Path>,
}

/// A server that answers.
#[derive(Debug)]
#[must_use = "dropping a server ends it"]
pub struct Server {
    /// Where it answers.
    pub endpoint: Endpoint,
    /// What was started for it; nothing for a server that someone else runs.
    pub process: Option<Process>,
}

/// Starts what `start` asks for and waits until it answers.
pub async fn start(start: &Start<'_>) -> Result<Server> {
    match start.target.kind {
        TargetKind::Builtin => builtin::start(start).await,
        TargetKind::Url => url::start(start),
        TargetKind::Command => command::start(start).await,
    }
}

impl Server {
    /// Ends the server: politely first, then by force.
    pub async fn stop(self, grace: std::time::Duration) {
        if let Some(process) = self.process {
            process.stop(grace).await;
        }
    }
}

/// The binary that is running.
fn program() -> Result<PathBuf> {
    std::env::current_exe().map_err(|error| Error::usage(format!("cannot find the program that is running: {error}")))
}

/// `words` as a command under our supervisor, which ends its group when we are gone, also after a `kill -9`.
pub fn supervised<W: AsRef<OsStr>>(words: &[W]) -> Result<Command> {
    let mut command = Command::new(program()?);
    command.args(["supervise", "--"]).args(words);
    Ok(command)
}

/// The address in `text`, without `/v1` and without a final slash.
pub fn base_url(text: &str) -> Result<String> {
    let refuse = |why: &str| {
        Err(Error::usage(format!("`{text}` is no address of a server: {why}"))
            .hint("write it in full: http://127.0.0.1:8000"))
    };
    match reqwest::Url::parse(text) {
        Err(error) => refuse(&error.to_string()),
        Ok(url) if !matches!(url.scheme(), "http" | "https") => refuse("neither http nor https"),
        Ok(url) if url.query().is_some() || url.fragment().is_some() => refuse("it has a query"),
        Ok(_) => {
            let trimmed = text.trim_end_matches('/');
            Ok(trimmed.strip_suffix("/v1").unwrap_or(trimmed).to_owned())
        }
    }
}

/// The key in the variable that `target` names.
pub fn api_key(target: &TargetSpec) -> Result<Option<Secret>> {
    let Some(name) = &target.api_key_env else { return Ok(None) };
    match env::var(name) {
        Some(key) if !key.is_empty() => Ok(Some(Secret(key))),
        _ => Err(Error::usage(format!("the variable {name} is not set")).hint("it should hold the API key")),
    }
}

/// The model to ask for: the one that `target` names, else the server's first one.
pub async fn model(target: &TargetSpec, client: &Client) -> Result<String> {
    if let Some(model) = &target.model {
        return Ok(model.clone());
    }
    let failed = |why: String| Error::usage(format!("asking the server for its models under /v1/models: {why}"));
    let text = client
        .text("/v1/models")
        .await
        .map_err(|why| failed(why).hint("check that it runs at this address, or name the model with --model"))?;
    let models: serde_json::Value = serde_json::from_str(&text)
        .map_err(|error| failed(format!("no JSON: {error}")).hint("name the model with --model"))?;
    let listed = models["data"][0]["id"].as_str().map(str::to_owned);
    listed.ok_or_else(|| Error::usage("the server lists no model under /v1/models").hint("give --model"))
}
