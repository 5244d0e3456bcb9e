//! `toolstorm bisect`: the smallest set of toggles that turns good into bad.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::{execute, options::Options, selfcheck};
use crate::{
    bisect::{
        self, Answer, Ending, Outcome, Probe, Search,
        oracle::Oracle,
        state::{Entry, Header, State},
        toggle::{Configurations, Switch},
    },
    clock::Clock,
    error::{Error, Result},
    exit,
    gate::percent_against,
    report::{folder, terminal::Console},
    run::{self, Arm, Plan, check_settings, resolve},
    scenario::{BisectSpec, file},
    seed::Seed,
    stats::{Counts, interval},
};

/// Name and version of the machine form.
const SCHEMA: &str = "toolstorm-bisect/1";

/// Arguments of `bisect`. `--sessions` is the size of the smallest probe.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Matrix file with a `[bisect]` table
    matrix: String,
    /// Give up after this many sessions
    #[arg(long, value_name = "N")]
    max_sessions: Option<u64>,
    #[command(flatten)]
    pub(super) options: Options,
}

/// The machine form.
#[derive(Serialize)]
struct Output<'a> {
    schema: &'static str,
    ending: Ending,
    culprit: Vec<String>,
    posterior: f64,
    irrelevant: Vec<&'a str>,
    sessions_spent: u64,
    alternatives: Vec<Vec<String>>,
    inclusion: BTreeMap<&'a str, f64>,
    alone: Counts,
    complement: Counts,
    good: Counts,
    bad: Counts,
    probes: usize,
    skipped: usize,
    confidence: f64,
    wall_s: f64,
    result_dir: String,
}

/// Runs `bisect`.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let more = [("--partition", args.options.partition.is_some()), ("--until", args.options.until.is_some())];
    args.options.refuse("bisect", &more)?;
    let (matrix, scenario) = file::matrix(&args.matrix)?;
    let spec = matrix.bisect.clone().ok_or_else(|| {
        Error::usage(format!("{} has no [bisect] table", args.matrix))
            .hint("name the two ends: good = \"ARM\", bad = \"ARM\"")
    })?;
    let plan = resolve(matrix, scenario, &args.options.overrides())?;
    let configurations = Configurations::resolve(&spec, &plan)?;
    let wanted = wanted(args, &spec, &plan, &configurations)?;
    if args.options.dry_run {
        dry_run(&configurations, &wanted, console);
        return Ok(exit::PASS);
    }
    if args.options.selfcheck {
        selfcheck::before(&plan, console)?;
    }
    search(args, &plan, &configurations, wanted, console)
}

fn wanted(args: &Args, spec: &BisectSpec, plan: &Plan, found: &Configurations) -> Result<bisect::Plan> {
    let confidence = args.options.confidence.or(spec.confidence).unwrap_or(0.95);
    if !(0.5..1.0).contains(&confidence) {
        return Err(
            Error::usage(format!("[bisect]: confidence {confidence} is none")).hint("it lies between 0.5 and 1")
        );
    }
    let sessions_per_probe = args.options.sessions.or(spec.sessions_per_probe).unwrap_or(found.base.sessions);
    let max_sessions = args.max_sessions.or(spec.max_sessions).unwrap_or(100 * sessions_per_probe);
    if sessions_per_probe == 0 || max_sessions < 3 * sessions_per_probe {
        return Err(Error::usage("[bisect]: `max_sessions` leaves room for fewer than three probes")
            .hint("raise it, or lower `sessions_per_probe`"));
    }
    let seed = Seed(plan.seed).fork("bisect");
    if let Some(jobs) = args.options.jobs.filter(|jobs| jobs.get() > bisect::MOST_JOBS) {
        let most = bisect::MOST_JOBS;
        return Err(Error::usage(format!("--jobs {jobs}: a bisection runs at most {most} probes side by side"))
            .hint(format!("leave --jobs out, or ask for --jobs {most}")));
    }
    let all: Vec<usize> = (0..found.switches.len()).collect();
    let end = |name: &str, bad: &[usize]| Arm { name: name.into(), ..found.arm(bad) };
    let ends = Plan { arms: vec![end("good", &[]), end("bad", &all)], ..plan.clone() };
    check_settings(&ends)?;
    let jobs = execute::jobs(&ends, args.options.jobs)?.min(bisect::MOST_JOBS);
    Ok(bisect::Plan { toggles: found.switches.len(), confidence, max_sessions, sessions_per_probe, jobs, seed })
}

fn dry_run(configurations: &Configurations, wanted: &bisect::Plan, console: Console) {
    console.emit(&configurations.switches);
    for switch in &configurations.switches {
        console.say(format!("toggle: {switch}"));
    }
    let bisect::Plan { confidence, max_sessions, sessions_per_probe, .. } = wanted;
    console.say(format!(
        "stops at {confidence}, or after {max_sessions} sessions; {sessions_per_probe} in the smallest probe"
    ));
}

