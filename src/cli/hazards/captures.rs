//! Capture files, and the folders of them that programs leave behind.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    hazard::{Capture, torch},
};

/// What was read, and what could not be.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The graphs.
    pub captures: Vec<Capture>,
    /// Graphs that a program captured and could not export.
    pub missing: u64,
    /// What a reader should know.
    pub warnings: Vec<String>,
}

/// Reads files of one pool, and folders of files; `-` is stdin.
pub(super) fn read<'a>(paths: impl Iterator<Item = &'a Path>) -> Result<Found> {
    let (mut found, mut pool) = (Found::default(), torch::Pool::default());
    let paths: Vec<&Path> = paths.collect();
    for &path in &paths {
        if path.is_dir() {
            let mut inside = folder(path)?;
            // Programs share no memory; their processes may be called alike.
            if paths.len() > 1 {
                for capture in &mut inside.captures {
                    let group = format!("{} {}", path.display(), capture.group);
                    group.trim_end().clone_into(&mut capture.group);
                }
            }
            found.captures.extend(inside.captures);
            found.missing += inside.missing;
            found.warnings.extend(inside.warnings);
        } else {
            found.captures.push(file(path, &mut pool)?);
        }
    }
    Ok(found)
}

fn file(path: &Path, pool: &mut torch::Pool) -> Result<Capture> {
    let text =
        if path.as_os_str() == "-" { std::io::read_to_string(std::io::stdin()) } else { fs::read_to_string(path) };
    let text = text.map_err(|e| Error::usage(format!("cannot read capture {}: {e}", path.display())))?;
    pool.read(&text, &path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy())
}

/// Reads what the processes of one program exported to a folder; each process has a pool of its own.
fn folder(path: &Path) -> Result<Found> {
    let listing = fs::read_dir(path).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = listing.map_err(|e| Error::usage(format!("cannot list {}: {e}", path.display())))?;
    let mut processes: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    let mut failures = Vec::new();
    for entry in entries {
        let file = entry.path();
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("json") => processes.entry(process(&file)).or_default().push(file),
            Some("failed") => failures.push(file),
            _ => {}
        }
    }
    let mut found = Found { missing: failures.len() as u64, ..Found::default() };
    failures.sort();
    if let Some(first) = failures.first() {
        found.warnings.push(format!("graphs that were not exported: {} ({})", found.missing, last_line(first)));
    }
    if processes.is_empty() {
        return Err(nothing(path, found.warnings.pop()));
    }
    let several = processes.len() > 1;
    for (process, mut files) in processes {
        files.sort();
        let mut pool = torch::Pool::default();
        for path in files {
            let mut capture = file(&path, &mut pool)?;
            if !several {
                capture.group = String::new();
            } else if capture.group.is_empty() {
                capture.group = format!("process {}", process.trim_start_matches('0'));
            }
            found.captures.push(capture);
        }
    }
    Ok(found)
}

/// The process that a capture's file name begins with.
fn process(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.split('-').next().unwrap_or_default().to_owned()
}

/// The line of a Python traceback that says what happened.
fn last_line(file: &Path) -> String {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => return format!("cannot read {}: {error}", file.display()),
    };
    text.trim_end().lines().next_back().unwrap_or("no reason is given").trim().to_owned()
}

/// Why a folder holds no capture, from how far the program's processes came.
fn nothing(folder: &Path, failure: Option<String>) -> Error {
    let came = |marker: &str| folder.join(marker).exists();
    let message = format!("no captured CUDA graph in {}", folder.display());
    if let Some(failure) = failure {
        let import = ["cuda", "ImportError", "ModuleNotFound"].iter().any(|word| failure.contains(word));
        return Error::usage(format!("{message}: {failure}")).hint(if import {
            "the exporter needs cuda-bindings (`pip install cuda-bindings`) in the program's environment"
        } else {
            "the reason is in the program's output, and in the .failed files of that folder (--captures-dir keeps it)"
        });
    }
    Error::usage(message).hint(if came("torch-imported") {
        "the program imported torch and captured no graph: is its graph capture on, and was it ready?"
    } else if came("python-started") {
        "the program started Python and never imported torch.cuda: is it a PyTorch program, and is torch installed?"
    } else {
        "no Python process read the exporter: the program must run Python without -I, -E and -S, and pass PYTHONPATH on"
    })
}
