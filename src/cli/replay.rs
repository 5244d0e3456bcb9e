//! `toolstorm replay`: a failing session again.

use std::path::{Path, PathBuf};

use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::{
    clock::Clock,
    device::sim::Token,
    drive::{self, Client},
    error::{Error, Result},
    exit, gate,
    report::{
        folder::{Folder, Manifest},
        measure,
        tally::Tally,
        terminal::Console,
    },
    run::{
        self, Consumer, Launch, Plan, Runner, Todo,
        journal::Journal,
        replay,
        replay::{Printed, Recorded},
    },
    target,
    validate::{Judgement, Verdict},
};

/// How a replay token begins.
const TOKEN: &str = "ts1-";

/// Arguments of `replay`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Evidence folder or the name of one, or a replay token: `ts1-…`
    id: String,
    /// Judge the recorded bytes again; send nothing
    #[arg(long, conflicts_with_all = ["load", "base_url"])]
    recorded: bool,
    /// Drive the session's whole launch again: under lockstep the same bytes come
    #[arg(long, conflicts_with = "base_url")]
    load: bool,
    /// Send the requests to this server instead of the arm's
    #[arg(long, value_name = "URL")]
    base_url: Option<String>,
    /// Send each request so often
    #[arg(long, value_name = "N", default_value_t = 1)]
    times: u32,
    /// Where result folders lie
    #[arg(long, value_name = "DIR", default_value = "results")]
    output_dir: PathBuf,
}

/// Runs `replay`: corruption seen again is exit code 1, none is 0.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let runtime =
        tokio::runtime::Runtime::new().map_err(|error| Error::usage(format!("cannot start the runtime: {error}")))?;
    if args.id.starts_with(TOKEN) {
        return runtime.block_on(replay_token(args, console));
    }
    let evidence = replay::find(&args.id, &args.output_dir)?;
    // As typed it may have no parents: `.`, or a name in the folder above.
    let evidence = evidence.canonicalize().map_err(|error| Error::usage(format!("{}: {error}", evidence.display())))?;
    let recorded = replay::read(&evidence)?;
    let plan = &plan_of(result_of(&evidence))?;
    if args.recorded {
        return rejudge(plan, &recorded, console);
    }
    if args.load {
        let launch = launch(plan, corrupted(&recorded)?.about.launch)?;
        return runtime.block_on(async {
            let again = relaunch(args, plan, launch).await?;
            show_again(&recorded, &again, console)
        });
    }
    runtime.block_on(resend(args, plan, &recorded, console))
}

/// The first response whose corruption a launch can show again.
fn corrupted(recorded: &[Recorded]) -> Result<&Recorded> {
    recorded.iter().find(|exchange| is_corrupted(exchange)).ok_or_else(|| {
        if recorded.iter().all(|recorded| recorded.about.parity.is_some()) {
            return Error::usage("only the turn's other form was damaged in this session")
                .hint("replay it without --load");
        }
        Error::usage("no recorded response of this session is corrupted").hint("judge it again with --recorded")
    })
}

fn is_corrupted(recorded: &Recorded) -> bool {
    recorded.about.verdict == Verdict::Corrupted && recorded.about.parity.is_none()
}

/// The plan of a result, with the variables that its servers inherited.
fn plan_of(result: &Path) -> Result<Plan> {
    let Manifest { mut plan, inherited, .. } = Folder::open(result)?.manifest;
    for arm in &mut plan.arms {
        let own = std::mem::replace(&mut arm.env, inherited.clone());
        arm.env.extend(own);
    }
    Ok(plan)
}

/// The result folder that holds an evidence folder.
fn result_of(evidence: &Path) -> &Path {
    evidence.parent().and_then(Path::parent).unwrap_or(Path::new("."))
}

fn rejudge(plan: &Plan, recorded: &[Recorded], console: Console) -> Result<u8> {
    let mut seen = false;
    for exchange in recorded {
        let judgement = drive::judge(&exchange.turn(plan)?, &exchange.reply());
        seen |= judgement.verdict == Verdict::Corrupted;
        show(exchange, &judgement, console);
    }
    Ok(if seen { exit::FAIL } else { exit::PASS })
}

