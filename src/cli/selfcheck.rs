//! `toolstorm selfcheck`: recall and false positives of the harness itself.

use std::{sync::Arc, time::Duration};

use comfy_table::{Table, presets};
use serde_json::json;

use crate::{
    clock::Clock,
    drive::Turn,
    error::{Error, Result},
    exit,
    report::terminal::Console,
    run::{Plan, Selfcheck},
    seed::Seed,
    selfcheck::{self, Load, Mix, Played, Script, play},
    validate::{Canaries, Expectation, ExpectedCall, Tools, record::tool_choice},
};

/// Arguments of `selfcheck`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Sessions in all
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    sessions: u64,
    /// Sessions at once
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    concurrency: u32,
    /// Rounds of each session
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Faulty answers in a thousand
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1000))]
    faulty_permille: u32,
    /// Seed of every answer: a number or a commit hash
    #[arg(long, default_value = "1")]
    seed: Seed,
    /// Seconds of silence after which a body counts as stalled
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    stall_timeout: f64,
}

/// Runs `selfcheck`; the exit code says whether the harness may be believed.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let stall = Duration::try_from_secs_f64(args.stall_timeout)
        .map_err(|error| Error::usage(format!("--stall-timeout {}: {error}", args.stall_timeout)))?;
    let load = Load {
        sessions: args.sessions,
        concurrency: args.concurrency as usize,
        rounds: args.rounds,
        seed: args.seed,
        mix: Mix { faulty_permille: args.faulty_permille },
        stall,
    };
    let played = check(load)?;
    report(&load, &played, console);
    Ok(if played.score.is_perfect() { exit::PASS } else { exit::FAIL })
}

/// The short self-check before a run: at the run's concurrency, at least 16 and at most 512, every class several times.
pub(super) fn before(plan: &Plan, console: Console) -> Result<Selfcheck> {
    let most = plan.arms.iter().map(|arm| arm.concurrency).max().unwrap_or(1);
    let concurrency = most.clamp(16, 512);
    let load = Load {
        // Fewer sessions than run at once would not reach the concurrency.
        sessions: u64::from(concurrency).max(300),
        concurrency: concurrency as usize,
        rounds: 2,
        seed: Seed(plan.seed),
        mix: Mix { faulty_permille: 500 },
        stall: Duration::from_secs(5),
    };
    console.note(format!("self-check: {} sessions, {} at once", load.sessions, load.concurrency));
    let played = check(load)?;
    let score = &played.score;
    if !score.is_perfect() {
        let first = played.mistakes.first().map_or_else(String::new, |mistake| format!(": {mistake}"));
        let Load { sessions, rounds, seed, .. } = load;
        return Err(Error::usage(format!("the harness fails its own self-check{first}")).hint(format!(
            "see all of it: toolstorm selfcheck --sessions {sessions} --concurrency {concurrency} --rounds {rounds} \
             --seed {} --stall-timeout {}",
            seed.0,
            load.stall.as_secs()
        )));
    }
    Ok(Selfcheck {
        sessions: load.sessions,
        concurrency: load.concurrency as u64,
        responses: score.responses(),
        faulty: score.faulty(),
        recall: score.recall(),
        false_positives: score.false_positives(),
    })
}

/// Plays a load against the harness itself.
pub(super) fn check(load: Load) -> Result<Played> {
    let canaries = Arc::new(Canaries::new());
    // Answers leak nonces of the next two sessions, also of those behind the last one.
    for session in 0..load.sessions + 2 {
        canaries.add(&selfcheck::canary(session));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::usage(format!("cannot start a runtime: {error}")))?;
    let ask = move |script: &Script, round| turn(script, round, &canaries);
    runtime.block_on(play(load, Clock::start(), Arc::new(ask)))
}

/// The request of a script, and what the judge is told about it.
fn turn(script: &Script, round: u32, canaries: &Arc<Canaries>) -> Turn {
    let expected = |call: &selfcheck::Dictated| ExpectedCall {
        name: call.name.clone(),
        arguments: call.arguments.clone(),
        text: None,
    };
    let expectation = Expectation {
        tools: Tools::new(script.tools.clone()),
        tool_choice: tool_choice(Some(&script.tool_choice.into())).unwrap_or_default(),
        calls: script.dictated.as_ref().map(|calls| calls.iter().map(expected).collect()),
        own_canary: Some(script.canary.clone()),
        foreign_tools: script.foreign_tools.clone(),
        canaries: Some(Arc::clone(canaries)),
        ..Expectation::default()
    };
    let body = json!({"model": "selfcheck", "stream": script.stream, "messages": []});
    Turn {
        round,
        body: body.to_string().into_bytes(),
        stream: script.stream,
        cancel_after: None,
        think: Duration::ZERO,
        think_steps: 0,
        expected_sha256: Vec::new(),
        dictated: Vec::new(),
        expectation,
    }
}

fn report(load: &Load, played: &Played, console: Console) {
    let score = &played.score;
    let (responses, faulty, recall) = (score.responses(), score.faulty(), score.recall());
    let false_positives = score.false_positives();
    let rate = responses as f64 / played.wall.as_secs_f64();
    let headroom = played.headroom();
    let verdict = if score.is_perfect() { "pass" } else { "fail" };
    console.emit(&json!({
        "schema": "toolstorm-selfcheck/1", "verdict": verdict, "responses": responses, "faulty": faulty,
        "recall": recall, "false_positives": false_positives, "confusion": score.confusion(), "seed": load.seed.0,
        "sessions": load.sessions, "concurrency": load.concurrency, "rounds": load.rounds,
        "wall_s": played.wall.as_secs_f64(), "responses_per_s": rate, "judging_s": played.judging.as_secs_f64(),
        "headroom": headroom, "mistakes": played.mistakes,
    }));
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_header(["truth", "judged", "responses", ""]);
    for cell in score.confusion() {
        let mark = if cell.right { "" } else { "wrong" };
        table.add_row([cell.truth, &cell.judged, &cell.count.to_string(), mark]);
    }
    console.say(table.to_string());
    for mistake in &played.mistakes {
        console.say(mistake);
    }
    let recall = recall.map_or_else(|| "none was faulty".to_owned(), |recall| format!("{:.2} %", recall * 100.0));
    console.say(format!(
        "{responses} responses, {faulty} faulty; recall {recall}, {false_positives} false positives: {verdict}"
    ));
    let headroom = headroom.map_or_else(String::new, |headroom| {
        format!("; judging took {:.2} s: one core follows {headroom:.0} times this load", played.judging.as_secs_f64())
    });
    console.say(format!("{rate:.0} responses/s over {:.1} s{headroom}", played.wall.as_secs_f64()));
}
