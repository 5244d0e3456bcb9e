//! Five graphs that PyTorch captured on an H200 (`tests/captures/`), and what is known of them.

use std::{collections::BTreeSet, fs, path::PathBuf};

use toolstorm::hazard::{Graph, Kind, Likelihood, examine, fix::Remedy, torch};

pub(crate) fn text(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/captures").join(format!("{name}.json"));
    fs::read_to_string(path).expect("a committed capture")
}

fn analysed(name: &str) -> Graph {
    torch::read(&text(name), name).and_then(examine).expect("a sound capture")
}

fn pairs(graph: &Graph) -> Vec<(u32, u32)> {
    let pairs: BTreeSet<_> = graph.analysis.hazards.iter().map(|h| (h.first, h.second)).collect();
    pairs.into_iter().collect()
}

#[test]
fn lifetime_bug_has_the_index_matmuls_against_the_feed_forward() {
    let graph = analysed("lifetime-bug");
    // Nodes 4 and 6 are the index matmuls of the first layer, 20 and 22 of the second; 10 to 13 and 26 to 29 the
    // feed-forward's kernels.
    let first = [(4, 10), (4, 11), (4, 12), (4, 13), (6, 11), (6, 12)];
    let second = [(20, 26), (20, 27), (22, 28), (22, 29)];
    assert_eq!(pairs(&graph), [first.as_slice(), second.as_slice()].concat());
    assert!(graph.analysis.hazards.iter().all(|h| h.kind == Kind::Touch && h.recycled()));
}

#[test]
fn all_mistakes_of_the_v4_layer_are_named() {
    let graph = analysed("v4-b8-all-mistakes");
    // mqa_logits and top-k against the fp8 GEMM, kvstore against the quantise kernel and what follows. The mistakes
    // of the second layer share no bytes: its buffers were placed elsewhere.
    assert_eq!(pairs(&graph), [(9, 15), (10, 15), (12, 13), (12, 14), (12, 15)]);
    let whys: Vec<&str> = graph.causes.iter().map(|c| c.why.as_str()).collect();
    assert_eq!(whys.len(), 2, "{whys:#?}");
    assert!(whys[0].contains("`mqa_logits`") && whys[0].contains("still writes") && whys[0].contains("step:55"));
    assert!(whys[1].contains("`quant`") && whys[1].contains("`kvstore`"), "{}", whys[1]);
    assert!(graph.causes.iter().all(|c| graph.analysis.hazards[c.hazards[0]].likelihood == Likelihood::Likely));
}

#[test]
fn every_remedy_removes_every_hazard_of_a_dropped_tensor() {
    for name in ["lifetime-bug", "v4-b8-all-mistakes"] {
        let graph = analysed(name);
        assert!(!graph.causes.is_empty());
        for cause in &graph.causes {
            let verified: Vec<Remedy> = cause.fixes.iter().filter(|f| f.verified()).map(|f| f.remedy).collect();
            assert_eq!(verified.len(), Remedy::ALL.len(), "{name}: {}: {:?}", cause.tensor, cause.fixes);
        }
    }
}

#[test]
fn fixed_graphs_have_none() {
    for name in ["record-stream-fix", "overlap-off", "v4-b8-hold"] {
        let graph = analysed(name);
        assert_eq!(pairs(&graph), [], "{name}");
        assert_eq!(graph.capture.warnings, Vec::<String>::new(), "{name}");
        assert!(graph.capture.touches.len() > 40, "{name}: hardly anything was attributed");
    }
}

#[test]
fn chains_are_the_streams_of_the_program() {
    for (name, chains) in [("overlap-off", 1), ("lifetime-bug", 2), ("v4-b8-all-mistakes", 3), ("v4-b8-hold", 3)] {
        assert_eq!(analysed(name).analysis.order.chains(), chains, "{name}");
    }
}

#[test]
fn without_marks_a_plain_warning_and_no_miss() {
    let mut file: serde_json::Value = serde_json::from_str(&text("v4-b8-all-mistakes")).unwrap();
    file.as_object_mut().unwrap().remove("marks");
    let graph = examine(torch::read(&file.to_string(), "unmarked").unwrap()).unwrap();
    assert!(graph.capture.warnings.iter().any(|w| w.contains("no marks")), "{:?}", graph.capture.warnings);
    let found = pairs(&graph);
    for pair in pairs(&analysed("v4-b8-all-mistakes")) {
        assert!(found.contains(&pair), "{pair:?} is missed without marks");
    }
}

#[test]
fn malformed_files_are_errors_that_name_what_is_wrong() {
    let sound: serde_json::Value = serde_json::from_str(&text("v4-b8-hold")).unwrap();
    let broken = |pointer: &str, value: serde_json::Value| {
        let mut file = sound.clone();
        *file.pointer_mut(pointer).unwrap() = value;
        file.to_string()
    };
    let cases = [
        ("{".to_owned(), "not a capture file"),
        ("[]".to_owned(), "not a capture file"),
        (broken("/format", "other/9".into()), "format `other/9`"),
        (broken("/edges/0", serde_json::json!([0, 4000])), "beyond the 40"),
        (broken("/edges/1", serde_json::json!([5, 0])), "cycle"),
        (broken("/edges/0/0", serde_json::json!(-1)), "not a capture file"),
        (broken("/nodes/0/params/0", "0g".into()), "no hexadecimal"),
        (broken("/nodes/0/params/0", "000".into()), "no hexadecimal"),
        (
            broken("/allocations/0", serde_json::json!({"action": "alloc", "addr": u64::MAX, "size": 9, "where": []})),
            "beyond the address space",
        ),
        (
            broken(
                "/nodes/0",
                serde_json::json!({"kind": "memcpy", "params": ["ffffffffffffffff", "ffffffffffffffff"], "bytes": 9}),
            ),
            "beyond the address space",
        ),
    ];
    for (file, message) in cases {
        let error = torch::read(&file, "bad.json").and_then(examine).map(|g| g.analysis.hazards.len()).unwrap_err();
        assert!(error.to_string().contains(message), "`{error}` does not say `{message}`");
        assert!(error.to_string().starts_with("bad.json"), "`{error}` does not name the file");
    }
    // A changed byte anywhere is an error or an analysis, never a panic.
    let text = sound.to_string();
    for at in (0..text.len()).step_by(997) {
        let mut bytes = text.clone().into_bytes();
        bytes[at] = b'7';
        if let Ok(text) = String::from_utf8(bytes) {
            let _ = torch::read(&text, "changed").and_then(examine).map(|g| g.causes.len());
        }
        let _ = torch::read(&text[..at], "cut").map(|c| c.nodes.len());
    }
}