/// One line a response.
fn show(exchange: &Recorded, judgement: &Judgement, console: Console) {
    let about = &exchange.about;
    let detail = judgement.detail.clone().or_else(|| judgement.calls.iter().find_map(|call| call.detail.clone()));
    console.emit(&json!({"session": about.session, "round": about.round, "verdict": judgement.verdict,
        "class": judgement.class, "detail": detail, "recorded_verdict": about.verdict}));
    console.say(format!(
        "session {} round {}: {}{}",
        about.session,
        about.round,
        judgement.class,
        detail.map_or_else(String::new, |detail| format!(": {detail}"))
    ));
}

/// Sends the recorded requests alone, one after the other.
async fn resend(args: &Args, plan: &Plan, recorded: &[Recorded], console: Console) -> Result<u8> {
    let mut plan = plan.clone();
    // One request at a time has nobody to keep step with.
    plan.load.lockstep = false;
    if let Some(url) = &args.base_url {
        plan.redirect(url);
        plan.arms.iter_mut().for_each(|arm| arm.base_url = None);
    }
    let about = &recorded[0].about;
    let launch = launch(&plan, about.launch)?;
    let folder = tempfile::tempdir().map_err(|error| Error::usage(format!("no temporary folder: {error}")))?;
    let clock = Clock::start();
    let todo = Todo { launch, sessions: vec![about.session] };
    let runner = runner(&plan, folder.path(), clock, Vec::new());
    let server = runner.start(&todo, &plan.arms[launch.arm], None).await?;
    let client = Client::new(server.endpoint.clone(), runner.limits(), clock)?;
    let model = target::model(&plan.target, &client).await?;
    let mut seen = false;
    for exchange in recorded {
        for _ in 0..args.times.max(1) {
            let mut turn = exchange.turn(&plan)?;
            turn.body = with_model(&turn.body, &model)?;
            let (reply, _) = client.send(&turn, about.session).await;
            let judgement = drive::judge(&turn, &reply);
            seen |= judgement.verdict == Verdict::Corrupted;
            show(exchange, &judgement, console);
        }
    }
    server.stop(std::time::Duration::from_secs(5)).await;
    if !seen && recorded.iter().any(is_corrupted) {
        console.note("intact alone, and corrupted when it was recorded: what shows only under load needs --load");
    }
    Ok(if seen { exit::FAIL } else { exit::PASS })
}

/// The recorded body for the model that this server has; untouched where it is the same.
fn with_model(body: &[u8], model: &str) -> Result<Vec<u8>> {
    let broken = |error: serde_json::Error| Error::usage(format!("the recorded request is no JSON: {error}"));
    let mut value: serde_json::Value = serde_json::from_slice(body).map_err(broken)?;
    if value.get("model") == Some(&json!(model)) {
        return Ok(body.to_owned());
    }
    let Some(request) = value.as_object_mut() else {
        return Err(Error::usage("the recorded request is no JSON object"));
    };
    request.insert("model".into(), json!(model));
    serde_json::to_vec(&value).map_err(broken)
}

/// A launch that was driven again.
struct Again {
    result: PathBuf,
    tally: Tally,
}

/// Drives the whole launch again.
async fn relaunch(args: &Args, plan: &Plan, launch: Launch) -> Result<Again> {
    let clock = Clock::start();
    let folder = Folder::create(&args.output_dir, plan.clone(), clock)?.replaying(&args.id)?;
    let mut journal = Journal::create(&folder.journal())?;
    let mut tally = Tally::default();
    let todo = Todo { launch, sessions: plan.sessions(&plan.arms[launch.arm]) };
    let consumers: Vec<&mut dyn Consumer> = vec![&mut journal, &mut tally];
    runner(plan, &folder.path, clock, consumers).run(&[todo]).await?;
    let summary = measure::summary(plan, &tally, Some(&folder.path));
    folder.write(&tally, &gate::settle(summary, &plan.gate)?)?;
    if let Some(failure) = tally.launches.get(&launch.number).and_then(|launch| launch.failure.as_ref()) {
        return Err(Error::usage(format!("the launch failed: {failure}")));
    }
    Ok(Again { result: folder.path, tally })
}

