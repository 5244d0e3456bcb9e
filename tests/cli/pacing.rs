//! Loads that go by time.

use crate::{context::TestContext, scripted::Scripted};

#[test]
fn open_arrivals_report_the_rate_that_was_asked_and_the_delay() {
    let (context, server) = (TestContext::new(), Scripted::faithful());
    let ran = context.load(&server.url, &["--arrival", "constant", "--rate", "20", "--max-upper", "0.5"]);
    let arm = ran.json()["arms"][0].clone();
    assert_eq!((ran.code, arm["requested_rate"].as_f64()), (0, Some(20.0)), "{}", ran.stderr);
    // Six starts at 20 a second take a quarter of a second at least, however fast the answers are.
    assert!(arm["achieved_rate"].as_f64().is_some_and(|rate| rate < 6.0 / 0.25), "{arm}");
    assert!(arm["client_queue_time"].as_f64().is_some() && arm["schedule_delay"].as_f64().is_some());
}

#[test]
fn a_run_by_time_starts_sessions_until_it_is_over_and_leaves_the_warm_up_out() {
    let (context, server) = (TestContext::new(), Scripted::faithful());
    let ran = context.load(&server.url, &["--duration", "700ms", "--warmup", "300ms", "--concurrency", "2"]);
    let summary = ran.json();
    let started = summary["arms"][0]["sessions_started"].as_u64().unwrap();
    let calls = crate::context::lines(&context.result().join("calls.jsonl"));
    let warm = calls.iter().filter(|call| call["warmup"] == true).count();
    assert!(started > 0 && warm > 0, "{started} sessions, {warm} calls of the warm-up");
    assert_eq!(summary["arms"][0]["calls"].as_u64(), Some((calls.len() - warm) as u64));
    assert_eq!(summary["arms"][0]["sessions_judged"].as_u64(), Some(started));
}

#[test]
fn a_ramp_holds_the_first_sessions_back() {
    let (context, server) = (TestContext::new(), Scripted::faithful());
    let ran = context.load(&server.url, &["--ramp", "400ms", "--concurrency", "4", "--max-upper", "0.5"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let journal = crate::context::lines(&context.result().join("journal.jsonl"));
    let offsets: Vec<_> = journal
        .iter()
        .filter(|line| line["event"] == "session_started")
        .map(|line| line["offset_ms"].as_f64().unwrap())
        .collect();
    assert!(offsets[1] >= 100.0 && offsets[3] >= 300.0, "{offsets:?}");
}

#[test]
fn a_sequential_test_ends_an_arm_as_soon_as_it_has_decided() {
    use crate::scripted::Act;
    let context = TestContext::new();
    let damage = || Act::Damage(|text| text.replacen("\"ref\": \"0-", "\"ref\": \"7-", 1));
    let server = Scripted::start(move |_| damage());
    let test = ["--until", "decided", "--p1", "0.2", "--sessions", "200", "--rounds", "1", "--concurrency", "2"];
    let run =
        |url: &str| context.run(&[&["run", "agentic", "--json", "--quiet", "--base-url", url], &test[..]].concat());
    let ran = run(&server.url);
    let arm = ran.json()["arms"][0].clone();
    assert_eq!((ran.code, arm["sequential"]["decision"].as_str()), (1, Some("high")), "{}", ran.stderr);
    assert!(server.requests() < 20, "{} requests", server.requests());
    assert!(arm["reason"].as_str().is_some_and(|reason| reason.contains("sequential test after 1 sessions")), "{arm}");

    let server = Scripted::faithful();
    let ran = run(&server.url);
    let arm = ran.json()["arms"][0].clone();
    assert_eq!((ran.code, arm["sequential"]["decision"].as_str()), (0, Some("low")), "{}", ran.stderr);
    assert!((10..60).contains(&arm["sequential"]["sessions"].as_u64().unwrap()), "{arm}");
}
