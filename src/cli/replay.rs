//! `toolstorm replay`: a failing session again.

use std::path::{Path, PathBuf};

use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::{
    clock::Clock,
    drive::{self, Client},
    error::{Error, Result},
    exit, gate,
    report::{folder::Folder, measure, tally::Tally, terminal::Console},
    run::{Consumer, Plan, Runner, Todo, journal::Journal, replay, replay::Recorded},
    target,
    validate::{Judgement, Verdict},
};

/// Arguments of `replay`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Evidence folder, or the name of one
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
    let evidence = replay::find(&args.id, &args.output_dir)?;
    let recorded = replay::read(&evidence)?;
    let result = evidence.parent().and_then(Path::parent).unwrap_or(Path::new("."));
    let folder = Folder::open(result)?;
    let plan = folder.plan();
    if args.recorded {
        return rejudge(plan, &recorded, console);
    }
    let runtime =
        tokio::runtime::Runtime::new().map_err(|error| Error::usage(format!("cannot start the runtime: {error}")))?;
    if args.load {
        let first = recorded.iter().find(|recorded| recorded.about.parity.is_none()).ok_or_else(|| {
            Error::usage("only the turn's other form was damaged in this session").hint("replay it without --load")
        })?;
        return runtime.block_on(relaunch(args, plan, first, console));
    }
    runtime.block_on(resend(args, plan, &recorded, console))
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
        plan.target.kind = crate::scenario::TargetKind::Url;
        plan.target.base_url = Some(url.clone());
        plan.arms.iter_mut().for_each(|arm| arm.base_url = None);
    }
    let about = &recorded[0].about;
    let launch = launch(&plan, about.launch)?;
    let folder = tempfile::tempdir().map_err(|error| Error::usage(format!("no temporary folder: {error}")))?;
    let clock = Clock::start();
    let todo = Todo { launch, sessions: vec![about.session] };
    let runner = runner(&plan, folder.path(), clock, Vec::new());
    let server = runner.start(&todo, &plan.arms[launch.arm]).await?;
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
    Ok(if seen { exit::FAIL } else { exit::PASS })
}

/// The recorded body for the model that this server has; untouched where it is the same.
fn with_model(body: &[u8], model: &str) -> Result<Vec<u8>> {
    let broken = |error: serde_json::Error| Error::usage(format!("the recorded request is no JSON: {error}"));
    let mut value: serde_json::Value = serde_json::from_slice(body).map_err(broken)?;
    if value["model"] == *model {
        return Ok(body.to_owned());
    }
    value["model"] = json!(model);
    serde_json::to_vec(&value).map_err(broken)
}

/// Drives the whole launch again and looks at the session.
async fn relaunch(args: &Args, plan: &Plan, recorded: &Recorded, console: Console) -> Result<u8> {
    let about = &recorded.about;
    let launch = launch(plan, about.launch)?;
    let clock = Clock::start();
    let folder = Folder::create(&args.output_dir, plan.clone(), clock)?;
    let mut journal = Journal::create(&folder.journal())?;
    let mut tally = Tally::default();
    let todo = Todo { launch, sessions: plan.sessions(&plan.arms[launch.arm]) };
    let consumers: Vec<&mut dyn Consumer> = vec![&mut journal, &mut tally];
    runner(plan, &folder.path, clock, consumers).run(&[todo]).await?;
    let summary = measure::summary(plan, &tally, Some(&folder.path));
    folder.write(&tally, &gate::settle(summary, &plan.gate)?)?;
    let again = tally.calls().find(|call| {
        (call.session, call.round) == (about.session, about.round) && call.response_verdict == Verdict::Corrupted
    });
    console.emit(&json!({"session": about.session, "round": about.round, "corrupted_again": again.is_some(),
        "call": again, "result_dir": folder.path}));
    let what = again.as_ref().map_or_else(
        || "intact this time".to_owned(),
        |call| format!("corrupted again: {}: {}", call.class, call.detail.as_deref().unwrap_or_default()),
    );
    console.say(format!("session {} round {}: {what}", about.session, about.round));
    Ok(if again.is_some() { exit::FAIL } else { exit::PASS })
}

fn launch(plan: &Plan, number: u32) -> Result<crate::run::Launch> {
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
