//! The built-in engine: what the analyser says of each configuration. Whether the virtual GPU agrees is in
//! `runs.rs`.

use std::collections::BTreeSet;

use toolstorm::{
    engine::{
        model::{Model, virtual_gpu},
        toggles::Toggles,
        weights::Weights,
    },
    hazard::{Capture, Graph, Kind, Order, Report, analyse, engine, fix::Remedy},
};

const BF16: (&str, &str) = ("SGLANG_DSV4_BF16_INDEX_K", "1");
const NO_OVERLAP: (&str, &str) = ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0");
const EAGER: (&str, &str) = ("TOOLSTORM_CUDA_GRAPH", "0");
const HOLD: (&str, &str) = ("TOOLSTORM_HOLD_UNTIL_JOIN", "1");
const RECORD: (&str, &str) = ("TOOLSTORM_RECORD_STREAM", "1");
const PERSISTENT: (&str, &str) = ("TOOLSTORM_PERSISTENT_LOGITS", "1");

fn report(variables: &[(&str, &str)]) -> Report {
    engine::report(variables.iter().copied()).expect("a valid configuration")
}

fn tensors(variables: &[(&str, &str)]) -> BTreeSet<String> {
    report(variables).tensors().into_iter().map(str::to_owned).collect()
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|&n| n.to_owned()).collect()
}

#[test]
fn each_configuration_has_the_hazards_of_its_mistakes() {
    let all = names(&["logits", "qkv_a", "topk_workspace"]);
    assert_eq!(tensors(&[BF16]), all, "A1, A2 and B");
    assert_eq!(tensors(&[BF16, PERSISTENT]), names(&["qkv_a", "topk_workspace"]), "A2 and B");
    assert_eq!(tensors(&[]), names(&["qkv_a"]), "fp8: B only, latent");
    assert_eq!(
        tensors(&[BF16, EAGER, ("TOOLSTORM_OVERLAP_EAGER", "1")]),
        all,
        "eager hides them, it does not cure them"
    );
    for fixed in [&[BF16, NO_OVERLAP][..], &[BF16, HOLD], &[BF16, RECORD], &[BF16, EAGER], &[HOLD], &[RECORD]] {
        let report = report(fixed);
        assert_eq!(report.hazards(), 0, "{fixed:?}: {:?}", report.tensors());
        assert!(report.graphs.len() > 5, "{fixed:?}: only {} buckets", report.graphs.len());
    }
}

#[test]
fn bucket_one_has_no_b() {
    let report = report(&[BF16]);
    let tensors = |graph: &Graph| graph.causes.iter().map(|c| c.tensor.clone()).collect::<BTreeSet<_>>();
    assert_eq!(tensors(&report.graphs[0]), names(&["logits", "topk_workspace"]), "{}", report.graphs[0].capture.name);
    for graph in &report.graphs[1..] {
        assert_eq!(tensors(graph), names(&["logits", "qkv_a", "topk_workspace"]), "{}", graph.capture.name);
    }
}

#[test]
fn every_hazard_is_told_with_kernels_streams_and_verified_fixes() {
    for graph in report(&[BF16]).graphs {
        assert!(graph.schedule.is_some(), "every op has a charged duration");
        for cause in &graph.causes {
            let head = &graph.analysis.hazards[cause.hazards[0]];
            assert!(matches!(head.kind, Kind::War | Kind::Waw | Kind::Raw), "accesses are declared: {head:?}");
            assert!(cause.why.contains(" on main") && cause.why.contains("was dropped"), "{}", cause.why);
            let verified: BTreeSet<Remedy> = cause.fixes.iter().filter(|f| f.verified()).map(|f| f.remedy).collect();
            assert_eq!(verified, Remedy::ALL.into(), "{}: {}: {:?}", graph.capture.name, cause.tensor, cause.fixes);
        }
    }
}

fn small(variables: &[(&str, &str)]) -> Toggles {
    let small = [("TOOLSTORM_MAX_BATCH", "4"), ("TOOLSTORM_MAX_CONTEXT", "1024")];
    Toggles::resolve(small.iter().chain(variables).copied()).expect("a valid configuration")
}

#[test]
fn each_event_wait_that_is_not_redundant_is_missed_when_deleted() {
    let correct: Vec<Capture> = engine::captures(&small(&[BF16, HOLD])).expect("captures");
    let (mut needed, mut redundant) = (0, 0);
    for capture in &correct {
        assert_eq!(analyse(capture).expect("a sound graph").hazards, []);
        let streams: Vec<Option<u32>> = capture.nodes.iter().map(|n| n.stream).collect();
        for (index, &(from, to)) in capture.edges.iter().enumerate() {
            if streams[from as usize] == streams[to as usize] {
                continue;
            }
            let mut mutant = capture.clone();
            mutant.edges.remove(index);
            let still_ordered = Order::new(&streams, &mutant.edges).expect("still acyclic").before(from, to);
            let hazards = analyse(&mutant).expect("a sound graph").hazards.len();
            if still_ordered {
                assert_eq!(hazards, 0, "{}: edge {from} → {to} is redundant", capture.name);
                redundant += 1;
            } else {
                let [a, b] = [from, to].map(|n| &capture.nodes[n as usize].kernel);
                assert!(hazards > 0, "{}: nothing misses the wait of {b} ({to}) for {a} ({from})", capture.name);
                needed += 1;
            }
        }
    }
    assert!(needed > 20, "{needed} needed and {redundant} redundant waits");
}

#[test]
fn the_graphs_analysed_are_those_that_run() {
    let toggles = small(&[BF16]);
    let ran = Model::on(virtual_gpu(&toggles), &toggles, 16, &Weights::new(1024)).expect("a model").graphs();
    assert_eq!(ran, engine::graphs(&toggles, 16).expect("graphs"));
}
