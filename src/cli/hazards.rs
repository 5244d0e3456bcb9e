//! `toolstorm hazards`: happens-before analysis of captured graphs.

mod captures;
mod launch;

use std::{fs, path::PathBuf};

use clap::Subcommand;

use self::captures::Found;
use crate::{
    engine::toggles::Toggles,
    env,
    error::{Error, Result},
    exit,
    hazard::{
        Capture, Report, engine, examine, output,
        replay::{Outputs, replay},
        torch,
    },
    report::terminal::Console,
    run::{self, Overrides},
    scenario::{self, TargetKind},
};

/// Arguments of `hazards`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Args {
    #[command(subcommand)]
    what: Option<What>,
    /// Capture files of a PyTorch program, of one pool and in the order of their capture, or a folder of a program's
    /// captures; `-` is stdin
    #[arg(long, num_args = 1.., value_name = "FILE")]
    capture: Vec<PathBuf>,
    /// Capture files, as with `--capture`
    #[arg(value_name = "FILE", conflicts_with = "capture")]
    files: Vec<PathBuf>,
    /// Every arm of this matrix instead of the environment's configuration
    #[arg(long, value_name = "FILE", conflicts_with_all = ["capture", "files", "launch", "replay_order"])]
    matrix: Option<String>,
    /// Run the command after `--`, export every CUDA graph that it captures, and analyse them
    #[arg(long, requires = "command", conflicts_with_all = ["capture", "files"])]
    launch: bool,
    /// Where `--launch` keeps the captures, a new folder; a temporary one where none is given
    #[arg(long, value_name = "DIR", requires = "launch")]
    captures_dir: Option<PathBuf>,
    /// With `--launch`: the server is ready when this URL answers; else when the command ends
    #[arg(long, value_name = "URL", requires = "launch")]
    ready: Option<String>,
    /// With `--launch`: how long to wait until then
    #[arg(long, value_name = "SECONDS", requires = "launch", default_value_t = 1800)]
    ready_timeout: u64,
    /// Replay order of the given captures: their numbers from 1 or names, as in `2,1,2`
    #[arg(long, value_name = "GRAPH,…", value_delimiter = ',')]
    replay_order: Vec<String>,
    /// With `--replay-order`: outputs are read only after the next replay
    #[arg(long, requires = "replay_order")]
    outputs_read_late: bool,
    /// List every hazard instead of the first few of each cause, and every graph of every arm or process
    #[arg(long, help_heading = "Output")]
    all: bool,
    /// Write the JSON report to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    export_json: Option<PathBuf>,
    /// Write a SARIF log to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    export_sarif: Option<PathBuf>,
    /// Write a page with drawings to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    export_html: Option<PathBuf>,
    /// Command line of `--launch`
    #[arg(last = true, value_name = "COMMAND", requires = "launch")]
    command: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Print the Python module that writes capture files
    Exporter {
        /// Write it to this folder instead, with a sitecustomize that exports every graph of a program that never heard
        /// of it to the folder in `TOOLSTORM_CAPTURE_DIR`
        #[arg(long, value_name = "DIR")]
        into: Option<PathBuf>,
    },
}

/// Runs `hazards`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    if let Some(What::Exporter { into }) = &args.what {
        match into {
            Some(folder) => install(folder)?,
            None => console.say(torch::EXPORTER.trim_end()),
        }
        return Ok(exit::PASS);
    }
    let Found { captures, mut missing, warnings } = if args.launch {
        launch::captures(args, console)?
    } else if args.capture.is_empty() && args.files.is_empty() {
        Found { captures: engine(args, console)?, ..Found::default() }
    } else {
        captures::read(args.capture.iter().chain(&args.files).map(PathBuf::as_path))?
    };
    missing += captures.iter().filter(|capture| capture.blind).count() as u64;
    let order = replay_order(&args.replay_order, &captures)?;
    let outputs = if args.outputs_read_late { Outputs::AfterNext } else { Outputs::AtOnce };
    let clobbers = replay(&captures, &order, outputs)?;
    let graphs = captures.into_iter().map(examine).collect::<Result<Vec<_>>>()?;
    publish(&Report { graphs, clobbers, missing, warnings }, args, console)
}

