//! A plan to a finished run: what `run` and `matrix` share.

use std::{collections::BTreeMap, num::NonZeroUsize, thread};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::{options::Options, selfcheck};
use crate::{
    clock::Clock,
    device::cuda,
    engine::toggles::{DeviceChoice, Toggles},
    env,
    error::{Error, Result},
    exit, gate,
    report::{
        folder::{Folder, inherited},
        measure,
        progress::Progress,
        summary::{ArmSummary, Outcome, Summary},
        table,
        tally::Tally,
        terminal::Console,
    },
    run::{Consumer, Finished, Plan, Runner, journal::Journal, remaining},
    scenario::TargetKind,
    validate::Class,
};

/// Launches side by side at most, unless more are asked for: each holds an engine in memory.
const MOST_JOBS: usize = 8;

/// Runs `plan`, or goes on with an interrupted run of it.
pub(super) fn execute(plan: Plan, options: &Options, console: Console) -> Result<u8> {
    gate::check(&plan)?;
    options.exports.check()?;
    if options.dry_run {
        jobs(&plan, options.jobs)?;
        return Ok(dry_run(&plan, console));
    }
    let (summary, finished) = drive(plan, options, console)?;
    console.say(table::render(&summary, console).trim_end());
    console.emit(&summary);
    Ok(code(&summary, finished))
}

/// Runs `plan`, or what is left of it, and writes its reports.
pub(super) fn drive(plan: Plan, options: &Options, console: Console) -> Result<(Summary, Finished)> {
    let jobs = jobs(&plan, options.jobs)?;
    let selfcheck = options.selfcheck.then(|| selfcheck::before(&plan, console)).transpose()?;
    let clock = Clock::start();
    let (folder, mut tally, mut journal) = if let Some(path) = &options.resume {
        reopen(&plan, Folder::open(path)?)?
    } else {
        let folder = Folder::create(&options.output_dir, plan, clock)?;
        let journal = Journal::create(&folder.journal())?;
        (folder, Tally::default(), journal)
    };
    let plan = folder.plan();
    let events = if options.resume.is_some() { folder.events()? } else { Vec::new() };
    let mut todo = remaining(plan, &events);
    if plan.load.until.is_some() {
        // What a test has decided stays decided.
        let arms = measure::summary(plan, &tally, None).arms;
        let decided = |arm: &ArmSummary| arm.sequential.as_ref().is_some_and(|test| test.decision.is_some());
        todo.retain(|todo| !decided(&arms[todo.launch.arm]));
    }
    let mut progress = Progress::new(console, todo.len());
    let stop = CancellationToken::new();
    let mut runner = Runner {
        plan,
        result: folder.path.clone(),
        id: folder.manifest.id.clone(),
        clock,
        selfcheck,
        stop: stop.clone(),
        jobs,
        consumers: vec![&mut journal as &mut dyn Consumer, &mut tally, &mut progress],
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::usage(format!("cannot start the runtime: {error}")))?;
    let finished = runtime.block_on(async {
        tokio::spawn(stop_on_signal(stop, console));
        runner.run(&todo).await
    })?;
    drop(progress);
    // What still waits for a socket is of no more use.
    runtime.shutdown_background();
    let summary = gate::settle(measure::summary(plan, &tally, Some(&folder.path)), &plan.gate)?;
    for arm in out_of_step(plan, &summary) {
        console.warn(format!(
            "arm `{arm}` lost responses, so its lockstep broke: its figures are no function of the seeds; run it again"
        ));
    }
    folder.write(&tally, &summary)?;
    options.exports.write(plan, &tally, &summary)?;
    Ok((summary, finished))
}

/// The arms of a lockstep run in which time decided after all: the harness or the server gave up waiting for the other.
fn out_of_step<'a>(plan: &Plan, summary: &'a Summary) -> Vec<&'a str> {
    let by_time = |class: &Class| matches!(class, Class::HttpError | Class::StreamStalled | Class::ServerRefused);
    let broken = summary.arms.iter().filter(|arm| plan.load.lockstep && arm.infra.keys().any(by_time));
    broken.map(|arm| arm.name.as_str()).collect()
}

