//! `hazards --launch`: a foreign command, its captured graphs exported behind its back.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};

use tempfile::TempDir;

use super::Args;
use crate::{
    env,
    error::{Error, Result},
    hazard::{Capture, torch},
    report::terminal::Console,
};

const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A server that ignores the request to end is killed after this long.
const GRACE: Duration = Duration::from_secs(10);

/// Runs the command until it is ready or ends, and reads what it captured.
pub(super) fn captures(args: &Args, console: Console) -> Result<Vec<Capture>> {
    let exporter = Exporter::new(args.captures_dir.as_deref())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::usage(format!("no runtime for --launch: {e}")))?;
    runtime.block_on(watch(args, &exporter, console))?;
    exporter.captures()
}

/// What makes a Python process export its captured graphs: modules on its path, and a folder to write to.
pub(in crate::cli) struct Exporter {
    modules: TempDir,
    captures: PathBuf,
}

impl Exporter {
    /// Exports to `captures`, or to a folder that goes with this value.
    pub(in crate::cli) fn new(captures: Option<&Path>) -> Result<Self> {
        let install = || {
            let modules = tempfile::tempdir()?;
            let captures = captures.map_or_else(|| modules.path().join("captures"), Path::to_owned);
            fs::create_dir_all(&captures)?;
            fs::write(modules.path().join("sitecustomize.py"), torch::SITECUSTOMIZE)?;
            fs::write(modules.path().join("toolstorm_capture.py"), torch::EXPORTER)?;
            Ok(Self { captures: fs::canonicalize(captures)?, modules })
        };
        install().map_err(|e: std::io::Error| Error::usage(format!("cannot install the exporter: {e}")))
    }

    /// What the process's environment must say; `path` is the PYTHONPATH that it would have had.
    pub(in crate::cli) fn environment(&self, path: Option<&str>) -> [(&'static str, String); 2] {
        let ours = self.modules.path().display();
        let path = path.filter(|p| !p.is_empty()).map_or_else(|| ours.to_string(), |known| format!("{ours}:{known}"));
        [("PYTHONPATH", path), ("TOOLSTORM_CAPTURE_DIR", self.captures.display().to_string())]
    }

    /// The captures written so far, of every process; each process has pools of its own.
    pub(in crate::cli) fn captures(&self) -> Result<Vec<Capture>> {
        let folder = self.captures.display();
        let listing = fs::read_dir(&self.captures).map_err(|e| Error::usage(format!("cannot list {folder}: {e}")))?;
        let mut files: Vec<PathBuf> = listing.filter_map(|entry| Some(entry.ok()?.path())).collect();
        files.retain(|file| file.extension().is_some_and(|e| e == "json"));
        files.sort();
        if files.is_empty() {
            return Err(Error::usage("the command captured no CUDA graph").hint(
                "it must use torch.cuda.CUDAGraph in a Python process that inherits PYTHONPATH, and have cuda-bindings \
                 installed",
            ));
        }
        let mut captures = Vec::new();
        for group in files.chunk_by(|a, b| process(a) == process(b)) {
            captures.extend(super::read(group.iter().map(PathBuf::as_path))?);
        }
        Ok(captures)
    }
}

/// The process that a capture's file name begins with.
fn process(file: &Path) -> Option<String> {
    file.file_name()?.to_string_lossy().split('-').next().map(str::to_owned)
}

async fn watch(args: &Args, exporter: &Exporter, console: Console) -> Result<()> {
    let mut server = Group(start(&args.command, exporter)?);
    let waited = tokio::time::timeout(Duration::from_secs(args.ready_timeout), async {
        loop {
            if let Some(status) = server.0.try_wait().map_err(|e| Error::usage(format!("lost the command: {e}")))? {
                return Ok(Some(status));
            }
            if let Some(url) = &args.ready
                && answers(url).await
            {
                return Ok(None);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    })
    .await;
    let status = waited.map_err(|_| {
        let what = if args.ready.is_some() { "ready" } else { "done" };
        Error::usage(format!("`{}` was not {what} within {} s", args.command.join(" "), args.ready_timeout))
            .hint("give it more time with --ready-timeout, or name the URL that answers when it is ready with --ready")
    })??;
    if let Some(status) = status.filter(|s| !s.success()) {
        let message = format!("`{}` ended with {status} before its graphs were analysed", args.command.join(" "));
        return Err(Error::usage(message));
    }
    console.note("analysing what was captured");
    server.end().await;
    Ok(())
}

fn start(command: &[String], exporter: &Exporter) -> Result<Child> {
    Command::new(&command[0])
        .args(&command[1..])
        .envs(exporter.environment(env::var("PYTHONPATH").as_deref()))
        .stdin(Stdio::null())
        .stdout(std::io::stderr())
        .process_group(0)
        .spawn()
        .map_err(|e| Error::usage(format!("cannot start `{}`: {e}", command[0])))
}

async fn answers(url: &str) -> bool {
    let wait = Duration::from_secs(5);
    matches!(tokio::time::timeout(wait, reqwest::get(url)).await, Ok(Ok(answer)) if answer.status().is_success())
}

/// The command and whatever it started; ended when dropped.
struct Group(Child);

impl Group {
    /// Asks the group to end, and makes it.
    async fn end(&mut self) {
        let _ = killpg(self.id(), Signal::SIGTERM);
        let gone = async {
            while matches!(self.0.try_wait(), Ok(None)) {
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        let _ = tokio::time::timeout(GRACE, gone).await;
    }

    fn id(&self) -> Pid {
        Pid::from_raw(self.0.id() as i32)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = killpg(self.id(), Signal::SIGKILL);
        let _ = self.0.wait();
    }
}
