//! The built-in engine under lockstep: a seed decides a whole run.

use serde_json::Value;

use crate::context::{TestContext, lines};

/// As small as a run can be, since the engine computes for real and slowly in a debug build.
const SCENARIO: &str = r#"
name = "small"
rounds = 1
context = 200
tools = 3
answer = [70, 140]
content = ["ascii", "unicode"]
"#;

const MATRIX: &str = r#"
name = "twice"
scenario = "small.toml"
sessions = 3
concurrency = 2
lockstep = true
[gate]
max_upper = 0.9
[env]
TOOLSTORM_DEVICE = "sim"
TOOLSTORM_MAX_BATCH = "2"
[[arm]]
name = "overlapped"
expect = "report"
[[arm]]
name = "overlap-off"
expect = "report"
[arm.env]
SGLANG_OPT_USE_MULTI_STREAM_OVERLAP = "0"
"#;

/// Everything that equal runs share.
fn calls(context: &TestContext, seed: &str, jobs: &str) -> Vec<Value> {
    let ran = context.run(&["matrix", "twice.toml", "--seed", seed, "--jobs", jobs, "--json", "--quiet"]);
    assert_eq!(ran.code, 0, "{}\n{}", ran.stderr, ran.stdout);
    let mut calls = lines(&context.result().join("calls.jsonl"));
    for call in &mut calls {
        call.as_object_mut().unwrap().retain(|name, _| !name.ends_with("_ms") && !name.ends_with("_at"));
    }
    std::fs::remove_dir_all(context.path("results")).unwrap();
    calls
}

#[test]
fn two_runs_of_one_seed_are_equal_and_another_seed_differs() {
    let context = TestContext::new();
    context.write("small.toml", SCENARIO);
    context.write("twice.toml", MATRIX);
    let first = calls(&context, "7", "1");
    assert_eq!(first.len(), 6);
    assert!(first.iter().all(|call| call["verdict"] == "valid"), "{first:?}");
    assert_eq!(first, calls(&context, "7", "2"), "side by side as one after the other");
    assert_ne!(first, calls(&context, "8", "2"));
}

#[test]
fn a_resumed_run_has_the_environment_that_it_began_with() {
    let context = TestContext::new();
    context.write("small.toml", SCENARIO);
    context.write("twice.toml", MATRIX);
    let ran = context.run(&["matrix", "twice.toml", "--json", "--quiet"]);
    let name = ran.json()["result_dir"].as_str().unwrap().to_owned();
    let resume = ["matrix", "twice.toml", "--quiet", "--resume", &name];
    let other = context.command(&resume).env("TOOLSTORM_METRICS", "0").output().unwrap();
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(
        other.status.code() == Some(2)
            && said.contains("TOOLSTORM_METRICS was unset when the run began and is `0` now"),
        "{said}"
    );
    assert_eq!(context.run(&resume).code, 0);
}

#[test]
fn a_server_that_cannot_start_is_named_with_the_end_of_its_log() {
    let context = TestContext::new();
    let broken = MATRIX.replace("expect = \"report\"\n", "expect = \"report\"\nargs = [\"--no-such-flag\"]\n");
    context.write("small.toml", SCENARIO);
    context.write("twice.toml", &broken);
    let ran = context.run(&["matrix", "twice.toml", "--json", "--quiet"]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert!(ran.stderr.contains("no-such-flag"), "{}", ran.stderr);
    assert_eq!(ran.json()["arms"][0]["launches_failed"].as_u64(), Some(1));
}
