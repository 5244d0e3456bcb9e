//! Captures that are partial, odd or hostile: what nobody knows is told, and what is known is still found.

use serde_json::{Value, json};
use toolstorm::hazard::{
    Capture, Graph, Kind, Likelihood, examine,
    replay::{Outputs, replay},
    torch,
};

/// A capture file of `nodes` and `edges`, and whatever else it says.
pub(crate) fn file(nodes: &[Value], edges: &[(u32, u32)], more: &Value) -> String {
    let mut document = json!({ "format": "toolstorm-capture/1", "nodes": nodes, "edges": edges });
    let members = more.as_object().expect("members of the file");
    document.as_object_mut().expect("an object").extend(members.clone());
    document.to_string()
}

fn hex(address: u64) -> String {
    format!("{:016x}", address.swap_bytes())
}

pub(crate) fn kernel(name: &str, pointers: &[u64]) -> Value {
    json!({ "kind": "kernel", "name": name, "params": pointers.iter().map(|&p| hex(p)).collect::<Vec<_>>() })
}

pub(crate) fn memset(address: u64, bytes: u64) -> Value {
    json!({ "kind": "memset", "params": [hex(address)], "bytes": bytes })
}

pub(crate) fn event(action: &str, addr: u64, size: u64) -> Value {
    json!({ "action": action, "addr": addr, "size": size })
}

fn read(text: &str) -> Capture {
    torch::read(text, "odd").expect("a readable capture")
}

fn analysed(text: &str) -> Graph {
    examine(read(text)).expect("a sound capture")
}

fn pairs(graph: &Graph) -> Vec<(u32, u32)> {
    let mut pairs: Vec<_> = graph.analysis.hazards.iter().map(|h| (h.first, h.second)).collect();
    pairs.dedup();
    pairs
}

fn warned(graph: &Graph, what: &str) -> bool {
    graph.capture.warnings.iter().any(|warning| warning.contains(what))
}

#[test]
fn without_a_trace_copies_and_memsets_are_analysed_and_the_rest_is_unknown() {
    let nodes = [memset(4096, 512), kernel("fork", &[]), memset(4352, 512), kernel("use", &[9000])];
    let graph = analysed(&file(&nodes, &[(0, 1), (1, 3)], &json!({})));
    assert!(graph.capture.blind && warned(&graph, "no trace of the allocator"), "{:?}", graph.capture.warnings);
    let [hazard] = graph.analysis.hazards.as_slice() else { panic!("{:?}", graph.analysis.hazards) };
    assert_eq!((hazard.kind, hazard.likelihood), (Kind::Waw, Likelihood::Certain));
    assert_eq!(hazard.bytes, 4352..4608);
    let without_memory = analysed(&file(&[kernel("nothing", &[])], &[], &json!({})));
    assert!(!without_memory.capture.blind, "a graph that touches nothing needs no trace");
}

#[test]
fn marks_that_match_the_trace_only_in_part_are_not_trusted() {
    let text = crate::captures::text("v4-b8-all-mistakes");
    let mut document: Value = serde_json::from_str(&text).unwrap();
    for mark in document["marks"].as_array_mut().unwrap().iter_mut().skip(1) {
        mark[1] = (mark[1].as_u64().unwrap() + 1000).into();
    }
    let graph = analysed(&document.to_string());
    assert!(warned(&graph, "50 of 51 marks") && warned(&graph, "has no marks"), "{:?}", graph.capture.warnings);
    for pair in pairs(&analysed(&text)) {
        assert!(pairs(&graph).contains(&pair), "{pair:?} is missed");
    }
}

#[test]
fn a_copy_of_endless_rows_ends() {
    let rows = json!({ "kind": "memset", "params": [hex(1 << 20)], "bytes": 1, "pitch": [2], "rows": 1_u64 << 40 });
    let graph = analysed(&file(&[rows.clone(), rows], &[], &json!({})));
    assert_eq!(pairs(&graph), [(0, 1)]);
}