/// Compares the recorded corruptions with what the launch gave this time, and tells the race hits behind them.
fn show_again(recorded: &[Recorded], again: &Again, console: Console) -> Result<u8> {
    let about = &recorded[0].about;
    let evidence = run::evidence_folder(&again.result, &about.arm, about.launch, about.session);
    let came = if evidence.is_dir() { replay::read(&evidence)? } else { Vec::new() };
    let mut seen = false;
    for exchange in recorded.iter().filter(|exchange| is_corrupted(exchange)) {
        let round = exchange.about.round;
        let other = came.iter().filter(|exchange| is_corrupted(exchange)).find(|other| other.about.round == round);
        seen |= other.is_some();
        let same_bytes = other.map(|other| exchange.about.same_answer(&other.about));
        let same_races = other.and_then(|other| Some(exchange.races.as_ref()? == other.races.as_ref()?));
        let answer = again.tally.answer(about.launch, about.session, round);
        let call = answer.and_then(|answer| answer.calls.iter().find(|call| call.verdict == Verdict::Corrupted));
        let why = answer.map(|answer| answer.why.clone()).unwrap_or_default();
        console.emit(&json!({"session": about.session, "round": round, "corrupted_again": other.is_some(),
            "same_bytes": same_bytes, "same_races": same_races, "call": call, "why": why,
            "races": other.and_then(|other| other.races.as_ref()), "result_dir": again.result}));
        let what = match (same_bytes, call) {
            (None, _) => "intact this time".to_owned(),
            (Some(same), call) => format!(
                "corrupted again, {}: {}",
                if same { "the same bytes" } else { "other bytes" },
                call.map_or_else(String::new, |call| {
                    format!("{}: {}", call.class, call.detail.as_deref().unwrap_or_default())
                })
            ),
        };
        console.say(format!("session {} round {round}: {what}", about.session));
        console.say(why.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n"));
    }
    Ok(if seen { exit::FAIL } else { exit::PASS })
}

/// Replays the launch of a token: the whole run of its server up to there, and on, since a token says which interleaving
/// a launch took and not what it ran on. The virtual GPU checks that the launch takes the same one.
async fn replay_token(args: &Args, console: Console) -> Result<u8> {
    let token: Token = args.id.parse()?;
    if args.recorded || args.base_url.is_some() {
        return Err(Error::usage("a token is replayed by the engine that printed it")
            .hint("leave --recorded and --base-url out"));
    }
    let printed = replay::find_token(&args.id, &args.output_dir)?;
    let (result, recorded) = match &printed {
        Printed::Evidence(evidence) => (result_of(evidence), replay::read(evidence)?),
        Printed::Log(result, _) => (result.as_path(), Vec::new()),
    };
    let mut plan = plan_of(result)?;
    if !plan.load.lockstep {
        return Err(Error::usage(format!(
            "{} ran without lockstep, so its batches do not come again",
            result.display()
        ))
        .hint("replay the token of a run under lockstep"));
    }
    let launch = match &printed {
        Printed::Evidence(_) => launch(&plan, corrupted(&recorded)?.about.launch)?,
        Printed::Log(_, name) => {
            let named = |launch: &Launch| run::log_name(&plan.arms[launch.arm].name, launch.repetition) == *name;
            let launch = plan.launches().into_iter().find(named);
            launch.ok_or_else(|| Error::usage(format!("{name} is the log of no launch of {}", result.display())))?
        }
    };
    plan.arms[launch.arm].env.insert("TOOLSTORM_ORDER".into(), format!("replay:{token}"));
    let again = relaunch(args, &plan, launch).await?;
    let races = again.tally.launches.get(&launch.number).and_then(|launch| launch.races.clone()).unwrap_or_default();
    let replayed = races.replayed.ok_or_else(|| {
        Error::usage(format!("the run did not come to launch {} of the token", token.launch()))
            .hint("replay with the build, the environment and the result that printed it")
    })?;
    console.emit(&json!({"token": token.to_string(), "launch": token.launch(), "replayed": replayed,
        "result_dir": again.result}));
    let hits: Vec<_> = replayed["hits"].as_array().into_iter().flatten().collect();
    console.say(format!("launch {} took the same interleaving; race hits in it: {}", token.launch(), hits.len()));
    for hit in hits {
        console.say(format!("  {}", hit["words"].as_str().unwrap_or_default()));
    }
    if recorded.is_empty() {
        return Ok(exit::PASS);
    }
    show_again(&recorded, &again, console)
}

fn launch(plan: &Plan, number: u32) -> Result<Launch> {
    let launches = plan.launches();
    launches
        .into_iter()
        .find(|launch| launch.number == number)
        .ok_or_else(|| Error::usage(format!("the plan has no launch {number}")))
}

fn runner<'a>(plan: &'a Plan, result: &Path, clock: Clock, consumers: Vec<&'a mut dyn Consumer>) -> Runner<'a> {
    let (result, id, stop) = (result.to_owned(), "replay".into(), CancellationToken::new());
    Runner { plan, result, id, clock, selfcheck: None, stop, jobs: 1, consumers }
}
