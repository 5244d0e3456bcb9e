//! The built-in engine: what the analyser says of each configuration, and whether the virtual GPU agrees.

use std::collections::BTreeSet;

use rand::RngExt;
use toolstorm::{
    device::sim::RaceHit,
    engine::{
        DecodeRow, Prefill, TokenModel,
        model::{Model, virtual_gpu},
        toggles::Toggles,
        tokenizer::Token,
        weights::Weights,
    },
    hazard::{Capture, Graph, Kind, Order, Report, analyse, engine, examine, fix::Remedy},
    seed::Seed,
};

const BF16: (&str, &str) = ("SGLANG_DSV4_BF16_INDEX_K", "1");
const NO_OVERLAP: (&str, &str) = ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0");
const EAGER: (&str, &str) = ("TOOLSTORM_CUDA_GRAPH", "0");
const INDEXER_EAGER: (&str, &str) = ("TOOLSTORM_INDEXER_EAGER", "1");
const HOLD: (&str, &str) = ("TOOLSTORM_HOLD_UNTIL_JOIN", "1");
const RECORD: (&str, &str) = ("TOOLSTORM_RECORD_STREAM", "1");
const PERSISTENT: (&str, &str) = ("TOOLSTORM_PERSISTENT_LOGITS", "1");
const ADVERSARIAL: (&str, &str) = ("TOOLSTORM_ORDER", "adversarial");
const HOST: (&str, &str) = ("TOOLSTORM_ORDER", "host");

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

/// Rows with random tokens, stepped with given batch sizes; everything that a run can be compared by.
struct Run {
    tokens: Vec<Vec<Token>>,
    caches: Vec<u8>,
    hits: Vec<(u32, RaceHit)>,
}

struct Bench {
    weights: Weights,
}

const CONTEXT: u32 = 1024;
const PAGES: u32 = CONTEXT / 256;
const ROWS: u32 = 4;

impl Bench {
    fn new() -> Self {
        Self { weights: Weights::new(CONTEXT) }
    }

    fn toggles(variables: &[(&str, &str)]) -> Toggles {
        let small = [("TOOLSTORM_MAX_BATCH", "4"), ("TOOLSTORM_MAX_CONTEXT", "1024")];
        Toggles::resolve(small.iter().chain(variables).copied()).expect("a valid configuration")
    }

    fn model(&self, variables: &[(&str, &str)]) -> Model {
        let toggles = Self::toggles(variables);
        Model::on(virtual_gpu(&toggles), &toggles, ROWS * PAGES, &self.weights).expect("a model")
    }

    /// `seed` decides prompts, tokens and, with the variables, the virtual GPU's order.
    fn run(&self, variables: &[(&str, &str)], batches: &[usize], seed: u64) -> Run {
        let launch = seed.to_string();
        let variables = [variables, &[("TOOLSTORM_SEED", launch.as_str())]].concat();
        let mut model = self.model(&variables);
        let mut rng = Seed(seed).fork("rows").rng();
        let rows = batches.iter().copied().max().unwrap_or(0);
        let mut sequences: Vec<Vec<Token>> =
            (0..rows).map(|_| (0..rng.random_range(300..600)).map(|_| rng.random_range(32..127)).collect()).collect();
        let tables: Vec<Vec<u32>> = (0..ROWS).map(|r| (r * PAGES + 1..=(r + 1) * PAGES).collect()).collect();
        for (row, tokens) in sequences.iter().enumerate() {
            let end = tokens.len() as u32 - 1;
            for start in (0..end).step_by(256) {
                let range = start..(start + 256).min(end);
                let (page_table, window_page) = (tables[row].as_slice(), row as u32 + 1);
                model
                    .prefill(&Prefill { tokens, range, page_table, window_page, resumed: false, session: None })
                    .expect("room");
            }
        }
        let (mut out, mut hits) = (Vec::new(), Vec::new());
        for &size in batches {
            let step: Vec<DecodeRow> = (0..size)
                .map(|row| DecodeRow {
                    token: *sequences[row].last().expect("a token"),
                    position: sequences[row].len() as u32 - 1,
                    page_table: &tables[row],
                    window_page: row as u32 + 1,
                    session: None,
                })
                .collect();
            out.push(model.decode(&step).expect("a step"));
            let races = model.take_races().into_iter().flat_map(|races| races.hits);
            hits.extend(races.map(|hit| (size as u32, hit)));
            for sequence in sequences.iter_mut().take(size) {
                sequence.push(rng.random_range(32..127));
            }
        }
        Run { tokens: out, caches: Self::caches(&model, &variables), hits }
    }

    /// Every cache, byte for byte; caches are made first, so their addresses are those of any other run.
    fn caches(model: &Model, variables: &[(&str, &str)]) -> Vec<u8> {
        let mut captured = Self::toggles(variables);
        (captured.graph, captured.indexer_eager) = (true, false);
        let graphs = engine::graphs(&captured, ROWS * PAGES).expect("graphs");
        let kept = ["swa_cache", "index_keys", "c4_entries"];
        let mut bytes = Vec::new();
        for lifetime in graphs[0].1.lifetimes.iter().filter(|l| kept.contains(&l.name.as_ref())) {
            let mut cache = vec![0; lifetime.bytes as usize];
            model.device().copy_out(lifetime.address, &mut cache).expect("an idle device");
            bytes.extend(cache);
        }
        bytes
    }

