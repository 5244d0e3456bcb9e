//! `gate`, `compare` and `plan` on finished results: every verdict, every exit code.

use std::time::Duration;

use serde_json::Value;

use crate::{
    context::{TestContext, lines, read},
    scripted::{Act, Request, Scripted},
};

fn intact() -> Act {
    Act::Answer(Duration::ZERO)
}

fn damage() -> Act {
    Act::Damage(|text| text.replacen("\"ref\": \"0-", "\"ref\": \"7-", 1))
}

/// A result of six sessions with two rounds each.
fn result(script: impl Fn(&Request) -> Act + Send + Sync + 'static) -> TestContext {
    let context = TestContext::new();
    let server = Scripted::start(script);
    context.load(&server.url, &["--concurrency", "1"]);
    context
}

fn gate(context: &TestContext, more: &[&str]) -> (i32, Value) {
    let result = context.result().display().to_string();
    let ran = context.run(&[&["gate", &result, "--json"], more].concat());
    let ruling = if ran.stdout.is_empty() { Value::Null } else { ran.json() };
    (ran.code, ruling)
}

#[track_caller]
fn rules(context: &TestContext, more: &[&str], code: i32, verdict: &str, reason: &str) {
    let (found, ruling) = gate(context, more);
    assert_eq!((found, ruling["verdict"].as_str()), (code, Some(verdict)), "{ruling}");
    let said = ruling["reason"].as_str().unwrap();
    assert!(said.contains(reason), "{said}");
    let skipped = gate(context, &[more, &["--git-bisect-codes"]].concat()).0;
    assert_eq!(skipped, if code > 1 { 125 } else { code });
}

#[test]
fn a_clean_result_passes_or_is_too_small_for_what_is_asked() {
    let context = result(|_| intact());
    rules(&context, &[], 3, "inconclusive", "0 of 6 corrupted, at most 39.3 % at 95 %: too few sessions");
    rules(&context, &["--max-upper", "0.4"], 0, "pass", "at most 39.3 % at 95 %: passes max_upper 40 %");
    rules(&context, &["--max-upper", "0.4", "--min-sessions", "7"], 3, "inconclusive", "fewer than min_sessions 7");
    rules(&context, &["--max-upper", "0.4", "--confidence", "0.99"], 3, "inconclusive", "at most 53.6 % at 99 %");
}

#[test]
fn a_threshold_is_compared_with_the_number_it_names() {
    let context = result(|_| intact());
    let with = |threshold: &str| gate(&context, &["--max-upper", "0.4", "--threshold", threshold]);
    assert_eq!(with("corruption_rate_upper<0.4").0, 0);
    let (code, ruling) = with("corruption_rate_upper<0.01");
    assert_eq!((code, ruling["verdict"].as_str()), (1, Some("fail")));
    assert!(ruling["reason"].as_str().unwrap().contains("misses the threshold corruption_rate_upper<0.01"));
    assert_eq!(with("agentic:calls>=12").0, 0);
    assert_eq!(with("agentic:calls>12").0, 1);
    assert_eq!(with("hazards<1").0, 3);
    assert_eq!(with("no_such_number<1").0, 2);
    assert_eq!(gate(&context, &["--threshold", "calls", "--git-bisect-codes"]).0, 125);
}

#[test]
fn a_corrupted_result_fails_unless_it_is_allowed() {
    let context = result(|request| if request.number == 2 { damage() } else { intact() });
    rules(&context, &[], 1, "fail", "1 of 6 corrupted, more than max_corruption 0 allows");
    rules(&context, &["--max-corruption", "1"], 3, "inconclusive", "1 of 6 corrupted, at most 58.2 % at 95 %");
    rules(&context, &["--max-corruption", "1", "--max-upper", "0.6"], 0, "pass", "passes max_upper 60 %");
    let wanted = ["--max-corruption", "1", "--max-upper", "0.001"];
    rules(&context, &wanted, 1, "fail", "1 of 6 corrupted, at least 0.9 % at 95 %: fails max_upper 0.1 %");
}

#[test]
fn a_result_without_observations_is_inconclusive() {
    let refused = || Act::Status(503, "{\"error\": {\"message\": \"no\"}}");
    let context = result(move |_| refused());
    rules(&context, &["--max-upper", "1"], 3, "inconclusive", "no tool call was observed; the first response: ");
    rules(&context, &["--max-upper", "1"], 3, "inconclusive", "status 503: ");

    // One session is lost; the others are clean, but too much of the load never arrived.
    let context = result(move |request| if request.number == 2 { refused() } else { intact() });
    rules(&context, &["--max-upper", "0.5"], 3, "inconclusive", "9.1 % of responses lost");
    rules(&context, &["--max-upper", "0.5", "--max-infra", "0.1"], 0, "pass", "0 of 5 corrupted");
}