#[test]
fn sizes_beyond_any_address_are_errors_and_large_ones_do_not_overflow() {
    for size in [u64::MAX - 4096, 1 << 57] {
        let text = file(&[], &[], &json!({ "allocations": [event("alloc", 4096, size)] }));
        let error = torch::read(&text, "odd").map(|c| c.lifetimes.len()).unwrap_err();
        assert!(error.to_string().contains("beyond the address space"), "{error}");
    }
    // Each is dropped and its bytes are given to the next: every remedy moves hundreds of them.
    let size = (1_u64 << 57) - 4096;
    let nodes: Vec<Value> = (0..300).map(|_| kernel("use", &[4096])).collect();
    let events: Vec<Value> = (0..300).flat_map(|_| ["alloc", "free_requested"].map(|a| event(a, 4096, size))).collect();
    let marks: Vec<[u32; 3]> = (0..300).flat_map(|n| [[n, n + 1, n], [n + 1, n + 1, n + 1]]).collect();
    let graph = analysed(&file(&nodes, &[], &json!({ "allocations": events, "marks": marks })));
    assert!(!graph.analysis.hazards.is_empty());
}

#[test]
fn wide_child_graphs_are_tied_by_one_node_each() {
    let wide = |name: &str| {
        let nodes: Vec<Value> = (0..4000).map(|_| kernel(name, &[4096])).collect();
        json!({ "kind": "graph", "nodes": nodes })
    };
    let capture = read(&file(&[wide("early"), wide("late")], &[(0, 1)], &json!({})));
    assert!(capture.edges.len() < 20_000, "{} edges", capture.edges.len());
    let last = |name: &str| capture.nodes.iter().rposition(|n| n.kernel == name).unwrap() as u32;
    let after = |node: u32| capture.edges.iter().filter(|e| e.0 == node).map(|e| e.1).collect::<Vec<_>>();
    let [end] = after(last("early"))[..] else { panic!("one node ends the first graph") };
    let [begin] = after(end)[..] else { panic!("one node begins the second") };
    assert!(after(begin).contains(&last("late")));
}

#[test]
fn an_empty_allocation_inside_a_block_hides_nothing_of_it() {
    let nodes = [kernel("write", &[5120]), memset(5120, 16)];
    let events = [event("alloc", 4096, 2048), event("alloc", 5000, 0)];
    let graph = analysed(&file(&nodes, &[], &json!({ "allocations": events, "marks": [[0, 2, 0], [2, 2, 0]] })));
    assert_eq!(pairs(&graph), [(0, 1)]);
    assert!(graph.analysis.hazards.iter().all(|h| h.first_lifetime == h.second_lifetime && !h.recycled()));
}