/// Writes both Python modules to `folder`.
fn install(folder: &std::path::Path) -> Result<()> {
    let write = || {
        fs::create_dir_all(folder)?;
        fs::write(folder.join("sitecustomize.py"), torch::SITECUSTOMIZE)?;
        fs::write(folder.join("toolstorm_capture.py"), torch::EXPORTER)
    };
    write().map_err(|e: std::io::Error| Error::usage(format!("cannot write the exporter to {}: {e}", folder.display())))
}

/// The captured graphs of the built-in engine, in the environment's configuration or in that of every arm.
fn engine(args: &Args, console: Console) -> Result<Vec<Capture>> {
    let Some(matrix) = &args.matrix else {
        return engine::captures(&Toggles::resolve(env::all())?);
    };
    let (matrix, scenario) = scenario::file::matrix(matrix)?;
    if matrix.target.kind != TargetKind::Builtin {
        return Err(Error::usage(format!("the target of `{}` is not the built-in engine", matrix.name))
            .hint("analyse a foreign server with `hazards --launch -- COMMAND`, or give its arms `hazards = true`"));
    }
    let plan = run::resolve(matrix, scenario, &Overrides::default())?;
    let mut captures = Vec::new();
    for arm in &plan.arms {
        // As the arm's server would: under the variables of this shell, and the arm's own.
        let variables = env::all().into_iter().chain(arm.env.clone());
        let toggles = Toggles::resolve(variables).map_err(|e| e.within(&arm.name))?;
        let mut found = engine::captures(&toggles).map_err(|e| e.within(&arm.name))?;
        for capture in &mut found {
            capture.group.clone_from(&arm.name);
        }
        console.note(format!("{}: {} graphs", arm.name, found.len()));
        captures.extend(found);
    }
    Ok(captures)
}

fn replay_order(order: &[String], captures: &[Capture]) -> Result<Vec<usize>> {
    if !order.is_empty() && captures.windows(2).any(|pair| pair[0].group != pair[1].group) {
        return Err(Error::usage("--replay-order: the captures are those of several processes")
            .hint("name the files of one process instead of the folder"));
    }
    order
        .iter()
        .map(|graph| {
            let number = graph.parse::<usize>().ok().filter(|n| (1..=captures.len()).contains(n)).map(|n| n - 1);
            let found = captures.iter().position(|c| c.name == *graph).or(number);
            found.ok_or_else(|| {
                let names: Vec<&str> = captures.iter().map(|c| c.name.as_str()).collect();
                Error::usage(format!("--replay-order: no graph `{graph}`")).hint(format!(
                    "name one of {}, or a number from 1 to {}",
                    names.join(", "),
                    captures.len()
                ))
            })
        })
        .collect()
}

fn publish(report: &Report, args: &Args, console: Console) -> Result<u8> {
    let document = output::json::document(report);
    let write = |file: &Option<PathBuf>, text: &dyn Fn() -> Result<String>| -> Result<()> {
        let Some(file) = file else { return Ok(()) };
        fs::write(file, text()?).map_err(|e| Error::usage(format!("cannot write {}: {e}", file.display())))
    };
    let pretty = |value: std::result::Result<String, serde_json::Error>| {
        value.map(|text| text + "\n").map_err(|e| Error::usage(format!("cannot write the report: {e}")))
    };
    write(&args.export_json, &|| pretty(serde_json::to_string_pretty(&document)))?;
    write(&args.export_sarif, &|| pretty(serde_json::to_string_pretty(&output::sarif::document(report))))?;
    write(&args.export_html, &|| output::html::page(report))?;
    console.say(output::terminal::render(report, args.all));
    console.emit(&document);
    Ok(match (report.hazards(), report.missing) {
        (0, 0) => exit::PASS,
        // What could not be read is not known to be clean.
        (0, _) => exit::INCONCLUSIVE,
        _ => exit::FAIL,
    })
}
