//! The hazards of a server's captured graphs, by this very binary's `hazards`: the harness imports no analyser.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde::Deserialize;
use tokio::process::Command;

use super::program;
use crate::error::{Error, Result};

/// How long the analysis of the captured graphs may take.
const WITHIN: Duration = Duration::from_mins(10);

/// What the analysis found.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Hazards {
    /// How many hazards.
    #[serde(rename = "hazards")]
    pub count: u64,
    /// The tensors whose early drop or missing event explains them.
    pub tensors: Vec<String>,
    /// Graphs that were captured and could not be read.
    pub missing: u64,
}

/// The hazards of the built-in engine under `env`.
pub async fn of_engine(env: &BTreeMap<String, String>) -> Result<Hazards> {
    let mut command = analysis()?;
    command.envs(env);
    report(command).await
}

/// The hazards of the graphs that a program exported to `folder`.
pub async fn of_captures(folder: &Path) -> Result<Hazards> {
    let mut command = analysis()?;
    command.arg("--capture").arg(folder);
    report(command).await
}

fn analysis() -> Result<Command> {
    let mut command = Command::new(program()?);
    command.args(["hazards", "--json", "--quiet"]);
    Ok(command)
}

async fn report(command: Command) -> Result<Hazards> {
    let stdout = output(command).await?;
    serde_json::from_slice(&stdout).map_err(|error| Error::usage(format!("the analysis says nothing: {error}")))
}

/// What the program prints; an exit code of 2 and above is an error with the program's own words.
async fn output(mut command: Command) -> Result<Vec<u8>> {
    let running = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = tokio::time::timeout(WITHIN, running)
        .await
        .map_err(|_| Error::usage(format!("the analysis took more than {} s", WITHIN.as_secs())))?
        .map_err(|error| Error::usage(format!("cannot start the analysis: {error}")))?;
    let failed = output.status.code().is_none_or(|code| code >= i32::from(crate::exit::USAGE));
    if failed && output.stdout.is_empty() {
        let words = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = words.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        return Err(Error::usage(lines.join("; ").trim_start_matches("error: ")));
    }
    Ok(output.stdout)
}

/// What makes the Python processes of a program export their captured graphs: modules on their path, and a folder.
#[derive(Debug)]
pub struct Exporter {
    modules: PathBuf,
    captures: PathBuf,
}

impl Exporter {
    /// Makes a program export to `captures`, a folder that is made where there is none. What an earlier program exported
    /// there is an error: the two could not be told apart.
    pub async fn install(captures: &Path) -> Result<Self> {
        let broken = |error| Error::usage(format!("cannot export graphs to {}: {error}", captures.display()));
        fs::create_dir_all(captures).map_err(broken)?;
        if fs::read_dir(captures).map_err(broken)?.next().is_some() {
            return Err(Error::usage(format!("the folder {} is not empty", captures.display()))
                .hint("captures of two programs cannot be told apart: name a new folder"));
        }
        let captures = fs::canonicalize(captures).map_err(broken)?;
        let modules = captures.join("modules");
        let mut command = Command::new(program()?);
        command.args(["hazards", "exporter", "--into"]).arg(&modules);
        output(command).await?;
        Ok(Self { modules, captures })
    }

    /// What the program's environment must say; `path` is the PYTHONPATH that it would have had.
    pub fn environment(&self, path: Option<&str>) -> [(&'static str, String); 2] {
        let ours = self.modules.display();
        let path = path.filter(|p| !p.is_empty()).map_or_else(|| ours.to_string(), |known| format!("{ours}:{known}"));
        [("PYTHONPATH", path), ("TOOLSTORM_CAPTURE_DIR", self.captures.display().to_string())]
    }
}
