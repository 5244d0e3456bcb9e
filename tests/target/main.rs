//! The `command` target and `bisect` through the binary, against servers that a command starts.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread::sleep,
    time::Duration,
};

use serde_json::Value;
use tempfile::TempDir;

const TOOLSTORM: &str = env!("CARGO_BIN_EXE_toolstorm");

fn faulty_server() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/target/faulty_server.py").display().to_string()
}

/// A folder with a matrix file; `target` and what follows are given, the load is small.
fn matrix(text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("matrix.toml");
    let head = "name = \"test\"\nscenario = \"agentic\"\nsessions = 6\nconcurrency = 3\nrounds = [1, 2]\n";
    fs::write(&path, format!("{head}{}", text.replace("FOLDER", &folder.path().display().to_string())))
        .expect("a file");
    (folder, path)
}

fn toolstorm(folder: &TempDir, arguments: &[&str]) -> Output {
    let mut command = Command::new(TOOLSTORM);
    command.args(arguments).arg("--output-dir").arg(folder.path().join("results"));
    command.output().expect("the binary runs")
}

/// The process whose number the file `pid` in `folder` holds, once it is there.
fn pid(folder: &Path) -> String {
    let path = folder.join("pid");
    for _ in 0..600 {
        match fs::read_to_string(&path) {
            Ok(text) if text.ends_with('\n') => return text.trim().to_owned(),
            _ => sleep(Duration::from_millis(50)),
        }
    }
    panic!("the server never started");
}

fn is_running(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie is dead and waits for its parent only.
    !stat.is_empty() && !stat.contains(") Z ")
}

fn ends(pid: &str) -> bool {
    (0..400).any(|_| {
        sleep(Duration::from_millis(50));
        !is_running(pid)
    })
}

