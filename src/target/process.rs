//! A child process in a group of its own, which ends with its guard.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
    process::Stdio,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::process::{Child, Command};

use crate::error::{Error, Result};

/// How much of a log's end an error shows.
const TAIL_BYTES: u64 = 2000;

/// A running child and everything it started. Dropping it kills the whole group.
#[derive(Debug)]
#[must_use = "dropping a process kills it"]
pub struct Process {
    /// The child.
    pub child: Child,
    group: Option<Pid>,
}

impl Process {
    /// Starts `command` with stdin piped: a server may end when its pipe closes, also when we are killed.
    /// Its stdout goes where `command` says.
    pub fn spawn(mut command: Command, stderr: impl Into<Stdio>) -> Result<Self> {
        command.stdin(Stdio::piped()).stderr(stderr).process_group(0).kill_on_drop(true);
        let program = command.as_std().get_program().to_string_lossy().into_owned();
        let child = command.spawn().map_err(|error| Error::usage(format!("cannot start {program}: {error}")))?;
        let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
        Ok(Self { child, group })
    }

    /// Asks the group to end, waits `grace`, then kills it.
    pub async fn stop(mut self, grace: Duration) {
        if !grace.is_zero() {
            self.signal(Signal::SIGTERM);
            let _ = tokio::time::timeout(grace, self.child.wait()).await;
        }
        self.signal(Signal::SIGKILL);
        // Reaps the child; what is killed ends at once.
        let _ = tokio::time::timeout(Duration::from_secs(1), self.child.wait()).await;
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            // A group that is gone already needs no signal.
            let _ = killpg(group, signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
    }
}

/// The file `log`, to write to behind what it holds.
pub(super) fn log(log: &Path) -> Result<File> {
    let file = File::options().create(true).append(true).open(log);
    file.map_err(|error| Error::usage(format!("cannot write {}: {error}", log.display())))
}

/// The end of the file `log`, for an error's hint.
pub(super) fn tail(log: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    };
    read().unwrap_or_default()
}
