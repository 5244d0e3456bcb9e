//! `hazards --launch`: a foreign command, its captured graphs exported behind its back.

use std::{
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use tempfile::TempDir;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{
    Args,
    captures::{Found, read},
};
use crate::{
    env,
    error::{Error, Result},
    report::terminal::Console,
    target::{Exporter, Process, supervised},
};

const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A server that ignores the request to end is killed after this long.
const GRACE: Duration = Duration::from_secs(10);

/// Runs the command until it is ready or ends, and reads what it captured.
pub(super) fn captures(args: &Args, console: Console) -> Result<Found> {
    let kept = Folder::new(args.captures_dir.as_deref())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::usage(format!("no runtime for --launch: {e}")))?;
    runtime.block_on(run(args, &kept, console))?;
    read(std::iter::once(kept.path()))
}

/// Where captures go: the caller's folder, or one that goes with this value.
enum Folder {
    Kept(PathBuf),
    Temporary(TempDir),
}

impl Folder {
    fn new(kept: Option<&Path>) -> Result<Self> {
        match kept {
            Some(path) => Ok(Self::Kept(path.to_owned())),
            None => tempfile::tempdir()
                .map(Self::Temporary)
                .map_err(|e| Error::usage(format!("no folder for captures: {e}")).hint("name one with --captures-dir")),
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Kept(path) => path,
            Self::Temporary(folder) => folder.path(),
        }
    }
}

async fn run(args: &Args, folder: &Folder, console: Console) -> Result<()> {
    let listen = |kind| signal(kind).map_err(|e| Error::usage(format!("cannot listen for signals: {e}")));
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let exporter = Exporter::install(folder.path()).await?;
    let mut command = supervised(&args.command)?;
    command.envs(exporter.environment(env::var("PYTHONPATH").as_deref())).stdout(std::io::stderr());
    let mut server = Process::spawn(command, Stdio::inherit())?;
    let limit = Duration::from_secs(args.ready_timeout);
    let outcome = tokio::select! {
        waited = tokio::time::timeout(limit, wait(args, &mut server)) => waited.unwrap_or_else(|_| Err(late(args))),
        _ = interrupt.recv() => Err(interrupted(args)),
        _ = terminate.recv() => Err(interrupted(args)),
    };
    if outcome.is_ok() {
        console.note("analysing what was captured");
    }
    end(server, &mut interrupt).await;
    outcome
}

/// Returns when the server answers, or when a command that is waited for has ended well.
async fn wait(args: &Args, server: &mut Process) -> Result<()> {
    loop {
        let ended = server.child.try_wait().map_err(|e| Error::usage(format!("lost the command: {e}")))?;
        if let Some(status) = ended {
            return judge(args, status);
        }
        if let Some(url) = &args.ready
            && answers(url).await
        {
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn judge(args: &Args, status: ExitStatus) -> Result<()> {
    let command = args.command.join(" ");
    if !status.success() {
        return Err(Error::usage(format!("`{command}` ended with {status} before its graphs were analysed")));
    }
    match &args.ready {
        Some(url) => Err(Error::usage(format!("`{command}` ended before {url} answered"))
            .hint("leave --ready out to wait for the command's end")),
        None => Ok(()),
    }
}

fn late(args: &Args) -> Error {
    let what = if args.ready.is_some() { "ready" } else { "done" };
    Error::usage(format!("`{}` was not {what} within {} s", args.command.join(" "), args.ready_timeout))
        .hint("give it more time with --ready-timeout, or name the URL that answers when it is ready with --ready")
}

fn interrupted(args: &Args) -> Error {
    let error = Error::incomplete("stopped before the captured graphs were analysed");
    match &args.captures_dir {
        Some(folder) => {
            error.hint(format!("`toolstorm hazards {}` analyses what was captured so far", folder.display()))
        }
        None => error,
    }
}

/// Asks the group to end, and makes it; a further Ctrl-C makes it at once.
async fn end(server: Process, interrupt: &mut Signal) {
    tokio::select! {
        () = server.stop(GRACE) => {}
        _ = interrupt.recv() => {}
    }
}

async fn answers(url: &str) -> bool {
    let wait = Duration::from_secs(5);
    matches!(tokio::time::timeout(wait, reqwest::get(url)).await, Ok(Ok(answer)) if answer.status().is_success())
}