#[test]
fn a_server_behind_a_shell_is_driven_and_ends_with_the_run() {
    let server = faulty_server();
    let text = format!(
        r#"
        [target]
        kind = "command"
        command = ["sh", "-c", "echo $$ > FOLDER/pid; python3 \"$0\" \"$1\"; true", "{server}", "{{port}}"]
        ready = {{ timeout = "60s" }}
        [gate]
        max_upper = 0.5
        "#
    );
    let (folder, path) = matrix(&text);
    let output = toolstorm(&folder, &["matrix", path.to_str().unwrap(), "--json"]);
    let summary: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    assert_eq!(summary["arms"][0]["sessions_judged"], 6, "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0));
    assert!(!is_running(&pid(folder.path())), "the shell outlived the run");
}

#[test]
fn our_own_server_behind_a_shell_is_a_server_like_any_other() {
    let text = format!(
        r#"
        context = 200
        [target]
        kind = "command"
        command = ["sh", "-c", "\"$0\" serve --port $1 & echo $! > FOLDER/pid; wait; true", "{TOOLSTORM}", "{{port}}"]
        [env]
        TOOLSTORM_MAX_BATCH = "2"
        "#
    );
    let (folder, path) = matrix(&text);
    let small = ["--sessions", "2", "--rounds", "1", "--max-upper", "0.9"];
    let output = toolstorm(&folder, &[&["matrix", path.to_str().unwrap(), "--json"], &small[..]].concat());
    let summary: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    assert_eq!(summary["arms"][0]["sessions_judged"], 2, "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(summary["arms"][0]["sessions_corrupted"], 0, "{summary}");
    assert_eq!(output.status.code(), Some(0));
    assert!(ends(&pid(folder.path())), "the server outlived the run");
}

#[test]
fn the_graphs_of_a_foreign_server_are_analysed() {
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hazards/fake").display().to_string();
    let server = faulty_server();
    let text = format!(
        r#"
        [target]
        kind = "command"
        command = ["python3", "{fake}/server.py", "{server}", "{{port}}"]
        ready = {{ timeout = "60s" }}
        [env]
        PYTHONPATH = "{fake}:{fake}/site"
        PYTHONDONTWRITEBYTECODE = "1"
        [gate]
        max_upper = 0.5
        [[arm]]
        name = "mistake"
        hazards = true
        env = {{ HOW = "mistake" }}
        [[arm]]
        name = "hold"
        hazards = true
        env = {{ HOW = "hold" }}
        [[arm]]
        name = "unasked"
        env = {{ HOW = "mistake" }}
        [[arm]]
        name = "no-graphs"
        hazards = true
        env = {{ HOW = "none" }}
        "#
    );
    let (folder, path) = matrix(&text);
    let output = toolstorm(&folder, &["matrix", path.to_str().unwrap(), "--json"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let summary: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    let hazards: Vec<&Value> = summary["arms"].as_array().unwrap().iter().map(|arm| &arm["hazards"]).collect();
    assert_eq!(hazards[1..], [&0.into(), &Value::Null, &Value::Null], "{stderr}");
    let [mistake, hold, unasked, no_graphs] = [0, 1, 2, 3].map(|arm| &summary["arms"][arm]);
    assert!(mistake["hazard_tensors"][0].as_str().unwrap().contains("program.py"), "{mistake}");
    assert_eq!((&hold["hazards_failure"], &unasked["hazards_failure"]), (&Value::Null, &Value::Null));
    assert!(no_graphs["hazards_failure"].as_str().unwrap().contains("captured no graph"), "{no_graphs}");
    assert!(stderr.contains("hazards not analysed"), "{stderr}");
    let kept = Path::new(summary["result_dir"].as_str().unwrap()).join("captures-mistake");
    let again = Command::new(TOOLSTORM).args(["--json", "hazards"]).arg(kept).output().unwrap();
    let again: Value = serde_json::from_slice(&again.stdout).unwrap();
    assert_eq!(&again["hazards"], hazards[0], "the captures stay with the result");
    assert!(hazards[0].as_u64() > Some(0), "{stderr}");
}

#[test]
fn hazards_of_a_server_that_someone_else_runs_are_refused() {
    let text = "[target]\nkind = \"url\"\nbase_url = \"http://127.0.0.1:9\"\n[[arm]]\nname = \"a\"\nhazards = true\n";
    let (folder, path) = matrix(text);
    let output = toolstorm(&folder, &["matrix", path.to_str().unwrap()]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && stderr.contains("hazards = true"), "{stderr}");
}

#[test]
fn a_killed_harness_leaves_no_server_behind() {
    let text = r#"
        [target]
        kind = "command"
        command = ["sh", "-c", "\"$0\" serve --port $1 & echo $! > FOLDER/pid; wait; true", "TOOLSTORM", "{port}"]
    "#;
    let (folder, path) = matrix(&text.replace("TOOLSTORM", TOOLSTORM));
    let mut harness = Command::new(TOOLSTORM)
        .args(["matrix", path.to_str().unwrap(), "--output-dir"])
        .arg(folder.path().join("results"))
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary runs");
    let server = pid(folder.path());
    assert!(is_running(&server));
    harness.kill().unwrap();
    harness.wait().unwrap();
    assert!(ends(&server), "the server outlived its harness");
}

#[test]
fn a_server_that_ignores_the_polite_request_is_killed_with_its_group() {
    let server = faulty_server();
    let text = format!(
        r#"
        [target]
        kind = "command"
        command = ["sh", "-c", "trap '' TERM; echo $$ > FOLDER/pid; python3 \"$0\" $1; sleep 600", "{server}", "{{port}}"]
        ready = {{ timeout = "60s" }}
        stop_timeout = "200ms"
        [gate]
        max_upper = 0.5
        "#
    );
    let (folder, path) = matrix(&text);
    let output = toolstorm(&folder, &["matrix", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(ends(&pid(folder.path())), "the shell outlived the run");
}

#[test]
fn a_port_that_answers_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let text = format!(
        "[target]\nkind = \"command\"\ncommand = [\"sleep\", \"600\"]\nbase_url = \"http://127.0.0.1:{port}\"\n"
    );
    let (folder, path) = matrix(&text);
    let output = toolstorm(&folder, &["matrix", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(everything(&folder, &output).contains("already answers"));
}

#[test]
fn a_server_that_fails_shows_the_end_of_its_log() {
    let text =
        "[target]\nkind = \"command\"\ncommand = [\"sh\", \"-c\", \"echo no such weights >&2; exit 3\", \"{port}\"]\n";
    let (folder, path) = matrix(text);
    let output = toolstorm(&folder, &["matrix", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let said = everything(&folder, &output);
    assert!(said.contains("ended before it was ready") && said.contains("no such weights"), "{said}");
}

/// What a run said and what its journal holds.
fn everything(folder: &TempDir, output: &Output) -> String {
    let mut text = String::from_utf8_lossy(&output.stderr).into_owned();
    for result in fs::read_dir(folder.path().join("results")).into_iter().flatten().flatten() {
        text.push_str(&fs::read_to_string(result.path().join("journal.jsonl")).unwrap_or_default());
    }
    text
}

#[test]
fn a_bisection_names_the_variable_that_matters() {
    let server = faulty_server();
    let text = format!(
        r#"
        [target]
        kind = "command"
        command = ["python3", "{server}", "{{port}}"]
        ready = {{ timeout = "60s" }}
        [env]
        FAULTY_WHEN = "B=1"
        FAULT_RATE = "0.4"
        [bisect]
        toggles = [
            {{ name = "A", good = "0", bad = "1" }},
            {{ name = "B", good = "0", bad = "1" }},
            {{ name = "C", bad = "1" }},
        ]
        sessions_per_probe = 12
        max_sessions = 600
        "#
    );
    let (folder, path) = matrix(&text);
    let output = toolstorm(&folder, &["bisect", path.to_str().unwrap(), "--json"]);
    let answer: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
    assert_eq!(answer["schema"], "toolstorm-bisect/1");
    assert_eq!(answer["culprit"], serde_json::json!(["B=1"]), "{answer}");
    assert!(answer["posterior"].as_f64().unwrap() >= 0.95);
    assert_eq!(answer["irrelevant"], serde_json::json!(["A", "C"]), "{answer}");
    assert_eq!(output.status.code(), Some(0));
}
