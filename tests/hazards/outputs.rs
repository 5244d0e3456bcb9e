//! What the command prints and writes.

use std::{path::PathBuf, process::Command};

use serde_json::Value;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

struct Run {
    code: i32,
    stdout: String,
    stderr: String,
}

fn toolstorm(arguments: &[&str]) -> Run {
    let output = Command::new(env!("CARGO_BIN_EXE_toolstorm"))
        .current_dir(root())
        .args(arguments)
        .output()
        .expect("the binary starts");
    Run {
        code: output.status.code().expect("an exit code"),
        stdout: String::from_utf8(output.stdout).expect("UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("UTF-8"),
    }
}

#[test]
fn json_matches_its_schema_and_the_exit_code_says_hazards() {
    let schema = std::fs::read_to_string(root().join("docs/schemas/hazards.schema.json")).unwrap();
    let validator = jsonschema::validator_for(&serde_json::from_str(&schema).unwrap()).unwrap();
    for (capture, code, hazards) in [("v4-b8-all-mistakes", 1, 7), ("lifetime-bug", 1, 10), ("v4-b8-hold", 0, 0)] {
        let run = toolstorm(&["--json", "hazards", "--capture", &format!("tests/captures/{capture}.json")]);
        assert_eq!(run.code, code, "{}", run.stderr);
        let document: Value = serde_json::from_str(&run.stdout).unwrap();
        let errors: Vec<String> =
            validator.iter_errors(&document).map(|e| format!("{e} at {}", e.instance_path())).collect();
        assert_eq!(errors, Vec::<String>::new());
        assert_eq!(document["hazards"], hazards);
        assert_eq!(document["graphs"][0]["name"], capture);
    }
}

#[test]
fn the_terminal_tells_the_missing_edge_and_the_fixes() {
    let run = toolstorm(&["hazards", "tests/captures/v4-b8-all-mistakes.json"]);
    assert_eq!(run.code, 1);
    for wanted in [
        "`mqa_logits` (node 9) still writes",
        "was dropped at step:55 before the streams joined",
        "fix: keep the reference",
        "verified: none left, none new",
        "v4-b8-all-mistakes: 40 nodes, 49 edges, 42 lifetimes, 3 chains, 7 hazards",
    ] {
        assert!(run.stdout.contains(wanted), "`{wanted}` is missing in\n{}", run.stdout);
    }
    let clean = toolstorm(&["hazards", "tests/captures/v4-b8-hold.json"]);
    assert_eq!((clean.code, clean.stdout.lines().last()), (0, Some("no hazards in 1 graph")));
}

#[test]
fn sarif_and_the_page_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let [sarif, page] = ["log.sarif", "page.html"].map(|name| folder.path().join(name).display().to_string());
    let files = ["tests/captures/v4-b8-all-mistakes.json", "tests/captures/v4-b8-hold.json"];
    let run = toolstorm(&["hazards", files[0], files[1], "--export-sarif", &sarif, "--export-html", &page]);
    assert_eq!(run.code, 1, "{}", run.stderr);
    let log: Value = serde_json::from_str(&std::fs::read_to_string(sarif).unwrap()).unwrap();
    assert_eq!(log["version"], "2.1.0");
    let results = log["runs"][0]["results"].as_array().unwrap();
    assert_eq!(results.len(), 2);
    let rules = log["runs"][0]["tool"]["driver"]["rules"].as_array().unwrap();
    for result in results {
        assert!(rules.iter().any(|rule| rule["id"] == result["ruleId"]), "{result}");
        assert!(!result["locations"].as_array().unwrap().is_empty());
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert_eq!(page.matches("<svg").count(), 2, "one drawing a cause");
    assert_eq!(page.matches("class=\"missing\"").count(), 2);
    assert!(page.matches("class=\"bar first\"").count() == 2 && page.matches("class=\"bar second\"").count() == 2);
    assert!(!page.contains("http://") || page.matches("http://").count() == page.matches("www.w3.org").count());
}

#[test]
fn bad_input_is_exit_code_two() {
    for (arguments, message) in [
        (vec!["hazards", "no-such-file.json"], "no-such-file.json"),
        (vec!["hazards", "Cargo.toml"], "not a capture file"),
        (vec!["hazards", "tests/captures/v4-b8-hold.json", "--replay-order", "nobody"], "no graph `nobody`"),
        (vec!["hazards", "--launch", "--", "/no/such/program"], "cannot start"),
    ] {
        let run = toolstorm(&arguments);
        assert_eq!(run.code, 2, "{arguments:?}");
        assert!(run.stderr.contains(message), "{}", run.stderr);
    }
}

#[test]
fn the_arms_of_a_matrix_are_analysed_under_the_variables_of_the_shell() {
    let output = Command::new(env!("CARGO_BIN_EXE_toolstorm"))
        .args(["hazards", "--matrix", "seed-table"])
        .env("TOOLSTORM_OVERLAP_EAGER", "sometimes")
        .output()
        .expect("the binary starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && stderr.contains("`sometimes` is no value of"), "{stderr}");
}

#[test]
fn the_exporter_is_printed_as_it_is() {
    let run = toolstorm(&["hazards", "exporter"]);
    assert_eq!((run.code, run.stdout.trim_end()), (0, toolstorm::hazard::torch::EXPORTER.trim_end()));
}