/// How many launches run side by side. Only virtual time makes neighbours invisible to each other: under lockstep on the
/// virtual GPU. Everywhere else a neighbour is load that nobody asked for, and it moves the races.
///
/// # Errors
/// More are wanted than may run, or a variable of an arm is none that the built-in engine would start with.
pub(super) fn jobs(plan: &Plan, wanted: Option<NonZeroUsize>) -> Result<usize> {
    let builtin = plan.target.kind == TargetKind::Builtin;
    let virtual_gpus = if builtin { virtual_gpus(plan)? } else { 0 };
    let obstacle = if !builtin {
        Some("the target is not the built-in engine")
    } else if !plan.load.lockstep {
        Some("the engine runs free, without lockstep")
    } else if plan.load.until.is_some() {
        Some("a sequential test looks at one launch after the other")
    } else if virtual_gpus < plan.arms.len() {
        Some("the launches share a GPU")
    } else {
        None
    };
    match (wanted.map(NonZeroUsize::get), obstacle) {
        (Some(more @ 2..), Some(obstacle)) => {
            Err(Error::usage(format!("--jobs {more}: launches side by side would disturb each other: {obstacle}"))
                .hint("leave --jobs out"))
        }
        (Some(jobs), _) => Ok(jobs),
        (None, Some(_)) => Ok(1),
        (None, None) => Ok(thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MOST_JOBS)),
    }
}

/// How many arms of the built-in engine run on the virtual GPU.
fn virtual_gpus(plan: &Plan) -> Result<usize> {
    let mut count = 0;
    for arm in &plan.arms {
        let own = arm.env.keys().try_for_each(|name| Toggles::check_name(name));
        own.and_then(|()| Toggles::resolve(arm.env.clone()))
            .map_err(|error| error.within(format_args!("arm `{}`", arm.name)))?;
        let mut env: BTreeMap<_, _> = env::all().into_iter().collect();
        env.extend(plan.environment(arm, 0, 1));
        let toggles = Toggles::resolve(env).map_err(|error| error.within("the environment, which servers inherit"))?;
        count += usize::from(match toggles.device {
            DeviceChoice::Sim => true,
            DeviceChoice::Cuda => false,
            DeviceChoice::Auto => cuda::device_count() == 0,
        });
    }
    Ok(count)
}

fn reopen(plan: &Plan, folder: Folder) -> Result<(Folder, Tally, Journal)> {
    if folder.plan().sha256() != plan.sha256() || folder.plan().partition != plan.partition {
        return Err(Error::usage(format!("{} is the result of another plan", folder.path.display()))
            .hint("resume with the file and the flags that began the run"));
    }
    if let Some([name, then, now]) = folder.differing(&inherited()) {
        let path = folder.path.display();
        return Err(Error::usage(format!("{path}: {name} was {then} when the run began and is {now} now"))
            .hint("resume with the variables that manifest.json has under `inherited`"));
    }
    // Opened first: from here on no other process adds to it.
    let journal = Journal::append(&folder.journal())?;
    let tally = Tally::of(&folder.events()?);
    Ok((folder, tally, journal))
}

/// The first Ctrl-C or SIGTERM ends the run with what there is; the second one is left to the system.
pub(super) async fn stop_on_signal(stop: CancellationToken, console: Console) {
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    console.note("stopping; what was judged is kept");
    stop.cancel();
}

/// A failure outweighs a server that did not start, which outweighs too little data.
pub(super) fn code(summary: &Summary, finished: Finished) -> u8 {
    match summary.verdict {
        _ if finished.interrupted => exit::INCONCLUSIVE,
        Outcome::Fail => exit::FAIL,
        _ if finished.launches_failed > 0 => exit::USAGE,
        Outcome::Inconclusive => exit::INCONCLUSIVE,
        Outcome::Pass => exit::PASS,
    }
}

fn dry_run(plan: &Plan, console: Console) -> u8 {
    console.emit(plan);
    console.say(format!("{}: seed {}, workload {}", plan.name, plan.seed, &plan.workload_sha256()[..12]));
    for launch in plan.launches() {
        let arm = &plan.arms[launch.arm];
        let sessions = plan.sessions(arm).len();
        let env: Vec<_> = arm.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let server = match (plan.target.kind, arm.base_url.as_ref().or(plan.target.base_url.as_ref())) {
            (TargetKind::Url, Some(address)) => address.clone(),
            _ => format!("launch seed {}  {}", plan.launch_seed(launch.repetition), env.join(" ")),
        };
        console.say(format!(
            "{:>3}  {}  {sessions} sessions, concurrency {}, {server}",
            launch.number, arm.name, arm.concurrency
        ));
    }
    exit::PASS
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        run::{Overrides, resolve},
        scenario::file,
    };

    #[test]
    fn lost_responses_break_lockstep_and_cut_ones_do_not() {
        let (matrix, scenario) = file::matrix("quick").unwrap();
        let mut plan = resolve(matrix, scenario, &Overrides::default()).unwrap();
        let mut summary = measure::summary(&plan, &Tally::default(), None);
        summary.arms[0].infra.insert(Class::LengthCutoff, 3);
        assert!(out_of_step(&plan, &summary).is_empty());
        summary.arms[1].infra.insert(Class::StreamStalled, 1);
        assert_eq!(out_of_step(&plan, &summary), ["overlap-off"]);
        plan.load.lockstep = false;
        assert!(out_of_step(&plan, &summary).is_empty());
    }
}
