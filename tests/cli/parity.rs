//! Parser or engine, over HTTP; a run that proves its harness first; what a poisoned session changes, and what not.

use std::time::Duration;

use serde_json::Value;

use crate::{
    context::{TestContext, lines, read},
    scripted::{Act, Request, Scripted},
};

/// One letter of the session's own text is another one.
fn alter(text: String) -> String {
    text.replacen("\"ref\": \"0-", "\"ref\": \"7-", 1)
}

fn header(request: &Request, name: &str) -> u64 {
    let value = request.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value);
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no header {name}"))
}

/// A run against a server that breaks the first round of every session where `breaks` says so.
fn compare(breaks: fn(&Request) -> bool, flags: &[&str]) -> (Value, usize, TestContext) {
    let context = TestContext::new();
    let server = Scripted::start(move |request| {
        if header(request, "x-toolstorm-round") == 0 && breaks(request) {
            Act::Damage(alter)
        } else {
            Act::Answer(Duration::ZERO)
        }
    });
    let arm = context.load(&server.url, flags).json()["arms"][0].clone();
    (arm, server.requests(), context)
}

#[test]
fn a_server_that_breaks_its_streams_only_has_its_stream_parser_suspected() {
    let (arm, requests, context) = compare(|request| request.body["stream"] == true, &["--parity", "form"]);
    let parity = &arm["parity"];
    assert_eq!(parity["suspect"], "stream_parser", "{parity}");
    // A session whose first turn was asked as a stream ended there; the others had their second round.
    let corrupted = arm["sessions_corrupted"].as_u64().unwrap();
    assert!((1..6).contains(&corrupted), "{arm}");
    assert_eq!(parity["broken"]["streamed_only"], 6);
    assert_eq!(parity["classes"]["value_altered"]["streamed_only"], 6);
    assert_eq!((&parity["broken"]["unary_only"], &parity["broken"]["both"]), (&0.into(), &0.into()));
    assert_eq!(parity["compared"], 6 + (6 - corrupted));
    assert_eq!(requests as u64, 2 * (6 + (6 - corrupted)));
    // The other form is outside every rate.
    assert_eq!(arm["calls"], 6 + (6 - corrupted));
    assert_eq!(arm["calls_corrupted"], corrupted);

    let result = context.result();
    assert!(read(&result.join("summary.md")).contains("suspect the server's stream parser"));
    assert!(read(&result.join("report.html")).contains("6 broken only streamed"));
    let again = context.run(&["report", result.to_str().unwrap()]);
    assert!(
        again.stdout.contains("value_altered: 6 broken only streamed, 0 only unary, 0 in both"),
        "{}",
        again.stdout
    );
    let evidence: Vec<_> = std::fs::read_dir(result.join("evidence")).unwrap().map(|entry| entry.unwrap()).collect();
    assert_eq!(evidence.len(), 6, "broken answers of the other form leave evidence, too");
    for folder in evidence {
        let ran = context.run(&["replay", folder.path().to_str().unwrap(), "--recorded"]);
        assert_eq!(ran.code, 1, "{}{}", ran.stdout, ran.stderr);
    }
}

#[test]
fn the_other_forms_point_where_the_damage_is() {
    let (unary, ..) = compare(|request| request.body["stream"] == false, &["--parity", "form"]);
    assert_eq!(unary["parity"]["suspect"], "unary_parser", "{}", unary["parity"]);
    let (alike, ..) = compare(|_| true, &["--parity", "form", "--stream", "always"]);
    assert_eq!(alike["parity"]["suspect"], "engine");
    assert_eq!(alike["parity"]["broken"]["both"], 6);
    // The scripted server parses whatever is asked of it, so there is no raw text to compare with.
    let (intact, requests, _) = compare(|_| false, &["--parity", "raw"]);
    assert_eq!((intact["parity"]["suspect"].as_str(), &intact["parity"]["raw_compared"]), (Some("nobody"), &0.into()));
    assert_eq!(requests, 3 * 2 * 6);
    let (without, requests, _) = compare(|_| false, &[]);
    assert_eq!((&without["parity"], requests), (&Value::Null, 2 * 6));
}

#[test]
fn raw_text_acquits_the_engine() {
    let context = TestContext::new();
    let server = Scripted::start(|request| match request.body["tool_choice"].as_str() {
        Some("none") => Act::Text(|text| text),
        _ => Act::Damage(alter),
    });
    let arm = context.load(&server.url, &["--parity", "raw"]).json()["arms"][0].clone();
    let parity = &arm["parity"];
    assert_eq!((parity["suspect"].as_str(), &parity["raw_compared"]), (Some("parser"), &6.into()), "{parity}");
    let context = TestContext::new();
    let server = Scripted::start(|request| match request.body["tool_choice"].as_str() {
        Some("none") => Act::Text(alter),
        _ => Act::Damage(alter),
    });
    let arm = context.load(&server.url, &["--parity", "raw"]).json()["arms"][0].clone();
    assert_eq!(arm["parity"]["suspect"], "engine", "{}", arm["parity"]);
    let stems = std::fs::read_dir(context.result().join("evidence")).unwrap();
    assert!(stems.flatten().all(|folder| folder.path().join("round-00-raw-response.bin").is_file()));
}

