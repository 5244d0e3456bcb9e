//! The result folder: what lies in it, how it is made, read and written again.

use std::{
    collections::BTreeMap,
    fmt::Display,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{csv, hlog, html, junit, markdown, position, summary::Summary, tally::Tally};
use crate::{
    clock::Clock,
    env,
    error::{Error, Result},
    run::{self, Plan, RunEvent, journal},
    scenario::TargetKind,
};

/// Name and version of the manifest's format.
const SCHEMA: &str = "toolstorm-manifest/1";

/// `manifest.json`: the resolved plan and where it ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Name and version of the format.
    pub schema: String,
    /// The run's identifier.
    pub id: String,
    /// The version of toolstorm that ran it.
    pub version: String,
    /// When it was first started.
    pub created_at: String,
    /// Where it ran.
    pub host: Host,
    /// Variables of ours that servers inherited from our own environment, under those of the arms.
    #[serde(default)]
    pub inherited: BTreeMap<String, String>,
    /// The evidence or the token that the run replays: it tells nothing new about how often its arms are corrupted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay_of: Option<String>,
    /// The plan.
    pub plan: Plan,
}

/// The machine of the harness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Operating system.
    pub os: String,
    /// Processor architecture.
    pub arch: String,
    /// Processors that this process may use.
    pub cpus: usize,
}

impl Host {
    fn this() -> Self {
        Self {
            os: std::env::consts::OS.into(),
            arch: std::env::consts::ARCH.into(),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        }
    }
}

/// A result folder.
#[derive(Debug, Clone)]
pub struct Folder {
    /// Where it is.
    pub path: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
}

impl Folder {
    /// A new folder for `plan` under `parent`.
    pub fn create(parent: &Path, plan: Plan, clock: Clock) -> Result<Self> {
        let now = clock.timestamp();
        // Two runs of one plan within one second on one machine still differ in the microsecond.
        let mark = crate::seed::Seed(now.as_microsecond() as u64).fork(&plan.sha256()).0;
        let id = format!("{:06x}", mark & 0xff_ffff);
        let path = parent.join(run::folder_name(clock, &plan.name, &id));
        Self::create_at(path, id, plan, clock)
    }

    /// The folder `path` for `plan`, run as `id`.
    pub fn create_at(path: PathBuf, id: String, plan: Plan, clock: Clock) -> Result<Self> {
        fs::create_dir_all(&path).map_err(|error| failed(&path, &error))?;
        let manifest = Manifest {
            schema: SCHEMA.into(),
            id,
            version: env!("CARGO_PKG_VERSION").into(),
            created_at: clock.timestamp().to_string(),
            host: Host::this(),
            inherited: inherited(),
            replay_of: None,
            plan,
        };
        let folder = Self { path, manifest };
        folder.put("manifest.json", &pretty(&folder.manifest))?;
        Ok(folder)
    }

    /// The folder as one of a replay of `evidence`.
    pub fn replaying(mut self, evidence: &str) -> Result<Self> {
        self.manifest.replay_of = Some(evidence.to_owned());
        self.put("manifest.json", &pretty(&self.manifest))?;
        Ok(self)
    }

    /// The folder at `path`, or that of the file at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let path = if path.is_file() { path.parent().unwrap_or(Path::new(".")) } else { path };
        let manifest = path.join("manifest.json");
        let text = fs::read_to_string(&manifest).map_err(|_| {
            Error::usage(format!("{} is no result folder: it has no manifest.json", path.display()))
                .hint("give a folder that `run` or `matrix` wrote, for example results/…")
        })?;
        let broken = |why: &str| Error::usage(format!("{}: {why}", manifest.display()));
        let found: Manifest = serde_json::from_str(&text).map_err(|error| broken(&error.to_string()))?;
        if found.schema != SCHEMA {
            return Err(broken(&format!("its schema is `{}`, not `{SCHEMA}`", found.schema)));
        }
        if let Some(partition) = found.plan.partition.filter(|parts| !(1..=parts.of).contains(&parts.part)) {
            return Err(broken(&format!("`{partition}` is no partition")));
        }
        Ok(Self { path: path.to_owned(), manifest: found })
    }

    /// The plan that was run.
    pub fn plan(&self) -> &Plan {
        &self.manifest.plan
    }

    /// A variable that its servers did not inherit as `other` has it: its name, and in words what it was and what it is in
    /// `other`. Nothing for servers that someone else runs.
    pub fn differing(&self, other: &BTreeMap<String, String>) -> Option<[String; 3]> {
        let own = &self.manifest.inherited;
        let ours = self.plan().target.kind != TargetKind::Url;
        let name = own.keys().chain(other.keys()).find(|name| ours && own.get(*name) != other.get(*name))?;
        let value =
            |env: &BTreeMap<String, String>| env.get(name).map_or("unset".to_owned(), |value| format!("`{value}`"));
        Some([name.clone(), value(own), value(other)])
    }

    /// Where the journal lies.
    pub fn journal(&self) -> PathBuf {
        self.path.join("journal.jsonl")
    }

    /// Everything that the journal says.
    pub fn events(&self) -> Result<Vec<RunEvent>> {
        journal::read(&self.journal())
    }

    /// Writes every report of the run.
    pub fn write(&self, tally: &Tally, summary: &Summary) -> Result<()> {
        self.put("calls.jsonl", &calls(tally))?;
        self.put("summary.json", &pretty(summary))?;
        self.put("summary.csv", &csv::render(summary)?)?;
        let positions = position::of_run(tally, summary);
        self.put("positions.csv", &position::csv(&positions)?)?;
        self.put("summary.md", &markdown::render(summary, &positions))?;
        self.put("junit.xml", &junit::render(summary)?)?;
        self.put("report.html", &html::render(self.plan(), tally, summary, &positions)?)?;
        self.put("latency.hlog", &hlog::render(self.plan(), tally)?)
    }

    fn put(&self, name: &str, text: &str) -> Result<()> {
        put(&self.path.join(name), text)
    }
}

/// The variables that servers inherit from our own environment and that may change what the built-in engine does.
pub fn inherited() -> BTreeMap<String, String> {
    env::all().into_iter().filter(|(name, _)| is_ours(name)).collect()
}

/// Whether a variable may change what the built-in engine does.
fn is_ours(name: &str) -> bool {
    name.starts_with("TOOLSTORM_") || name.starts_with("SGLANG_")
}

/// Writes `text` to `path` whole or not at all; into what is there where that is no regular file, such as `/dev/stdout`
/// or a link.
pub fn put(path: &Path, text: &str) -> Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let write = || -> std::io::Result<()> {
        if fs::symlink_metadata(path).is_ok_and(|there| !there.is_file()) {
            return fs::write(path, text);
        }
        fs::create_dir_all(parent)?;
        let mut file = tempfile::Builder::new().prefix(".toolstorm-").tempfile_in(parent)?;
        file.write_all(text.as_bytes())?;
        // A temporary file is private; a report is not.
        #[cfg(unix)]
        fs::set_permissions(file.path(), std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
    };
    write().map_err(|error| failed(path, &error))
}

/// One judged call a line.
pub fn calls(tally: &Tally) -> String {
    let mut text = String::new();
    for call in tally.calls() {
        text.push_str(&serde_json::to_string(&call).unwrap_or_default());
        text.push('\n');
    }
    text
}

/// JSON for people to read.
pub fn pretty(value: &impl Serialize) -> String {
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}

fn failed(path: &Path, error: &impl Display) -> Error {
    Error::usage(format!("{}: {error}", path.display()))
}