#[test]
fn a_use_after_the_free_is_the_last_owners_and_told() {
    let nodes = [kernel("write", &[4096]), kernel("late", &[4096]), kernel("reuse", &[4096])];
    let events = [event("alloc", 4096, 512), event("free_requested", 4096, 512), event("alloc", 4096, 512)];
    let marks = json!([[0, 1, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [3, 2, 1]]);
    let graph = analysed(&file(&nodes, &[(0, 1), (0, 2)], &json!({ "allocations": events, "marks": marks })));
    assert_eq!(pairs(&graph), [(1, 2)]);
    assert!(
        warned(&graph, "memory that was free when their operation was enqueued: 1"),
        "{:?}",
        graph.capture.warnings
    );
}

#[test]
fn copies_in_memory_of_nobody_are_analysed_and_told() {
    let nodes = [memset(90_000, 64), memset(90_032, 64), kernel("use", &[4096])];
    let events = [event("alloc", 4096, 512)];
    let graph = analysed(&file(&nodes, &[], &json!({ "allocations": events, "marks": [[0, 1, 0], [3, 1, 0]] })));
    assert_eq!(pairs(&graph), [(0, 1)]);
    assert!(warned(&graph, "that the allocator's trace does not hold: 2"), "{:?}", graph.capture.warnings);
    assert!(!graph.capture.blind);
}

#[test]
fn nodes_that_are_not_understood_are_told() {
    let kinds = ["conditional", "mem_alloc", "conditional", "host", "empty", "event_record", "wait_event"];
    let nodes = kinds.map(|kind| json!({ "kind": kind }));
    let capture = read(&file(&nodes, &[], &json!({})));
    let told = |kind, count| format!("nodes of kind {kind} are not understood and count as touching nothing: {count}");
    assert_eq!(capture.warnings, [told("conditional", 2), told("mem_alloc", 1)]);
}

#[test]
fn without_marks_two_operations_are_one_hazard() {
    let nodes: Vec<Value> = (0..100).map(|_| kernel("use", &[4096])).collect();
    let events: Vec<Value> = (0..200).flat_map(|_| ["alloc", "free_requested"].map(|a| event(a, 4096, 512))).collect();
    let graph = analysed(&file(&nodes, &[], &json!({ "allocations": events })));
    assert_eq!(graph.analysis.hazards.len(), 100 * 99 / 2);
    assert!(graph.capture.touches.len() <= 200, "{} touches", graph.capture.touches.len());
}

#[test]
fn uses_of_which_nobody_knows_whether_one_writes_are_counted() {
    let nodes = [kernel("produce", &[4096]), kernel("a", &[4096]), kernel("b", &[4096])];
    let more = json!({ "allocations": [event("alloc", 4096, 512)], "marks": [[0, 1, 0], [3, 1, 0]] });
    let graph = analysed(&file(&nodes, &[(0, 1), (0, 2)], &more));
    assert_eq!((graph.analysis.hazards.len(), graph.analysis.unjudged), (0, 1));
    // A packed pointer may be left-over bytes: that the first toucher writes through it is not known.
    let packed = json!({ "kind": "kernel", "params": ["0010000000000000".repeat(2)] });
    let graph = analysed(&file(&[packed, kernel("a", &[4096])], &[], &more));
    assert_eq!((graph.analysis.hazards.len(), graph.analysis.unjudged), (0, 1));
    let ordered = analysed(&file(&nodes, &[(0, 1), (1, 2)], &more));
    assert_eq!(ordered.analysis.unjudged, 0);
}

/// One kernel that uses the buffer at 4096, which is alive when each capture begins.
fn uses_a_buffer(more: &Value) -> String {
    file(&[kernel("use", &[4096])], &[], more)
}

#[test]
fn a_capture_that_does_not_say_what_is_alive_ends_nothing() {
    let live = json!({ "live": [event("", 4096, 512)] });
    let mut pool = torch::Pool::default();
    let captures = [&live, &json!({}), &live].map(|more| pool.read(&uses_a_buffer(more), "g").unwrap());
    assert_eq!(replay(&captures, &[], Outputs::AtOnce).unwrap(), []);
    let mut pool = torch::Pool::default();
    let captures = [&live, &json!({ "live": [] }), &live].map(|more| pool.read(&uses_a_buffer(more), "g").unwrap());
    assert_eq!(replay(&captures, &[], Outputs::AtOnce).unwrap().len(), 1, "here the buffer was gone in between");
}

#[test]
fn each_process_has_a_pool_of_its_own() {
    let live = |process: &str, addr| json!({ "process": process, "live": [event("", addr, 512)] });
    let mut pool = torch::Pool::default();
    let captures = [live("rank 0", 4096), live("rank 1", 8192), live("rank 0", 4096)]
        .map(|more| pool.read(&uses_a_buffer(&more), "g").unwrap());
    assert_eq!(replay(&captures, &[], Outputs::AtOnce).unwrap(), []);
}

#[test]
fn memory_of_no_allocator_is_not_taken_for_freed() {
    let copy = |address| file(&[memset(address, 64)], &[], &json!({ "live": [] }));
    let mut pool = torch::Pool::default();
    let captures = [90_000, 90_032].map(|address| pool.read(&copy(address), "g").unwrap());
    assert_eq!(replay(&captures, &[0, 1, 0], Outputs::AfterNext).unwrap(), []);
}
