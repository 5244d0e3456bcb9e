//! Runs that do not get to their end.

use std::time::Duration;

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    context::{Ran, TestContext, lines},
    scripted::{Act, Scripted},
};

const LOAD: [&str; 12] = [
    "run",
    "agentic",
    "--json",
    "--quiet",
    "--rounds",
    "2",
    "--sessions",
    "6",
    "--concurrency",
    "1",
    "--max-upper",
    "0.5",
];

/// A server that answers six requests and then keeps everybody waiting.
fn sticky() -> Scripted {
    Scripted::start(|request| if request.number < 6 { Act::Answer(Duration::ZERO) } else { Act::Silence })
}

fn wait_for(server: &Scripted, requests: usize) {
    for _ in 0..600 {
        if server.requests() >= requests {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("the server saw {} requests", server.requests());
}

fn pid(child: &std::process::Child) -> Pid {
    Pid::from_raw(child.id().try_into().unwrap())
}

#[test]
fn an_interrupt_ends_the_run_at_once_with_what_there_is() {
    let (context, server) = (TestContext::new(), sticky());
    let child = context.start(&[&LOAD[..], &["--base-url", &server.url]].concat());
    wait_for(&server, 7);
    kill(pid(&child), Signal::SIGINT).unwrap();
    // The run waits for a server that stays silent for a minute.
    let ran = Ran::of(&child.wait_with_output().unwrap());
    let summary = ran.json();
    assert_eq!((ran.code, summary["interrupted"].as_bool()), (3, Some(true)), "{}", ran.stderr);
    assert_eq!(summary["arms"][0]["calls"].as_u64(), Some(6));
    assert_eq!(lines(&context.result().join("calls.jsonl")).len(), 6);
}

#[test]
fn a_killed_run_keeps_what_was_judged_and_goes_on_from_there() {
    let (context, server) = (TestContext::new(), sticky());
    let mut child = context.start(&[&LOAD[..], &["--base-url", &server.url, "--model", "m"]].concat());
    wait_for(&server, 7);
    child.kill().unwrap();
    child.wait().unwrap();

    let result = context.result();
    let name = result.to_str().unwrap();
    let early = context.run(&["gate", name]);
    assert_eq!(early.code, 2);
    assert!(early.stderr.contains("the run was cut off"), "{}", early.stderr);
    let report = context.run(&["report", "--json", name]).json();
    assert_eq!(context.run(&["gate", name, "--git-bisect-codes"]).code, 125);
    let judged = report["arms"][0]["sessions_judged"].as_u64().unwrap();
    assert_eq!(report["arms"][0]["calls"].as_u64(), Some(6));
    assert_eq!((judged, report["interrupted"].as_bool()), (3, Some(true)));

    let healthy = Scripted::faithful();
    let mut plan = LOAD.to_vec();
    plan.extend(["--base-url", &healthy.url, "--model", "m", "--resume", name]);
    let refused = context.run(&plan);
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("another plan"), "{}", refused.stderr);
}

#[test]
fn a_resumed_run_drives_what_is_left() {
    let context = TestContext::new();
    let slow = Scripted::start(|request| match request.number {
        6 => Act::Silence,
        _ => Act::Answer(Duration::ZERO),
    });
    let plan = [&LOAD[..], &["--base-url", &slow.url]].concat();
    let mut child = context.start(&plan);
    wait_for(&slow, 7);
    child.kill().unwrap();
    child.wait().unwrap();

    let name = context.result().to_str().unwrap().to_owned();
    let evidence = context.result().join("evidence");
    for session in ["agentic-0-s002", "agentic-0-s003"] {
        std::fs::create_dir_all(evidence.join(session)).unwrap();
    }
    let ran = context.run(&[&plan[..], &["--resume", &name]].concat());
    let summary = ran.json();
    assert_eq!((ran.code, summary["arms"][0]["sessions_judged"].as_u64()), (0, Some(6)), "{}", ran.stderr);
    // Evidence of a session that was driven anew is kept apart.
    let there = |session: &str| evidence.join(session).exists();
    assert_eq!((there("agentic-0-s002"), there("agentic-0-s003")), (true, false));
    let names = std::fs::read_dir(context.result()).unwrap().map(|entry| entry.unwrap().file_name());
    let aside = names.filter(|name| name.to_string_lossy().starts_with("evidence-before-"));
    let aside: Vec<_> = aside.map(|name| context.result().join(name).join("agentic-0-s003").exists()).collect();
    assert_eq!(aside, [true]);
    // Three sessions were over; the three others were driven from their start.
    assert_eq!(slow.requests(), 7 + 3 * 2);
    assert_eq!(lines(&context.result().join("calls.jsonl")).len(), 12);
}

/// A session may not be corrupted in the journal while the call that shows it was never reported.
#[test]
fn an_interrupt_between_a_corruption_and_its_report_leaves_neither() {
    let context = TestContext::new();
    let server = Scripted::start(|request| match request.number {
        0 => Act::Damage(|text| text.replace('a', "b")),
        _ => Act::Silence,
    });
    let options = ["run", "agentic", "--json", "--quiet", "--rounds", "1", "--sessions", "1", "--parity", "form"];
    let child = context.start(&[&options[..], &["--base-url", &server.url, "--model", "m"]].concat());
    wait_for(&server, 2);
    kill(pid(&child), Signal::SIGINT).unwrap();
    let ran = Ran::of(&child.wait_with_output().unwrap());
    let arm = &ran.json()["arms"][0];
    assert_eq!((&arm["calls_corrupted"], &arm["sessions_corrupted"]), (&0.into(), &0.into()), "{}", ran.stderr);
}
