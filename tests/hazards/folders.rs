//! Files and folders of captures, by the command.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};

use crate::inputs::{event, file, kernel, memset};

/// Exit code and output of `toolstorm` with these arguments.
fn run(arguments: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_toolstorm")).args(arguments).output().expect("the binary starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let code = output.status.code().expect("an exit code");
    (code, String::from_utf8(output.stdout).expect("UTF-8") + if code == 2 { &stderr } else { "" })
}

fn report(arguments: &[&str]) -> (i32, Value) {
    let (code, text) = run(&[&["--json", "hazards"], arguments].concat());
    (code, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
}

/// Writes a capture that uses the buffer at `addr`, alive when it begins.
fn write(folder: &Path, name: &str, addr: u64) -> String {
    let path = folder.join(name);
    let text = file(&[kernel("use", &[addr])], &[], &json!({ "live": [event("", addr, 512)] }));
    fs::write(&path, text).expect("a temporary file");
    path.display().to_string()
}

#[test]
fn a_capture_without_a_trace_is_not_clean() {
    let folder = tempfile::tempdir().unwrap();
    let mut document: Value = serde_json::from_str(&crate::captures::text("v4-b8-all-mistakes")).unwrap();
    document.as_object_mut().unwrap().remove("marks");
    document["allocations"] = json!([]);
    let path = folder.path().join("blind.json");
    fs::write(&path, document.to_string()).unwrap();
    let (code, report) = report(&[&path.display().to_string()]);
    assert_eq!((code, &report["missing"], &report["hazards"]), (3, &1.into(), &0.into()));
    assert!(report["graphs"][0]["warnings"][0].as_str().unwrap().contains("no trace of the allocator"), "{report}");
}

#[test]
fn a_file_cut_off_counts_as_missing() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "decode.json", 4096);
    fs::write(folder.path().join("decode-2.json.partial"), "{\"format\":").unwrap();
    let (code, report) = report(&[&folder.path().display().to_string()]);
    assert_eq!((code, &report["missing"]), (3, &1.into()));
    assert!(report["warnings"][0].as_str().unwrap().contains("not written to its end"), "{report}");
}

#[test]
fn numbered_files_are_one_process_in_the_order_of_their_capture() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["decode-10.json", "decode-2.json", "decode.json"] {
        write(folder.path(), name, 4096);
    }
    let (code, report) = report(&[&folder.path().display().to_string()]);
    let names: Vec<&str> = report["graphs"].as_array().unwrap().iter().filter_map(|g| g["name"].as_str()).collect();
    assert_eq!((code, names.as_slice()), (0, ["decode", "decode-2", "decode-10"].as_slice()));
    assert_eq!(report["groups"], json!([]));
}

#[test]
fn named_files_of_two_processes_share_no_pool() {
    let folder = tempfile::tempdir().unwrap();
    let files = [("0000000007-00001.json", 4096), ("0000000008-00001.json", 8192), ("0000000007-00002.json", 4096)]
        .map(|(name, addr)| write(folder.path(), name, addr));
    let files = files.each_ref().map(String::as_str);
    let (code, report) = report(&files);
    assert_eq!((code, &report["hazards"]), (0, &0.into()), "{report}");
    let groups: Vec<&str> = report["groups"].as_array().unwrap().iter().filter_map(|g| g["name"].as_str()).collect();
    assert_eq!(groups, ["process 7", "process 8"]);
}

#[test]
fn a_log_tells_warnings_and_speaks_of_another_tensor_only_where_there_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let [path, log] = ["wait.json", "log.sarif"].map(|name| folder.path().join(name).display().to_string());
    let alloc = json!({
        "action": "alloc", "addr": 4096, "size": 512, "where": [{ "function": "step", "file": "/srv/model.py", "line": 7 }],
    });
    let told = "edges that let the second node start early: 3";
    let more = json!({ "allocations": [alloc], "marks": [[0, 1, 0], [2, 1, 0]], "warnings": [told] });
    fs::write(&path, file(&[memset(4096, 512), memset(4096, 512)], &[], &more)).unwrap();
    let (code, text) = run(&["hazards", &path, "--export-sarif", &log]);
    assert_eq!(code, 1);
    assert!(text.contains(&format!("warning: {told}")), "{text}");
    let log: Value = serde_json::from_str(&fs::read_to_string(log).unwrap()).unwrap();
    let result = &log["runs"][0]["results"][0];
    let related: Vec<&str> =
        result["relatedLocations"].as_array().unwrap().iter().filter_map(|l| l["message"]["text"].as_str()).collect();
    assert_eq!(related, ["the tensor is allocated here"]);
    let invocation = &log["runs"][0]["invocations"][0];
    assert_eq!(invocation["executionSuccessful"], true);
    let note = invocation["toolExecutionNotifications"][0]["message"]["text"].as_str().unwrap();
    assert!(note.contains(told), "{note}");
}