fn search(args: &Args, plan: &Plan, found: &Configurations, wanted: bisect::Plan, console: Console) -> Result<u8> {
    let clock = Clock::start();
    let confidence = wanted.confidence;
    let header = Header::new(plan.sha256(), found.switches.clone(), wanted.sessions_per_probe);
    let mut search = Search::new(wanted);
    let (result, mut state, entries) = open(args, plan, &header, clock)?;
    for Entry { probe, outcome } in &entries {
        search.record(probe, outcome);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::usage(format!("cannot start the runtime: {error}")))?;
    let stop = CancellationToken::new();
    runtime.spawn(execute::stop_on_signal(stop.clone(), console));
    let mut oracle = Oracle {
        plan,
        configurations: found,
        result: result.clone(),
        clock,
        stop,
        runtime: &runtime,
        probes: entries.len() as u64,
    };
    console.note(format!("bisecting {} toggles into {}", found.switches.len(), result.display()));
    let mut skipped = entries.iter().filter(|entry| matches!(entry.outcome, Outcome::Skipped(_))).count();
    let mut probes = entries.len();
    let answer = bisect::run(&mut search, &mut oracle, |search, probe, outcome| {
        state.add(&Entry { probe: probe.clone(), outcome: outcome.clone() })?;
        skipped += usize::from(matches!(outcome, Outcome::Skipped(_)));
        probes += 1;
        console.note(progress(probes, found, probe, outcome, search));
        Ok(())
    })?;
    let output = Output {
        schema: SCHEMA,
        ending: answer.ending,
        culprit: found.describe(&answer.culprit),
        posterior: answer.posterior,
        irrelevant: answer.irrelevant.iter().map(|&index| found.switches[index].name()).collect(),
        sessions_spent: answer.sessions,
        alternatives: answer.alternatives.iter().map(|set| found.describe(set)).collect(),
        inclusion: found.switches.iter().map(Switch::name).zip(answer.inclusion.iter().copied()).collect(),
        alone: answer.alone,
        complement: answer.complement,
        good: answer.good,
        bad: answer.bad,
        probes,
        skipped,
        confidence,
        wall_s: clock.elapsed().as_secs_f64(),
        result_dir: result.display().to_string(),
    };
    folder::put(&result.join("bisect.json"), &folder::pretty(&output))?;
    show(&output, &answer, console);
    console.emit(&output);
    Ok(code(answer.ending))
}

fn open(args: &Args, plan: &Plan, header: &Header, clock: Clock) -> Result<(PathBuf, State, Vec<Entry>)> {
    if let Some(result) = &args.options.resume {
        let (state, entries) = State::open(result, header)?;
        return Ok((result.clone(), state, entries));
    }
    let mark = Seed(clock.timestamp().as_microsecond() as u64).fork("bisect").0;
    let name = run::folder_name(clock, &plan.name, &format!("{:06x}", mark & 0xff_ffff));
    let result = args.options.output_dir.join(name);
    make(&result)?;
    Ok((result.clone(), State::create(&result, header)?, Vec::new()))
}

fn make(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|error| Error::usage(format!("{}: {error}", folder.display())))
}

fn progress(number: usize, found: &Configurations, probe: &Probe, outcome: &Outcome, search: &Search) -> String {
    let bad = match probe.bad.len() {
        0 => "everything good".to_owned(),
        all if all == found.switches.len() => "everything bad".to_owned(),
        few if few <= 3 => found.describe(&probe.bad).join(" "),
        many => format!("{many} of {} bad", found.switches.len()),
    };
    let outcome = match outcome {
        Outcome::Judged(counts) => format!("{} of {} corrupted", counts.events, counts.trials),
        Outcome::Skipped(reason) => format!("skipped: {}", reason.lines().next().unwrap_or_default()),
    };
    let leader = search.leader().map_or_else(String::new, |(set, probability)| {
        format!("; {} at {:.1} %", found.describe(&set).join(" + "), probability * 100.0)
    });
    format!("probe {number}: {bad}: {outcome}{leader}")
}

fn show(output: &Output<'_>, answer: &Answer, console: Console) {
    let counts = |counts: Counts| format!("{} of {} corrupted", counts.events, counts.trials);
    let bound = |counts: Counts| percent_against(interval::upper_bound(counts, output.confidence), 1.0);
    let culprit = output.culprit.join(" + ");
    let probability = percent_against(output.posterior, output.confidence);
    match answer.ending {
        Ending::Found => console.say(format!("culprit: {culprit} (probability {probability})")),
        Ending::Undecided if culprit.is_empty() => console.say("undecided: the ends could not be verified"),
        Ending::Undecided => console.say(format!("undecided: {culprit} is likeliest (probability {probability})")),
        Ending::BadIsClean => console.say(format!(
            "nothing to bisect: the bad end showed {}, at most {}",
            counts(output.bad),
            bound(output.bad)
        )),
        Ending::GoodIsCorrupt => console.say(format!(
            "nothing to bisect: the good end fails too, {} against {} at the bad end",
            counts(output.good),
            counts(output.bad)
        )),
        Ending::EndSkipped => console.say("nothing to bisect: the good or the bad end did not start"),
    }
    if matches!(answer.ending, Ending::Found | Ending::Undecided) {
        console.say(format!("alone: {}; everything else: {}", counts(output.alone), counts(output.complement)));
        for other in &output.alternatives {
            console.say(format!("also sufficient: {}", other.join(" + ")));
        }
        if !output.irrelevant.is_empty() {
            console.say(format!("irrelevant: {}", output.irrelevant.join(" ")));
        }
    }
    console.say(format!("{} sessions in {} probes, {} skipped", output.sessions_spent, output.probes, output.skipped));
}

fn code(ending: Ending) -> u8 {
    match ending {
        Ending::Found => exit::PASS,
        Ending::Undecided | Ending::BadIsClean | Ending::GoodIsCorrupt => exit::INCONCLUSIVE,
        Ending::EndSkipped => exit::USAGE,
    }
}
