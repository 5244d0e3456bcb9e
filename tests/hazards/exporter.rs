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
    launch_with(&[], options, command)
}

fn launch_with(variables: &[(&str, &str)], options: &[&str], command: &[&str]) -> (i32, Value, String) {
    let path = format!("{}:{}", fake().display(), fake().join("site").display());
    let output: Output = Command::new(env!("CARGO_BIN_EXE_toolstorm"))
        .args(["--json", "hazards", "--launch"])
        .args(options)
        .args(["--", "python3"])
        .args(command)
        .env("PYTHONPATH", path)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .envs(variables.iter().copied())
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
    let again = toolstorm(&["--json", "hazards", &kept]);
    assert_eq!(again.status.code(), Some(1), "the folder is read as it was");
    assert_eq!(serde_json::from_slice::<Value>(&again.stdout).unwrap(), report);
    let (code, _, stderr) = launch(&["--captures-dir", &kept], &[&program("program.py"), "hold"]);
    assert!(code == 2 && stderr.contains("is not empty"), "{stderr}");
}

fn toolstorm(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_toolstorm")).args(arguments).output().expect("the binary starts")
}

#[test]
fn a_release_that_cannot_keep_graphs_is_read_during_the_capture() {
    let [new, old] = ["new", "old"].map(|release| {
        let (code, report, stderr) = launch_with(&[("FAKE_TORCH", release)], &[], &[&program("program.py"), "mistake"]);
        assert_eq!(code, 1, "{stderr}");
        report
    });
    assert_eq!(new["graphs"].as_array().map(Vec::len), Some(2));
    assert_eq!(new["graphs"], old["graphs"]);
}

#[test]
fn edges_that_only_the_kernels_keep_are_warned_about() {
    let (code, report, stderr) = launch_with(&[("FAKE_DRIVER", "early")], &[], &[&program("program.py"), "hold"]);
    assert_eq!(code, 0, "{stderr}");
    for graph in report["graphs"].as_array().unwrap() {
        let warnings = graph["warnings"].as_array().unwrap();
        assert!(warnings.iter().any(|w| w.as_str().unwrap().contains("programmatic edges")), "{warnings:?}");
    }
}

#[test]
fn what_fails_in_the_exporter_never_reaches_the_program() {
    for (how, message) in [("missing", "no bindings here"), ("breaks", "marks could not be taken")] {
        let (code, _, stderr) = launch_with(&[("FAKE_DRIVER", how)], &[], &[&program("program.py"), "mistake"]);
        assert_eq!(code, 2, "{how}: {stderr}");
        assert!(stderr.contains("captured\n"), "{how}: the program did not come to its end: {stderr}");
        assert!(stderr.contains("graphs that were not exported: 2") && stderr.contains(message), "{how}: {stderr}");
    }
}

#[test]
fn what_is_missing_makes_a_clean_report_incomplete() {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept");
    let kept = kept.display().to_string();
    let (code, _, stderr) = launch(&["--captures-dir", &kept], &[&program("program.py"), "hold"]);
    assert_eq!(code, 0, "{stderr}");
    fs::write(format!("{kept}/0000000007-00001.failed"), "Traceback\nValueError: a graph too far\n").unwrap();
    let run = toolstorm(&["--json", "hazards", &kept]);
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!((run.status.code(), &report["missing"]), (Some(3), &1.into()));
    assert!(report["warnings"][0].as_str().unwrap().contains("ValueError: a graph too far"), "{report}");
}

#[test]
fn processes_are_groups_with_pools_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept");
    let (code, one, stderr) =
        launch(&["--captures-dir", &kept.display().to_string()], &[&program("program.py"), "mistake"]);
    assert_eq!(code, 1, "{stderr}");
    let ranks = folder.path().join("ranks");
    fs::create_dir(&ranks).unwrap();
    for entry in fs::read_dir(&kept).unwrap().map(|entry| entry.unwrap().path()).filter(|p| p.is_file()) {
        let name = entry.file_name().unwrap().to_str().unwrap();
        let json = entry.extension().is_some_and(|extension| extension == "json");
        let Some((_, number)) = name.split_once('-').filter(|_| json) else { continue };
        for rank in 1..3 {
            fs::copy(&entry, ranks.join(format!("000000000{rank}-{number}"))).unwrap();
        }
    }
    let run = toolstorm(&["--json", "hazards", &ranks.display().to_string()]);
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(report["hazards"], one["hazards"].as_u64().unwrap() * 2, "nothing is found between processes");
    let names: Vec<&str> = report["groups"].as_array().unwrap().iter().filter_map(|g| g["name"].as_str()).collect();
    assert_eq!(names, ["process 1", "process 2"]);
    let both = toolstorm(&["--json", "hazards", &kept.display().to_string(), &ranks.display().to_string()]);
    let both: Value = serde_json::from_slice(&both.stdout).unwrap();
    assert_eq!(both["hazards"], one["hazards"].as_u64().unwrap() * 3, "nothing is found between programs");
    assert_eq!(both["groups"].as_array().map(Vec::len), Some(3));
    let text = String::from_utf8(toolstorm(&["hazards", &ranks.display().to_string()]).stdout).unwrap();
    assert!(text.lines().any(|line| line.split_whitespace().take(3).eq(["process", "2", "2"])), "{text}");
}

#[test]
fn an_interrupted_launch_ends_what_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("kept");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let path = format!("{}:{}", fake().display(), fake().join("site").display());
    let mut child = Command::new(env!("CARGO_BIN_EXE_toolstorm"))
        .args(["hazards", "--launch", "--captures-dir"])
        .arg(&kept)
        .args(["--", "python3", &program("program.py"), "mistake", &port.to_string()])
        .env("PYTHONPATH", path)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the binary starts");
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before the server answered");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("analyses what was captured so far"), "{stderr}");
    assert!(TcpListener::bind(("127.0.0.1", port)).is_ok(), "the server still runs");
}

#[test]
fn launches_that_fail_are_exit_code_two() {
    for (how, message) in [("none", "imported torch and captured no graph"), ("fail", "exit status: 3")] {
        let (code, _, stderr) = launch(&[], &[&program("program.py"), how]);
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains(message), "{stderr}");
    }
    for (command, message) in [
        (["python3", "-c", "print(1)"], "never imported torch"),
        (["python3", "-Ic", "print(1)"], "no Python process read the exporter"),
        (["sh", "-c", "true"], "no Python process read the exporter"),
    ] {
        let run = toolstorm(&[&["hazards", "--launch", "--"][..], &command].concat());
        let stderr = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.code() == Some(2) && stderr.contains(message), "{command:?}: {stderr}");
    }
}

fn run_python(file: &str, folder: &Path, arguments: &[&str]) {
    let modules = folder.join("modules");
    fs::create_dir_all(&modules).expect("a temporary folder");
    fs::write(modules.join("toolstorm_capture.py"), torch::EXPORTER).expect("a temporary file");
    let status = Command::new("python3")
        .args([&program(file), &folder.display().to_string()])
        .args(arguments)
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
        run_python("context.py", folder.path(), &[marks]);
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

#[test]
fn the_exporter_keeps_nothing_alive_and_counts_what_its_history_tells() {
    for marks in ["dispatch", "calls", "both"] {
        run_python("lifetimes.py", tempfile::tempdir().unwrap().path(), &[marks]);
    }
}

#[test]
fn whatever_fails_the_history_is_off_and_a_graph_is_lost_once() {
    run_python("history.py", tempfile::tempdir().unwrap().path(), &[]);
}
