//! What a run makes of servers that answer, damage, refuse, stall and vanish.

use std::time::Duration;

use crate::{
    context::TestContext,
    scripted::{Act, Scripted},
};

#[test]
fn a_faithful_server_passes_and_few_sessions_are_inconclusive() {
    let (context, server) = (TestContext::new(), Scripted::faithful());
    let ran = context.load(&server.url, &["--max-upper", "0.5"]);
    let summary = ran.json();
    let arm = &summary["arms"][0];
    assert_eq!((ran.code, summary["verdict"].as_str()), (0, Some("pass")), "{}", ran.stderr);
    assert_eq!((arm["sessions_judged"].as_u64(), arm["calls"].as_u64()), (Some(6), Some(12)));
    assert_eq!((arm["calls_corrupted"].as_u64(), &arm["corruption_rate"]), (Some(0), &0.0.into()));
    assert_eq!(server.requests(), 12);

    let ran = context.load(&server.url, &[]);
    assert_eq!((ran.code, ran.json()["verdict"].as_str()), (3, Some("inconclusive")));
}

#[test]
fn damage_fails_the_gate_and_ends_its_session() {
    let context = TestContext::new();
    let server = Scripted::start(|request| match request.number {
        0 | 3 => Act::Damage(|text| text.replacen("\"ref\": \"0-", "\"ref\": \"7-", 1)),
        _ => Act::Answer(Duration::ZERO),
    });
    let ran = context.load(&server.url, &["--concurrency", "1"]);
    let arm = ran.json()["arms"][0].clone();
    assert_eq!(ran.code, 1);
    assert_eq!((arm["sessions_judged"].as_u64(), arm["sessions_corrupted"].as_u64()), (Some(6), Some(2)));
    // Two sessions ended with their first call, the four others had two rounds.
    assert_eq!((server.requests(), arm["classes"]["value_altered"].as_u64()), (2 + 4 * 2, Some(2)));
    let message = arm["reason"].as_str().unwrap();
    assert!(message.contains("2 of 6 corrupted"), "{message}");
}

#[test]
fn every_wait_is_bounded_and_lost_responses_are_no_corruption() {
    type Case<'a> = (fn() -> Act, &'a str, &'a [&'a str]);
    let cases: [Case<'_>; 5] = [
        (|| Act::Stall, "stream_stalled", &["--stall-timeout", "200ms", "--stream", "always"]),
        (|| Act::Cut, "stream_truncated", &["--stream", "always"]),
        (|| Act::Silence, "http_error", &["--timeout", "300ms"]),
        (|| Act::Status(429, "{\"error\": {\"message\": \"slow down\"}}"), "server_refused", &[]),
        (|| Act::Status(400, "{\"error\": {\"message\": \"no\"}}"), "request_rejected", &[]),
    ];
    for (act, class, flags) in cases {
        let (context, server) = (TestContext::new(), Scripted::start(move |_| act()));
        let ran = context.load(&server.url, flags);
        let arm = ran.json()["arms"][0].clone();
        assert_eq!(ran.code, 3, "{class}: {}", ran.stdout);
        assert!(arm["infra"][class].as_u64().is_some_and(|count| count == 6), "{class}: {}", arm["infra"]);
        assert_eq!((arm["sessions_judged"].as_u64(), arm["corruption_rate"].is_null()), (Some(0), true), "{class}");
    }
}

#[test]
fn a_request_without_a_response_is_sent_again_only_when_asked() {
    for (retries, judged) in [("0", 5), ("2", 6)] {
        let context = TestContext::new();
        let server = Scripted::start(|request| match request.number {
            0 => Act::Silence,
            _ => Act::Answer(Duration::ZERO),
        });
        let ran = context.load(&server.url, &["--concurrency", "1", "--timeout", "300ms", "--retries", retries]);
        assert_eq!(ran.json()["arms"][0]["sessions_judged"].as_u64(), Some(judged), "{retries} retries");
    }
}

#[test]
fn cancelled_requests_are_counted_apart_and_sent_again() {
    let (context, server) = (TestContext::new(), Scripted::faithful());
    let ran = context.load(&server.url, &["--cancel-rate", "1", "--max-upper", "0.5"]);
    let arm = ran.json()["arms"][0].clone();
    let cancelled = arm["cancelled"].as_u64().unwrap();
    assert!(cancelled > 0, "nothing was cancelled: {arm}");
    assert_eq!((ran.code, server.requests() as u64), (0, 12 + cancelled));
    assert_eq!(arm["calls"].as_u64(), Some(12));
}

#[test]
fn a_server_that_is_not_there_is_a_set_up_error() {
    let context = TestContext::new();
    let ran = context.load("http://127.0.0.1:9", &[]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert!(ran.stderr.contains("cannot reach it: "), "{}", ran.stderr);
    // Nor is it asked for its models.
    let named = context.load("http://127.0.0.1:9", &["--model", "m"]);
    assert_eq!(named.code, 2, "{}", named.stdout);
    assert!(named.stderr.contains("check that a server runs at http://127.0.0.1:9"), "{}", named.stderr);
}

#[test]
fn the_key_goes_to_the_server_and_nowhere_else() {
    let (context, server) = (TestContext::new(), Scripted::faithful());
    let mut command =
        context.command(&["run", "agentic", "--base-url", &server.url, "--sessions", "2", "--rounds", "1"]);
    let output = command.args(["--api-key-env", "MY_KEY"]).env("MY_KEY", "s3cret-value").output().unwrap();
    let sent = server.seen.lock().unwrap();
    assert!(sent[0].headers.contains(&("authorization".into(), "Bearer s3cret-value".into())));
    let mut pending = vec![context.path("results")];
    let mut files = 0;
    while let Some(path) = pending.pop() {
        if path.is_dir() {
            pending.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            files += 1;
            let bytes = std::fs::read(&path).unwrap();
            assert!(!bytes.windows(12).any(|window| window == b"s3cret-value"), "{}", path.display());
        }
    }
    assert!(files >= 9);
    assert!(!String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).contains("s3cret-value"));
}
