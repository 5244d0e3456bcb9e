//! The journal: one event a line, appended and handed to the operating system before anything else happens, so that
//! what was judged survives a kill.
//!
//! The first line names format and version. A reader accepts its own version and older ones; new kinds of events and new
//! members need a new version, since an unknown one cannot be folded. A last line without its end is the trace of a
//! kill and is left out.

use std::{
    fs::{File, TryLockError},
    io::{BufRead, BufReader, ErrorKind, Write},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{Consumer, RunEvent};
use crate::error::{Error, Result};

/// The version that is written.
pub const VERSION: u32 = 2;

/// The last round that a journal may name: no scenario has more rounds, and reports have a row for each.
const LAST_ROUND: u32 = 1000;

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    journal: String,
    version: u32,
}

/// Appends events to a journal.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: PathBuf,
}

impl Journal {
    /// A new journal at `path`.
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::options().create_new(true).append(true).open(path).map_err(|error| failed(path, &error))?;
        lock(&file, path)?;
        let mut journal = Self { file, path: path.to_owned() };
        journal.line(&Header { journal: "toolstorm".into(), version: VERSION })?;
        Ok(journal)
    }

    /// The journal at `path`, to go on with. A torn last line is ended first.
    pub fn append(path: &Path) -> Result<Self> {
        let file = File::options().append(true).open(path).map_err(|error| failed(path, &error))?;
        lock(&file, path)?;
        let torn = std::fs::read(path).map_err(|error| failed(path, &error))?.last().is_some_and(|byte| *byte != b'\n');
        let mut journal = Self { file, path: path.to_owned() };
        if torn {
            journal.file.write_all(b"\n").map_err(|error| failed(path, &error))?;
        }
        Ok(journal)
    }

    fn line(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(value).map_err(|error| Error::usage(error.to_string()))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(|error| failed(&self.path, &error))
    }
}

impl Consumer for Journal {
    fn consume(&mut self, event: &RunEvent) -> Result<()> {
        self.line(event)
    }
}

/// All events of the journal at `path`.
pub fn read(path: &Path) -> Result<Vec<RunEvent>> {
    let file = File::open(path).map_err(|error| failed(path, &error))?;
    let mut lines = BufReader::new(file).split(b'\n').enumerate();
    let broken = |line: usize, why: &str| Error::usage(format!("{}:{}: {why}", path.display(), line + 1));
    let Some((_, Ok(first))) = lines.next() else { return Err(broken(0, "the journal is empty")) };
    let header: Header = serde_json::from_slice(&first).map_err(|_| broken(0, "this is no journal"))?;
    if header.version > VERSION {
        let hint = "read it with the version that wrote it, or a later one";
        return Err(broken(0, &format!("version {} is newer than {VERSION}", header.version)).hint(hint));
    }
    let mut events: Vec<RunEvent> = Vec::new();
    let mut torn = None;
    for (number, line) in lines {
        let line = line.map_err(|error| failed(path, &error))?;
        if line.is_empty() {
            continue;
        }
        match serde_json::from_slice(&line) {
            // Only a kill tears a line: it is the last one, or a resumed run begins right after it.
            Ok(event @ RunEvent::RunStarted { .. }) => {
                torn = None;
                events.push(event);
            }
            Ok(event) if torn.is_none() => {
                if round(&event) > LAST_ROUND {
                    return Err(broken(number, &format!("a round above {LAST_ROUND}")));
                }
                events.push(event);
            }
            Err(error) if torn.is_none() => torn = Some((number, error)),
            _ => break,
        }
    }
    match torn {
        Some((number, error)) if !is_last(path, number)? => Err(broken(number, &error.to_string())),
        _ => Ok(events),
    }
}

/// The round that `event` names; 0 where it names none.
fn round(event: &RunEvent) -> u32 {
    match event {
        RunEvent::Answered(answer) => answer.calls.iter().map(|call| call.round).fold(answer.round, u32::max),
        RunEvent::Compared { round, .. } => *round,
        RunEvent::SessionEnded { rounds, .. } => *rounds,
        _ => 0,
    }
}

/// Keeps other processes off the journal as long as `file` is open.
fn lock(file: &File, path: &Path) -> Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(Error::usage(format!("{}: another run writes to it", path.display()))
            .hint("wait until it has ended, or stop it with Ctrl-C")),
        // Where a file system knows no locks, a run must still be possible.
        Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => Err(failed(path, &error)),
    }
}

/// Whether no line follows the one numbered `number`.
fn is_last(path: &Path, number: usize) -> Result<bool> {
    let text = std::fs::read(path).map_err(|error| failed(path, &error))?;
    Ok(text.split(|byte| *byte == b'\n').skip(number + 1).all(<[u8]>::is_empty))
}

fn failed(path: &Path, error: &std::io::Error) -> Error {
    Error::usage(format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(id: &str) -> RunEvent {
        RunEvent::RunStarted { id: id.into(), plan_sha256: "x".into(), started_at: "now".into(), selfcheck: None }
    }

    fn ended() -> RunEvent {
        RunEvent::RunEnded { interrupted: true, wall_ms: 1.0 }
    }

    #[test]
    fn what_is_written_reads_back_and_a_torn_end_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        let mut journal = Journal::create(&path).unwrap();
        journal.consume(&started("a")).unwrap();
        journal.consume(&ended()).unwrap();
        assert_eq!(read(&path).unwrap(), [started("a"), ended()]);

        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 5]).unwrap();
        assert_eq!(read(&path).unwrap(), [started("a")]);

        assert!(Journal::append(&path).unwrap_err().to_string().contains("another run"));
        drop(journal);
        Journal::append(&path).unwrap().consume(&started("a")).unwrap();
        assert_eq!(read(&path).unwrap(), [started("a"), started("a")]);
    }

    #[test]
    fn damage_in_the_middle_and_newer_versions_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal.jsonl");
        let mut journal = Journal::create(&path).unwrap();
        journal.consume(&started("a")).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let line = serde_json::to_string(&ended()).unwrap();
        std::fs::write(&path, format!("{text}{{broken\n{line}\n")).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains(":3:"));
        let far = r#"{"event":"session_ended","launch":0,"session":0,"end":"complete","rounds":4000000000}"#;
        std::fs::write(&path, format!("{text}{far}\n{line}\n")).unwrap();
        assert!(read(&path).unwrap_err().to_string().contains(":3: a round above 1000"));
        std::fs::write(&path, "{\"journal\":\"toolstorm\",\"version\":99}\n").unwrap();
        assert!(read(&path).unwrap_err().cure().is_some());
    }
}