#[test]
fn what_is_no_result_is_a_set_up_error() {
    let context = TestContext::new();
    let ran = context.run(&["gate", "nothing-here"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("nothing-here"), "{}", ran.stderr);
    assert_eq!(context.run(&["gate", "nothing-here", "--git-bisect-codes"]).code, 125);
}

#[test]
fn two_results_are_compared_only_when_they_sent_the_same() {
    let context = TestContext::new();
    let faulty = Scripted::start(|request| if request.number % 2 == 0 { damage() } else { intact() });
    let sound = Scripted::faithful();
    let load = |server: &Scripted, seed| {
        let ran = context.load(&server.url, &["--concurrency", "1", "--seed", seed]);
        ran.json()["result_dir"].as_str().unwrap().to_owned()
    };
    let (bad, good, other) = (load(&faulty, "1"), load(&sound, "1"), load(&sound, "2"));
    let ran = context.run(&["compare", &bad, &good, "--json"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let pair = ran.json()["comparisons"][0].clone();
    let corrupted = |side: &str| pair["sessions"][side]["events"].as_u64().unwrap();
    assert!(corrupted("first") >= 3 && corrupted("second") == 0, "{pair}");
    assert!(pair["sessions"]["fisher_p"].as_f64().is_some_and(|p| p > 0.0 && p < 1.0));
    let axes: Vec<_> = pair["tables"].as_array().unwrap().iter().map(|table| table["by"].as_str().unwrap()).collect();
    assert!(
        ["class", "round", "output tokens", "requests in flight"].iter().all(|axis| axes.contains(axis)),
        "{axes:?}"
    );

    let file = context.path(&good).join("calls.jsonl");
    let whole = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    let damaged = context.run(&["compare", &bad, &good]);
    assert!(damaged.code == 2 && damaged.stderr.contains("toolstorm report "), "{}", damaged.stderr);
    std::fs::write(&file, whole).unwrap();

    let refused = context.run(&["compare", &bad, &other, "--json"]);
    assert_eq!(refused.code, 2, "{}", refused.stdout);
    assert!(refused.stderr.contains("did not send the same sessions"), "{}", refused.stderr);
    let flagged = context.run(&["compare", &bad, &other, "--json", "--different-workload"]);
    assert_eq!((flagged.code, &flagged.json()["same_workload"]), (0, &false.into()));
}

#[test]
fn a_plan_learns_its_time_from_a_probe_or_a_past_result() {
    let (context, server) = (TestContext::new(), Scripted::faithful());
    let plan = ["plan", "gate", "--sessions", "40", "--concurrency", "2", "--rounds", "2", "--json", "--quiet"];
    let ran = context.run(&plan);
    assert_eq!((ran.code, ran.json()["wall_s"].is_null()), (0, true), "{}", ran.stderr);
    assert!(!context.path("results").exists(), "a plan sends nothing");

    let url = ["--base-url", &server.url];
    let probed = context.run(&[&plan[..], &url, &["--probe=4"]].concat());
    assert_eq!(probed.code, 0, "{}", probed.stderr);
    assert_eq!(server.requests(), 8);
    let estimate = probed.json();
    assert!(estimate["wall_s"].as_f64().is_some_and(|time| time > 0.0), "{estimate}");
    assert_eq!((estimate["sessions"].as_u64(), estimate["requests"].as_u64()), (Some(40), Some(80)));
    assert!(estimate["power"][1]["wall_s_to_see"].as_f64().unwrap() > estimate["wall_s"].as_f64().unwrap());

    let result = context.result().display().to_string();
    let again = context.run(&[&plan[..], &url, &["--from", &result]].concat());
    assert_eq!(again.json()["wall_s"], estimate["wall_s"], "{}", again.stderr);

    let dead = context.run(&[&plan[..], &["--base-url", "http://127.0.0.1:9", "--probe"]].concat());
    assert_eq!(dead.code, 2, "{}\n{}", dead.stdout, dead.stderr);
}

#[test]
fn the_result_says_where_calls_were_corrupted() {
    let context = result(|request| if request.number == 3 { damage() } else { intact() });
    let positions = read(&context.result().join("positions.csv"));
    assert!(positions.contains("agentic,round,1,6,6,1,0.166667,"), "{positions}");
    assert!(positions.contains("agentic,request_index,3–4,"), "{positions}");
    assert!(positions.contains("agentic,first_corruption,1,6,6,1,"), "{positions}");
    let page = read(&context.result().join("summary.md"));
    assert!(page.contains("## Where calls of agentic were corrupted") && page.contains("| 1 | 1 of 6 |"), "{page}");
    let calls = lines(&context.result().join("calls.jsonl"));
    assert_eq!(calls.len(), 12);
    let summary: Value = serde_json::from_str(&read(&context.result().join("summary.json"))).unwrap();
    let [low, high] = [0, 1].map(|end| summary["arms"][0]["corruption_rate_interval"][end].as_f64().unwrap());
    assert!((low..=high).contains(&(1.0 / 12.0)) && high < 0.5, "{low} {high}");
}