    fn graphs(variables: &[(&str, &str)]) -> Vec<Graph> {
        let captures = engine::captures_with_pages(&Self::toggles(variables), ROWS * PAGES).expect("captures");
        captures.into_iter().map(|c| examine(c).expect("a sound graph")).collect()
    }
}

/// Page 0 is written by padded rows; batches here have none, and the caches must then agree byte for byte.
const BATCHES: [usize; 10] = [4, 4, 2, 4, 1, 4, 4, 2, 4, 4];

/// Variables of one configuration.
type Variables<'a> = &'a [(&'a str, &'a str)];

#[test]
fn without_hazards_nothing_differs_and_with_them_something_does() {
    let bench = Bench::new();
    let cases: [(Variables, &[usize]); 10] = [
        (&[BF16, HOLD], &BATCHES),
        (&[BF16, RECORD], &BATCHES),
        (&[BF16, NO_OVERLAP], &BATCHES),
        (&[HOLD], &BATCHES),
        (&[RECORD, ("SGLANG_SM120_TRITON_INDEXER", "0")], &BATCHES),
        (&[], &[1, 1, 1, 1]),
        (&[BF16], &BATCHES),
        (&[BF16, PERSISTENT], &BATCHES),
        (&[], &BATCHES),
        (&[BF16], &[1, 1, 1, 1]),
    ];
    let (mut clean, mut exposed, mut differing) = (0, 0, 0);
    for (seed, (variables, batches)) in cases.into_iter().enumerate() {
        let graphs = Bench::graphs(variables);
        let visited = |g: &&Graph| batches.iter().any(|b| g.capture.name == format!("decode_{b}"));
        assert_eq!(graphs.iter().filter(visited).count(), batches.iter().collect::<BTreeSet<_>>().len());
        let hazards: usize = graphs.iter().filter(visited).map(|g| g.analysis.hazards.len()).sum();
        let keys: Vec<_> = variables.iter().copied().filter(|v| v.0 == BF16.0).collect();
        let reference = bench.run(&[&keys[..], &[EAGER, NO_OVERLAP, HOST]].concat(), batches, seed as u64);
        let run = bench.run(&[variables, &[ADVERSARIAL]].concat(), batches, seed as u64);
        let same = run.tokens == reference.tokens && run.caches == reference.caches;
        if hazards == 0 {
            assert!(same, "{variables:?}: no hazard was reported, yet the run differs");
            assert_eq!(run.hits, [], "{variables:?}");
            clean += 1;
        } else {
            exposed += 1;
            differing += usize::from(!same);
            let host = bench.run(&[variables, &[HOST]].concat(), batches, seed as u64);
            assert!(host.tokens == reference.tokens && host.caches == reference.caches, "{variables:?} in host order");
        }
    }
    assert!(clean == 6 && exposed == 4, "{clean} configurations without hazards, {exposed} with");
    assert!(differing > 1, "only {differing} of {exposed} exposed runs differ: the clean ones prove nothing");
}

#[test]
fn every_race_hit_was_predicted() {
    let bench = Bench::new();
    let configurations = [&[BF16][..], &[], &[BF16, PERSISTENT], &[BF16, INDEXER_EAGER]];
    let mut raced = [const { BTreeSet::new() }; 4];
    for (variables, raced) in configurations.into_iter().zip(&mut raced) {
        let graphs = Bench::graphs(variables);
        for seed in 0..2 {
            for (bucket, hit) in bench.run(&[variables, &[ADVERSARIAL]].concat(), &BATCHES[..6], seed).hits {
                // A bucket is one graph, or pieces with the indexer between, whose ops count on in the log.
                let (whole, pieces) = (format!("decode_{bucket}"), format!("decode_{bucket}_piece_"));
                let predicted = graphs.iter().any(|graph| {
                    let node = |op: u32| {
                        let node = &graph.capture.nodes[op as usize];
                        (node.kernel.as_str(), node.layer)
                    };
                    let [first, second] =
                        [&hit.first, &hit.second].map(|side| (side.kernel, side.layer.map(u32::from)));
                    let is_whole = graph.capture.name == whole;
                    (is_whole || graph.capture.name.starts_with(&pieces))
                        && graph.analysis.hazards.iter().any(|h| {
                            (node(h.first), node(h.second)) == (first, second)
                                && (!is_whole || (h.first, h.second) == (hit.first.op, hit.second.op))
                                && h.bytes.start <= hit.bytes.start
                                && hit.bytes.end <= h.bytes.end
                        })
                });
                assert!(predicted, "{variables:?}, bucket {bucket}: not predicted: {hit:?}");
                raced.insert(hit.first.tensor.clone().into_owned());
            }
        }
    }
    for (variables, raced) in configurations.iter().zip(&raced) {
        assert!(raced.contains("qkv_a"), "{variables:?}: only {raced:?} was raced for");
    }
    assert!(raced[0].len() > 1, "only {:?} was raced for", raced[0]);
}

#[test]
fn each_event_wait_that_is_not_redundant_is_missed_when_deleted() {
    let correct: Vec<Capture> = engine::captures(&Bench::toggles(&[BF16, HOLD])).expect("captures");
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
    let bench = Bench::new();
    let variables = [BF16];
    let ran = bench.model(&variables).graphs();
    let analysed = engine::graphs(&Bench::toggles(&variables), ROWS * PAGES).expect("graphs");
    assert_eq!(ran, analysed);
}
