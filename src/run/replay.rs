//! Evidence read back: the recorded requests of a session, to be judged or sent again.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;
use serde_json::Value;

use super::Plan;
use crate::{
    drive::{Common, Conversation, Reply, Turn},
    error::{Error, Result},
    scenario::{TargetKind, nonce},
    validate::{Canaries, Ending, Verdict, parity::Form},
};

/// One recorded exchange.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// What `verdict.json` says.
    pub about: About,
    /// The request's body.
    pub request: Vec<u8>,
    /// The response's body.
    pub response: Vec<u8>,
    /// What the server's race log had of the session, where it has one.
    pub races: Option<Value>,
}

/// The members of `verdict.json` that a replay needs.
#[derive(Debug, Clone, Deserialize)]
pub struct About {
    /// The arm.
    pub arm: String,
    /// Number of the launch.
    pub launch: u32,
    /// Number of the session.
    pub session: u64,
    /// Number of the round.
    pub round: u32,
    /// The verdict then.
    pub verdict: Verdict,
    /// Whether the session had been corrupted before.
    pub after_corruption: bool,
    /// Whether a stream was asked for.
    pub stream: bool,
    /// HTTP status.
    pub http_status: u16,
    /// The `content-type` header.
    pub content_type: Option<String>,
    /// How the response ended.
    pub ending: String,
    /// The form, where the turn was asked again in another one.
    #[serde(default)]
    pub parity: Option<Form>,
    /// The calls as they came.
    #[serde(default)]
    calls: Value,
    /// The text beside them.
    #[serde(default)]
    content: Value,
    /// The finish reason.
    #[serde(default)]
    finish_reason: Value,
}

impl About {
    /// Whether both responses hold the same bytes; how they were cut into chunks, and when they came, aside.
    pub fn same_answer(&self, other: &Self) -> bool {
        (&self.calls, &self.content, &self.finish_reason) == (&other.calls, &other.content, &other.finish_reason)
    }
}

/// The evidence folder that `id` names: a path, or a name under any result in `results`.
pub fn find(id: &str, results: &Path) -> Result<PathBuf> {
    let path = PathBuf::from(id);
    if id.is_empty() {
        return Err(Error::usage("the evidence has an empty name"));
    }
    if path.is_dir() {
        return Ok(path);
    }
    let mut found: Vec<_> = std::fs::read_dir(results)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("evidence").join(id))
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    // Result folders begin with their time: the newest comes last.
    found.pop().ok_or_else(|| {
        Error::usage(format!("no evidence is called `{id}`")).hint(format!(
            "give a folder below a result's evidence/, or a name that some result in {} has",
            results.display()
        ))
    })
}

/// Where a replay token was printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Printed {
    /// In the evidence of a session.
    Evidence(PathBuf),
    /// In the log of a server: the result folder and the log's name.
    Log(PathBuf, String),
}

/// Where the results in `results` name the replay token `token`, the newest of them.
pub fn find_token(token: &str, results: &Path) -> Result<Printed> {
    let entries = |path: &Path| -> Vec<PathBuf> {
        let mut paths: Vec<_> =
            std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let holds = |path: &Path| std::fs::read_to_string(path).is_ok_and(|text| text.contains(token));
    let named = |path: &Path, prefix: &str, suffix: &str| {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with(prefix) && name.ends_with(suffix))
    };
    for result in entries(results).iter().rev() {
        for session in entries(&result.join("evidence")) {
            if entries(&session).iter().any(|file| named(file, "round-", "-races.json") && holds(file)) {
                return Ok(Printed::Evidence(session));
            }
        }
        let log = entries(result).into_iter().find(|file| named(file, "server-", ".log") && holds(file));
        if let Some(name) = log.as_ref().and_then(|log| log.file_name()?.to_str()) {
            return Ok(Printed::Log(result.clone(), name.to_owned()));
        }
    }
    Err(Error::usage(format!("no result in {} names the token {token}", results.display())).hint(
        "a token says which interleaving a launch took, not what it ran on: give --output-dir, the folder that holds the result \
         which printed it",
    ))
}

/// The recorded exchanges in an evidence folder, in order.
pub fn read(folder: &Path) -> Result<Vec<Recorded>> {
    let failed = |path: &Path, error: &dyn std::fmt::Display| Error::usage(format!("{}: {error}", path.display()));
    let entries = std::fs::read_dir(folder).map_err(|error| failed(folder, &error))?;
    let mut stems: Vec<_> = entries
        .flatten()
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix("-verdict.json")?.to_owned()))
        .collect();
    stems.sort();
    let load = |name: String| {
        let path = folder.join(name);
        std::fs::read(&path).map_err(|error| failed(&path, &error))
    };
    let one = |stem: &String| {
        let about = load(format!("{stem}-verdict.json"))?;
        let path = folder.join(format!("{stem}-races.json"));
        let races = match std::fs::read(&path) {
            Ok(races) => Some(serde_json::from_slice(&races).map_err(|error| failed(&path, &error))?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(&path, &error)),
        };
        Ok(Recorded {
            about: serde_json::from_slice(&about).map_err(|error| failed(folder, &error))?,
            request: load(format!("{stem}-request.json"))?,
            response: load(format!("{stem}-response.bin"))?,
            races,
        })
    };
    let recorded: Vec<_> = stems.iter().map(one).collect::<Result<_>>()?;
    if recorded.is_empty() {
        return Err(Error::usage(format!("{} holds no recorded exchange", folder.display())));
    }
    Ok(recorded)
}

impl Recorded {
    /// The turn as it was sent under `plan`.
    pub fn turn(&self, plan: &Plan) -> Result<Turn> {
        let seed = plan.workload_seed();
        let session = plan.scenario.session(seed, self.about.session)?;
        let canaries = Canaries::new();
        let arm = plan.arms.iter().find(|arm| arm.name == self.about.arm);
        for other in arm.iter().flat_map(|arm| plan.sessions(arm)) {
            canaries.add(&nonce(seed, other));
        }
        let common = Common {
            model: String::new(),
            extra_body: serde_json::Map::new(),
            canaries: Arc::new(canaries),
            exact: plan.target.kind == TargetKind::Builtin,
        };
        Conversation::new(session, Arc::new(plan.scenario.clone()), Arc::new(common))
            .recorded(self.about.round, self.about.stream, self.request.clone())
            .ok_or_else(|| Error::usage(format!("session {} has no round {}", self.about.session, self.about.round)))
    }

    /// The response as it came.
    pub fn reply(&self) -> Reply {
        let ending = match self.about.ending.as_str() {
            "reset" => Ending::Reset,
            "stall" => Ending::Stall,
            "noresponse" => Ending::NoResponse,
            _ => Ending::Eof,
        };
        Reply {
            status: self.about.http_status,
            content_type: self.about.content_type.clone(),
            body: self.response.clone(),
            ending,
            ..Reply::default()
        }
    }
}
