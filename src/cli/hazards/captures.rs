//! Capture files, and the folders of them that programs leave behind.

use std::{collections::BTreeMap, fs, path::Path};

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

/// Reads files of one program, and folders of files; `-` is stdin.
pub(super) fn read<'a>(paths: impl Iterator<Item = &'a Path>) -> Result<Found> {
    let (folders, named): (Vec<&Path>, Vec<&Path>) = paths.partition(|path| path.is_dir());
    let mut found = Found { captures: files(&named)?, ..Found::default() };
    for path in &folders {
        let mut inside = folder(path)?;
        // Programs share no memory; their processes may be called alike.
        if folders.len() + named.len() > 1 {
            for capture in &mut inside.captures {
                let group = format!("{} {}", path.display(), capture.group);
                group.trim_end().clone_into(&mut capture.group);
            }
        }
        found.captures.extend(inside.captures);
        found.missing += inside.missing;
        found.warnings.extend(inside.warnings);
    }
    Ok(found)
}

/// Reads the files of one program in their order; each process has a pool of its own, and a name where there are several.
fn files(paths: &[impl AsRef<Path>]) -> Result<Vec<Capture>> {
    let mut pools: BTreeMap<String, torch::Pool> = BTreeMap::new();
    let mut captures = Vec::with_capacity(paths.len());
    for path in paths.iter().map(AsRef::as_ref) {
        let process = process(path);
        let mut capture = file(path, pools.entry(process.clone()).or_default())?;
        if capture.group.is_empty() && !process.is_empty() {
            capture.group = format!("process {}", process.trim_start_matches('0'));
        }
        captures.push(capture);
    }
    if captures.windows(2).all(|pair| pair[0].group == pair[1].group) {
        captures.iter_mut().for_each(|capture| capture.group.clear());
    }
    Ok(captures)
}

fn file(path: &Path, pool: &mut torch::Pool) -> Result<Capture> {
    let text =
        if path.as_os_str() == "-" { std::io::read_to_string(std::io::stdin()) } else { fs::read_to_string(path) };
    let text = text.map_err(|e| Error::usage(format!("cannot read capture {}: {e}", path.display())))?;
    pool.read(&text, &path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy())
}

/// Reads what the processes of one program exported to a folder.
fn folder(path: &Path) -> Result<Found> {
    let listing = fs::read_dir(path).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = listing.map_err(|e| Error::usage(format!("cannot list {}: {e}", path.display())))?;
    let (mut exported, mut failures) = (Vec::new(), Vec::new());
    for entry in entries {
        let file = entry.path();
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("json") => exported.push(file),
            // A process that ends while it writes leaves the beginning of a graph.
            Some("failed" | "partial") => failures.push(file),
            _ => {}
        }
    }
    let mut found = Found { missing: failures.len() as u64, ..Found::default() };
    failures.sort();
    if let Some(first) = failures.first() {
        found.warnings.push(format!("graphs that were not exported: {} ({})", found.missing, reason(first)));
    }
    if exported.is_empty() {
        return Err(nothing(path, found.warnings.pop()));
    }
    exported.sort_by_key(|file| turn(file));
    found.captures = files(&exported)?;
    Ok(found)
}

/// The process that a capture's file name begins with, as `sitecustomize` names files; empty where it does not.
fn process(file: &Path) -> String {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let number = name.split_once('-').map(|(number, _)| number).filter(|n| n.bytes().all(|b| b.is_ascii_digit()));
    number.unwrap_or_default().to_owned()
}

/// When a file was written among those of its process: `decode.json` comes first, `decode-10.json` after `decode-2.json`.
fn turn(file: &Path) -> (String, u64) {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let numbered = stem.rsplit_once('-').and_then(|(stem, number)| Some((stem.to_owned(), number.parse().ok()?)));
    numbered.unwrap_or_else(|| (stem.into_owned(), 1))
}

/// Why a graph was not exported.
fn reason(file: &Path) -> String {
    if file.extension().is_some_and(|extension| extension == "partial") {
        return format!("{} was not written to its end", file.display());
    }
    last_line(file)
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
