//! Why a call was corrupted, and the same corruption again.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{
    context::{TestContext, lines, read},
    scripted::{Act, Scripted},
};

const SCENARIO: &str = r#"
name = "small"
rounds = 1
context = 200
tools = 3
answer = [60, 100]
"#;

/// The adversary holds ops back for long, so few and short sessions are enough.
const MATRIX: &str = r#"
name = "raced"
scenario = "small.toml"
sessions = 6
concurrency = 2
lockstep = true
[gate]
max_upper = 0.9
[[arm]]
name = "only"
expect = "report"
[arm.env]
SGLANG_DSV4_BF16_INDEX_K = "1"
TOOLSTORM_MAX_BATCH = "2"
TOOLSTORM_ORDER = "adversarial"
"#;

/// Runs the matrix, in which every corruption must be explained; the evidence folder of a corrupted session, and what its
/// verdict and race log say.
fn corrupted(context: &TestContext) -> (PathBuf, Value, Value) {
    context.write("small.toml", SCENARIO);
    context.write("raced.toml", MATRIX);
    let ran = context.run(&["matrix", "raced.toml", "--json", "--quiet"]);
    let summary = ran.json();
    let arm = &summary["arms"][0];
    let kinds = arm["races"].as_object().unwrap_or_else(|| panic!("no kinds of race: {arm}\n{}", ran.stderr));
    let counted: u64 = kinds.values().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(Some(counted), arm["race_hits"].as_u64(), "{arm}");
    assert!(kinds.keys().any(|kind| kind == "topk_select/logits overwritten by ffn_up"), "{kinds:?}");
    let entries = std::fs::read_dir(context.result().join("evidence")).expect("nothing was corrupted");
    let mut folders: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    let verdict =
        |folder: &PathBuf| -> Value { serde_json::from_str(&read(&folder.join("round-00-verdict.json"))).unwrap() };
    folders.retain(|folder| verdict(folder)["verdict"] == "corrupted");
    assert!(folders.len() >= 4, "{folders:?} of 6 sessions were corrupted");
    let races =
        |folder: &PathBuf| -> Value { serde_json::from_str(&read(&folder.join("round-00-races.json"))).unwrap() };
    // The only round of each, so each corruption is the session's first.
    for folder in &folders {
        let hits = races(folder)["hits"].as_array().unwrap().clone();
        let found = hits.iter().any(|hit| hit["at_first_wrong_byte"] == true);
        assert!(found, "no hit in the step of the first wrong byte: {}", read(&folder.join("round-00-diff.txt")));
    }
    let folder = folders.swap_remove(0);
    let (verdict, races) = (verdict(&folder), races(&folder));
    (folder, verdict, races)
}