#[test]
fn parity_needs_dictated_turns() {
    let context = TestContext::new();
    context.write("task.toml", "name = \"task\"\nstyle = \"task\"\nparity = \"form\"\n");
    let ran = context.run(&["run", "task.toml", "--base-url", "http://127.0.0.1:9"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("`parity` compares dictated calls") && ran.stderr.contains("hint:"), "{}", ran.stderr);
}

/// The same faulty server under every policy: what follows a corruption is outside the primary rates.
#[test]
fn the_primary_rates_do_not_depend_on_what_becomes_of_a_poisoned_session() {
    const PRIMARY: [&str; 9] = [
        "sessions_judged",
        "sessions_corrupted",
        "session_corruption_rate",
        "calls",
        "calls_corrupted",
        "corruption_rate",
        "rounds_corrupted",
        "first_corruption_round",
        "classes",
    ];
    let run = |policy: &str| {
        let context = TestContext::new();
        let shipped = include_str!("../../scenarios/agentic.toml");
        let text = shipped.replace("poisoned = \"stop\"", &format!("poisoned = \"{policy}\""));
        assert!(text.contains(policy));
        context.write("poisoned.toml", &text);
        // A function of session and round alone; some sessions break twice, some never, and one poisoned history is refused.
        let server = Scripted::start(|request| {
            let (session, round) = (header(request, "x-toolstorm-session"), header(request, "x-toolstorm-round"));
            match (session * 7 + round * 3) % 5 {
                0 => Act::Damage(alter),
                1 if request.body.to_string().contains("7-0-") => {
                    Act::Status(400, "{\"error\": {\"message\": \"no\"}}")
                }
                _ => Act::Answer(Duration::ZERO),
            }
        });
        let flags = ["--json", "--quiet", "--rounds", "4", "--sessions", "20", "--base-url", &server.url];
        let arm = context.run(&[&["run", "poisoned.toml"], &flags[..]].concat()).json()["arms"][0].clone();
        (PRIMARY.map(|name| arm[name].clone()), arm["calls_after_corruption"].as_u64().unwrap(), server.requests())
    };
    let (stopped, after, few) = run("stop");
    assert!(stopped[1].as_u64().is_some_and(|corrupted| (5..20).contains(&corrupted)), "{stopped:?}");
    assert_eq!(after, 0);
    for policy in ["substitute", "continue"] {
        let (rates, after, requests) = run(policy);
        assert_eq!(rates, stopped, "{policy}");
        assert!(after > 5 && requests > few, "{policy}: {after} calls after a corruption, {requests} requests");
    }
}

#[test]
fn a_run_can_prove_its_harness_first() {
    let (context, server) = (TestContext::new(), Scripted::faithful());
    let ran = context.load(&server.url, &["--selfcheck", "--max-upper", "0.5"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let check = &ran.json()["selfcheck"];
    assert_eq!(
        (&check["responses"], &check["recall"], &check["false_positives"]),
        (&600.into(), &1.0.into(), &0.into())
    );
    let result = context.result();
    assert!(lines(&result.join("journal.jsonl"))[1]["selfcheck"]["faulty"].as_u64().is_some_and(|faulty| faulty > 200));
    assert!(read(&result.join("summary.md")).contains("self-check before: 600 responses"));
}

#[test]
fn a_scenario_adds_markers_of_its_own() {
    let leaks = |markup: &str| {
        let context = TestContext::new();
        let text = include_str!("../../scenarios/agentic.toml");
        context.write("marked.toml", &format!("{text}\nmarkup = [{markup}]\n"));
        let server = Scripted::start(|_| Act::Text(|_| "§call§ store it".to_owned()));
        let flags =
            ["--json", "--quiet", "--rounds", "1", "--sessions", "2", "--stream", "never", "--base-url", &server.url];
        let ran = context.run(&[&["run", "marked.toml"], &flags[..]].concat());
        if ran.code == 2 { Value::from(ran.stderr) } else { ran.json()["arms"][0]["classes"].clone() }
    };
    assert_eq!(leaks("\"§call§\""), serde_json::json!({"markup_leak": 2}));
    assert_eq!(leaks(""), serde_json::json!({"call_lost": 2}));
    assert!(leaks("\"\"").as_str().is_some_and(|error| error.contains("`markup` must be")));
}
