//! What a bisection has spent, kept on disk: one line a probe, so that an interrupted search goes on where it stopped.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{Outcome, Probe, toggle::Switch};
use crate::error::{Error, Result};

/// Name and version of the format.
const SCHEMA: &str = "toolstorm-bisect-state/1";

/// The first line: what is searched. A search may only go on with the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    schema: String,
    /// SHA-256 of the plan that the probes vary.
    plan_sha256: String,
    switches: Vec<Switch>,
    sessions_per_probe: u64,
}

impl Header {
    /// What this search is about.
    pub fn new(plan_sha256: String, switches: Vec<Switch>, sessions_per_probe: u64) -> Self {
        Self { schema: SCHEMA.into(), plan_sha256, switches, sessions_per_probe }
    }
}

/// One probe and what it showed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The probe.
    pub probe: Probe,
    /// What it showed.
    pub outcome: Outcome,
}

/// The file of a search in progress.
#[derive(Debug)]
pub struct State {
    file: File,
    path: PathBuf,
}

impl State {
    /// Where the state of the search in the result folder `folder` lies.
    pub fn path(folder: &Path) -> PathBuf {
        folder.join("bisect.jsonl")
    }

    /// A new state file.
    pub fn create(folder: &Path, header: &Header) -> Result<Self> {
        let path = Self::path(folder);
        let file = File::options().create_new(true).append(true).open(&path).map_err(|error| failed(&path, &error))?;
        let mut state = Self { file, path };
        state.line(header)?;
        Ok(state)
    }

    /// The state file of an interrupted search, and its probes. A line cut off by a kill is left out and overwritten.
    pub fn open(folder: &Path, header: &Header) -> Result<(Self, Vec<Entry>)> {
        let path = Self::path(folder);
        let text = std::fs::read_to_string(&path).map_err(|error| failed(&path, &error))?;
        let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        let mut lines = whole.lines();
        let found: Option<Header> = lines.next().and_then(|line| serde_json::from_str(line).ok());
        if found.as_ref() != Some(header) {
            return Err(Error::usage(format!("{} belongs to another search", path.display()))
                .hint("resume with the file and the flags that began it"));
        }
        let entry = |(number, line): (usize, &str)| {
            serde_json::from_str(line)
                .map_err(|error| Error::usage(format!("{}:{}: {error}", path.display(), number + 2)))
        };
        let entries = lines.enumerate().map(entry).collect::<Result<Vec<Entry>>>()?;
        let file = File::options().append(true).open(&path).map_err(|error| failed(&path, &error))?;
        file.set_len(whole.len() as u64).map_err(|error| failed(&path, &error))?;
        Ok((Self { file, path }, entries))
    }

    /// Adds a probe.
    pub fn add(&mut self, entry: &Entry) -> Result<()> {
        self.line(entry)
    }

    fn line(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(value).map_err(|error| Error::usage(error.to_string()))?;
        line.push(b'\n');
        self.file.write_all(&line).and_then(|()| self.file.sync_data()).map_err(|error| failed(&self.path, &error))
    }
}

fn failed(path: &Path, error: &std::io::Error) -> Error {
    Error::usage(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Counts;

    #[test]
    fn a_state_survives_a_cut_line_and_refuses_another_search() {
        let folder = tempfile::tempdir().unwrap();
        let header = Header::new("a".into(), Vec::new(), 24);
        let entry = |n| Entry {
            probe: Probe { bad: vec![n], sessions: 24, known: 0 },
            outcome: Outcome::Judged(Counts::new(n as u64, 24)),
        };
        let mut state = State::create(folder.path(), &header).unwrap();
        state.add(&entry(1)).unwrap();
        state.file.write_all(b"{\"probe\":{\"ba").unwrap();
        let (mut state, entries) = State::open(folder.path(), &header).unwrap();
        assert_eq!(entries, [entry(1)]);
        state.add(&Entry { outcome: Outcome::Skipped("no start".into()), ..entry(2) }).unwrap();
        assert_eq!(State::open(folder.path(), &header).unwrap().1.len(), 2);
        assert!(State::open(folder.path(), &Header::new("b".into(), Vec::new(), 24)).is_err());
        assert!(State::create(folder.path(), &header).is_err());
    }
}
