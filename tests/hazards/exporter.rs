//! The Python exporter and `--launch`, on a fake torch: everything but the driver.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;
use toolstorm::hazard::{Graph, examine, torch};

fn fake() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/hazards/fake")
}

fn program(name: &str) -> String {
    fake().join(name).display().to_string()
}

fn launch(options: &[&str], command: &[&str]) -> (i32, Value, String) {
    let path = format!("{}:{}", fake().display(), fake().join("site").display());
    let output: Output = Command::new(env!("CARGO_BIN_EXE_toolstorm"))
        .args(["--json", "hazards", "--launch"])
        .args(options)
        .args(["--", "python3"])
        .args(command)
        .env("PYTHONPATH", path)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .expect("the binary starts");
    let document = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().expect("an exit code"), document, String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn one_command_from_a_launch_line_to_a_verdict_per_bucket() {
    let (code, report, stderr) = launch(&[], &[&program("program.py"), "mistake"]);
    assert_eq!(code, 1, "{stderr}");
    let names: Vec<&str> = report["graphs"].as_array().unwrap().iter().filter_map(|g| g["name"].as_str()).collect();
    assert_eq!(names, ["bs=2", "bs=1"]);
    for graph in report["graphs"].as_array().unwrap() {
        let hazard = &graph["hazards"][0];
        assert_eq!((&hazard["first"]["kernel"], &hazard["second"]["kernel"]), (&"store".into(), &"memset".into()));
        assert_eq!(hazard["likely"], "WAR", "the store takes a const pointer, a memset writes");
        let dropped = &hazard["first_tensor"]["freed"]["frames"][0];
        assert_eq!(dropped["function"], "layer");
        assert!(dropped["file"].as_str().unwrap().ends_with("program.py"), "{dropped}");
        assert!(graph["causes"][0]["fixes"].as_array().unwrap().iter().all(|f| f["verified"] == true));
    }
}

#[test]
fn a_program_without_the_mistake_has_none() {
    let (code, report, stderr) = launch(&[], &[&program("program.py"), "hold"]);
    assert_eq!((code, &report["hazards"]), (0, &0.into()), "{stderr}");
    assert_eq!(report["graphs"].as_array().unwrap().len(), 2);
}

#[test]
fn a_missing_wait_is_found_under_one_lifetime_too() {
    let (code, report, stderr) = launch(&[], &[&program("program.py"), "missing-wait"]);
    assert_eq!(code, 1, "{stderr}");
    let hazards = report["graphs"][0]["hazards"].as_array().unwrap();
    let same = |h: &&Value| h["first"]["node"] == 0 && h["second"]["node"] == 1 && h["likely"] == "RAW";
    assert!(hazards.iter().any(|h| same(&h)), "{hazards:#?}");
}

#[test]
fn a_server_is_analysed_when_it_is_ready_and_ended() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}/health");
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept").display().to_string();
    let command = [&program("program.py"), "mistake", &port.to_string()];
    let (code, report, stderr) = launch(&["--ready", &url, "--captures-dir", &kept], &command);
    assert_eq!((code, report["graphs"].as_array().map(Vec::len)), (1, Some(2)), "{stderr}");
    assert!(TcpListener::bind(("127.0.0.1", port)).is_ok(), "the server still runs");
    assert_eq!(fs::read_dir(&kept).unwrap().count(), 2);
}

#[test]
fn launches_that_fail_are_exit_code_two() {
    for (how, message) in [("none", "captured no CUDA graph"), ("fail", "exit status: 3")] {
        let (code, _, stderr) = launch(&[], &[&program("program.py"), how]);
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains(message), "{stderr}");
    }
}

fn run_context(folder: &Path, marks: &str) {
    let modules = folder.join("modules");
    fs::create_dir_all(&modules).expect("a temporary folder");
    fs::write(modules.join("toolstorm_capture.py"), torch::EXPORTER).expect("a temporary file");
    let status = Command::new("python3")
        .args([&program("context.py"), &folder.display().to_string(), marks])
        .env("PYTHONPATH", format!("{}:{}", fake().display(), modules.display()))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .status()
        .expect("python3 starts");
    assert!(status.success());
}

#[test]
fn the_context_manager_and_the_function_export() {
    for marks in ["dispatch", "calls", "both"] {
        let folder = tempfile::tempdir().unwrap();
        run_context(folder.path(), marks);
        let read = |file: &str| -> Graph {
            let text = fs::read_to_string(folder.path().join(file)).unwrap();
            torch::read(&text, file).and_then(examine).unwrap()
        };
        for file in ["inside.json", "inside-2.json"] {
            let graph = read(file);
            let pairs: Vec<_> = graph.analysis.hazards.iter().map(|h| (h.first, h.second)).collect();
            assert_eq!(pairs, [(1, 2)], "{marks}: {file}");
        }
        let existing = read("existing.json");
        assert_eq!(existing.capture.name, "existing");
        assert!(existing.capture.warnings.iter().any(|w| w.contains("no marks")), "{:?}", existing.capture.warnings);
        assert!(!existing.analysis.hazards.is_empty());
    }
}
