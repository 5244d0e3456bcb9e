//! Between us and a server: ends the server's whole process group when we are gone, also after a `kill -9`.
//!
//! Our end of the pipe to its stdin closes with us, whatever ends us. A supervisor needs no signal that a system may not
//! have, and reaches the grandchildren that a parent-death signal does not.

use std::{process::Stdio, time::Duration};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::{Pid, getpgrp, getpid},
};
use tokio::{
    process::Command,
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use crate::error::{Error, Result};

/// How long an orphaned server may take to end by itself.
const GRACE: Duration = Duration::from_secs(5);

/// Runs `command` in this process's group until it ends or our stdin closes; its exit status is ours.
pub fn supervise(command: &[String]) -> Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Error::usage(format!("cannot start the runtime: {error}")))?;
    runtime.block_on(run(command))
}

async fn run(command: &[String]) -> Result<u8> {
    let [program, arguments @ ..] = command else { return Err(Error::usage("there is no command to supervise")) };
    // The group gets the polite signal; we stay until the server has gone.
    let mut terminate =
        signal(SignalKind::terminate()).map_err(|error| Error::usage(format!("no signals: {error}")))?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .spawn()
        .map_err(|error| Error::usage(format!("cannot start {program}: {error}")))?;
    let mut orphaned = end_of_stdin();
    loop {
        tokio::select! {
            status = child.wait() => {
                let code = status.ok().and_then(|status| status.code());
                return Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(crate::exit::USAGE));
            }
            _ = terminate.recv() => {}
            _ = &mut orphaned => break,
        }
    }
    // Only a group of our own may be ended.
    let group = getpgrp();
    if group == getpid() {
        end(group, &mut child).await;
    } else {
        let _ = child.kill().await;
    }
    Ok(crate::exit::INCONCLUSIVE)
}

async fn end(group: Pid, child: &mut tokio::process::Child) {
    let _ = killpg(group, Signal::SIGTERM);
    let _ = tokio::time::timeout(GRACE, child.wait()).await;
    let _ = killpg(group, Signal::SIGKILL);
}

/// Resolves when stdin is at its end. The thread that waits there ends with the process.
fn end_of_stdin() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        let _ = sender.send(());
    });
    receiver
}
