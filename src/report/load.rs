//! Reads what a finished run left behind.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use super::summary::{CallRecord, SCHEMA, Summary};
use crate::{
    error::{Error, Result},
    scenario::Gate,
};

/// The folder of a result that is named by its folder or by a file in it.
fn folder(result: &Path) -> PathBuf {
    if result.is_dir() { result.to_owned() } else { result.parent().unwrap_or(Path::new(".")).to_owned() }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| {
        let failure = Error::usage(format!("cannot read {}: {error}", path.display()));
        if error.kind() != std::io::ErrorKind::NotFound {
            return failure;
        }
        let cut_off = path.with_file_name("journal.jsonl").exists();
        let hint = if cut_off {
            "the run was cut off: `toolstorm report` makes a summary of what its journal holds, --resume goes on with it"
        } else {
            "name the folder of a finished run: it holds summary.json"
        };
        failure.hint(hint)
    })
}

/// The summary of a result: its folder, or a summary.json by any name.
pub fn summary(result: &Path) -> Result<Summary> {
    let path = if result.is_dir() { result.join("summary.json") } else { result.to_owned() };
    let text = read(&path)?;
    let broken = |error| Error::usage(format!("{} is no summary: {error}", path.display()));
    let value: serde_json::Value = serde_json::from_str(&text).map_err(broken)?;
    match value.get("schema").and_then(serde_json::Value::as_str) {
        Some(SCHEMA) => serde_json::from_value(value).map_err(broken),
        other => {
            let found = other.map_or_else(|| "no schema".to_owned(), |name| format!("schema `{name}`"));
            Err(Error::usage(format!("{} has {found}, not `{SCHEMA}`", path.display())))
        }
    }
}

/// The judged calls of a result. A last line that was cut off by an interruption is left out.
pub fn calls(result: &Path) -> Result<Vec<CallRecord>> {
    let path = folder(result).join("calls.jsonl");
    let file = File::open(&path).map_err(|error| Error::usage(format!("cannot read {}: {error}", path.display())))?;
    let mut records = Vec::new();
    let mut lines = BufReader::new(file).lines().enumerate().peekable();
    while let Some((number, line)) = lines.next() {
        let line = line.map_err(|error| Error::usage(format!("cannot read {}: {error}", path.display())))?;
        match serde_json::from_str(&line) {
            Ok(record) => records.push(record),
            Err(_) if lines.peek().is_none() => {}
            Err(error) => return Err(Error::usage(format!("{}:{}: {error}", path.display(), number + 1))),
        }
    }
    Ok(records)
}

/// The gate that a run was planned with; the default one where the manifest is missing.
pub fn gate(result: &Path) -> Result<Gate> {
    let path = folder(result).join("manifest.json");
    if !path.exists() {
        return Ok(Gate::default());
    }
    let manifest: serde_json::Value = serde_json::from_str(&read(&path)?)
        .map_err(|error| Error::usage(format!("{} is no manifest: {error}", path.display())))?;
    match manifest.pointer("/plan/gate") {
        Some(gate) => serde_json::from_value(gate.clone())
            .map_err(|error| Error::usage(format!("{}: gate: {error}", path.display()))),
        None => Ok(Gate::default()),
    }
}