#[test]
fn a_corrupted_call_is_explained_and_comes_again_byte_for_byte() {
    let context = TestContext::new();
    let (folder, verdict, races) = corrupted(&context);
    let hits = races["hits"].as_array().unwrap();
    let hit = hits.iter().find(|hit| hit["at_first_wrong_byte"] == true).unwrap();
    for name in ["step", "layer", "launch", "bytes", "expected", "seen", "rows", "words"] {
        assert!(!hit[name].is_null(), "{name}: {hit}");
    }
    for side in ["first", "second"] {
        assert!(["kernel", "stream", "tensor"].iter().all(|name| hit[side][name] != ""), "{hit}");
    }
    let told = hit["words"].as_str().unwrap();
    assert!(read(&folder.join("round-00-diff.txt")).contains(told));
    let page = read(&context.result().join("report.html")).replace("&#x2f;", "/");
    assert!(page.contains("why, by the <a href=\"evidence/only-0-s00"), "no link to the race log");

    // The whole launch again, by the command that the evidence holds.
    let command: Vec<_> = verdict["replay"].as_str().unwrap().split(' ').skip(1).collect();
    let again = context.run(&[&command[..], &["--json"]].concat());
    assert_eq!(again.code, 1, "{}", again.stderr);
    let again = again.json();
    assert_eq!((&again["same_bytes"], &again["same_races"]), (&true.into(), &true.into()), "{again}");
    assert_eq!(again["races"], races);
    let came = &verdict["calls"].as_array().unwrap();
    let call = came.iter().find(|call| call["verdict"] == "corrupted").unwrap_or(&came[0]);
    assert_eq!((&again["call"]["name"], &again["call"]["arguments"]), (&call["name"], &call["arguments"]));

    // The launch under the token of the step, which the virtual GPU checks.
    let token = hit["replay"].as_str().unwrap();
    let ran = context.run(&["replay", token, "--json"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    let documents: Vec<Value> = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let replayed = documents[0]["replayed"]["hits"].as_array().unwrap();
    assert!(replayed.iter().any(|other| other["words"] == told), "{replayed:?}");
    assert_eq!((&documents[1]["same_bytes"], &documents[1]["same_races"]), (&true.into(), &true.into()));
    let judged = lines(&context.result().join("calls.jsonl"));
    assert!(judged.iter().any(|other| other["arguments"] == call["arguments"] && other["verdict"] == "corrupted"));
}

#[test]
fn a_launch_is_not_driven_again_for_what_was_not_corrupted() {
    let (context, server) = (TestContext::new(), Scripted::start(|_| Act::Cut));
    context.load(&server.url, &[]);
    let evidence = std::fs::read_dir(context.result().join("evidence")).unwrap().next().unwrap().unwrap().path();
    let ran = context.run(&["replay", evidence.to_str().unwrap(), "--load"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("no recorded response of this session is corrupted"), "{}", ran.stderr);
}

#[test]
fn a_token_that_no_result_names_is_refused() {
    let context = TestContext::new();
    let ran = context.run(&["replay", "ts1-00"]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("is no replay token"), "{}", ran.stderr);
    let token = "ts1-0000000000ff1f36565bc46f1b0000000000000ac5791f8307a0457e8aed6bab3c";
    let ran = context.run(&["replay", token]);
    assert_eq!(ran.code, 2);
    assert!(ran.stderr.contains("no result in results names the token") && ran.stderr.contains("--output-dir"));
}

/// Both probes beside the load: what they looked at is in the log of the server and in every report, and a token that only
/// a log names is replayed.
#[test]
fn probes_are_reported_and_a_token_of_a_log_is_replayed() {
    let context = TestContext::new();
    let probes = "[arm.env]\nTOOLSTORM_GE_DIFF = \"1\"\nTOOLSTORM_INDEX_K_CANARY = \"1\"";
    context.write("small.toml", SCENARIO);
    context.write("raced.toml", &MATRIX.replace("sessions = 6", "sessions = 3").replace("[arm.env]", probes));
    let ran = context.run(&["matrix", "raced.toml", "--quiet"]);
    let result = context.result();
    let summary: Value = serde_json::from_str(&read(&result.join("summary.json"))).unwrap();
    let arm = &summary["arms"][0];
    let counted = |name: &str| arm["server"][name].as_f64().unwrap_or_else(|| panic!("no {name}: {}", arm["server"]));
    let (rows, pages) = (counted("ge_diff_samples_total"), counted("canary_checks_total"));
    assert!(rows > 50.0 && pages > 50.0, "{rows} rows, {pages} pages");
    // The races of this order overwrite logits and workspace, which GE_DIFF copies first, and no index key.
    let told = format!("GE_DIFF rows that differed: 0 of {rows}, canary: 0 keys changed unexplained, in {pages} pages");
    for report in [&ran.stdout, &read(&result.join("report.html")), &read(&result.join("summary.md"))] {
        assert!(report.contains(&told), "no `{told}` in {report}");
    }
    assert_eq!(arm["findings"], Value::Array(vec![]));
    let log = result.join("server-only-0.log");
    let lines = read(&log);
    for line in [format!("GE_DIFF: 0 of {rows} rows differed"), format!("in {pages} pages checked")] {
        assert!(lines.contains(&line), "no `{line}` in {lines}");
    }
    // A token comes into a log with a finding; this one is of a step that raced.
    let token = token_of(&result);
    std::fs::write(&log, format!("{lines}GE_DIFF: step 3; toolstorm replay {token}\n")).unwrap();
    std::fs::remove_dir_all(result.join("evidence")).unwrap();
    let ran = context.run(&["replay", &token, "--json"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let replayed = ran.json();
    assert_eq!(replayed["token"], token.as_str());
    assert!(!replayed["replayed"]["hits"].as_array().unwrap().is_empty(), "{replayed}");
}

/// A token in the evidence of a result.
fn token_of(result: &Path) -> String {
    let evidence = std::fs::read_dir(result.join("evidence")).expect("nothing was corrupted");
    let mut logs = evidence.map(|entry| entry.unwrap().path().join("round-00-races.json"));
    let log = logs.find_map(|path| std::fs::read_to_string(path).ok()).expect("no race log");
    let log: Value = serde_json::from_str(&log).unwrap();
    log["hits"][0]["replay"].as_str().unwrap().to_owned()
}
