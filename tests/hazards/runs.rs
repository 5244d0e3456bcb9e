//! Thousands of short runs over random toggles, orders, batch mixes and seeds, each held to the eager single stream:
//! points 1 to 3 and 6 of the one rule, that corruption is never injected.

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{DefaultHasher, Hasher},
    io::Write,
    ops::Range,
    thread,
};

use rand::{RngExt, seq::IndexedRandom};
use rand_pcg::Pcg64Mcg;
use toolstorm::{
    device::{
        Device,
        kernel::{CORE_RING_PAGE, ENTRY_PAGE, INDEX_RING_PAGE, SWA_PAGE},
        sim::{self, RaceHit, Sim, reference::Reference},
    },
    engine::{
        DecodeRow, Prefill, TokenModel,
        model::{Model, virtual_gpu},
        toggles::Toggles,
        tokenizer::Token,
        weights::Weights,
    },
    hazard::{Analysis, Capture, analyse, engine},
    seed::Seed,
};

/// Room for more keys than one block of the indexer reads.
const CONTEXT: u32 = 1280;
const ROWS: usize = 4;
/// Pages of a row.
const PAGES: u32 = CONTEXT / 256;
const KEYS: &str = "SGLANG_DSV4_BF16_INDEX_K";
/// Different inputs of runs; each is the input of many configurations.
const SCRIPTS: u64 = 32;

/// Names and values of variables.
type Variables = Vec<(&'static str, String)>;

/// Switches, and in how many of four configurations each is on: so that mistakes are many, and fixes not rare.
const SWITCHES: [(&str, u32); 10] = [
    ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", 3),
    ("SGLANG_SM120_TRITON_INDEXER", 2),
    ("TOOLSTORM_CUDA_GRAPH", 3),
    ("TOOLSTORM_OVERLAP_EAGER", 2),
    ("TOOLSTORM_INDEXER_EAGER", 1),
    ("TOOLSTORM_PERSISTENT_LOGITS", 1),
    ("TOOLSTORM_HOLD_UNTIL_JOIN", 1),
    ("TOOLSTORM_RECORD_STREAM", 1),
    ("TOOLSTORM_GE_DIFF", 1),
    ("TOOLSTORM_INDEX_K_CANARY", 1),
];
const TOPKS: [u32; 3] = [16, 64, 200];

/// A random configuration with index keys in bf16 or fp8.
fn random_variables(rng: &mut Pcg64Mcg, keys: &str) -> Variables {
    let mut list: Variables =
        SWITCHES.iter().map(|&(name, often)| (name, u8::from(rng.random_ratio(often, 4)).to_string())).collect();
    let buckets = ["fine", "coarse", "3"].choose(rng).expect("some");
    let top_k = TOPKS.choose(rng).expect("some");
    list.push((KEYS, keys.to_owned()));
    list.push(("TOOLSTORM_BUCKETS", (*buckets).to_owned()));
    list.push(("TOOLSTORM_INDEX_TOPK", top_k.to_string()));
    list.push(("TOOLSTORM_SEED", rng.random::<u32>().to_string()));
    list
}

/// A random configuration, every other time one with all mistakes in it.
fn mistaken_variables(case: u64, keys: &str) -> Variables {
    let mut list = random_variables(&mut Seed(case).fork("few").rng(), keys);
    if case.is_multiple_of(2) {
        let set = |name, value: &str| (name, value.to_owned());
        list.extend(["SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "TOOLSTORM_CUDA_GRAPH"].map(|name| set(name, "1")));
        list.extend(["TOOLSTORM_HOLD_UNTIL_JOIN", "TOOLSTORM_RECORD_STREAM"].map(|name| set(name, "0")));
    }
    list
}

fn toggles(variables: &Variables, order: &str) -> Toggles {
    let small = [("TOOLSTORM_MAX_BATCH", ROWS.to_string()), ("TOOLSTORM_MAX_CONTEXT", CONTEXT.to_string())];
    let order = [("TOOLSTORM_ORDER", order.to_owned())];
    Toggles::resolve(small.iter().chain(variables).chain(&order).map(|(n, v)| (*n, v))).expect("a configuration")
}

/// What a run is fed: the tokens of each row, and how many of the rows each of its steps takes.
struct Script {
    rows: Vec<Vec<Token>>,
    steps: Vec<usize>,
}

impl Script {
    /// Texts that repeat themselves, so that the model copies and a damaged byte shows.
    fn random(number: u64) -> Self {
        let mut rng = Seed(number).fork("script").rng();
        let count = rng.random_range(2..=ROWS);
        let lengths = if number.is_multiple_of(8) { 1030..1200 } else { 120..400 };
        let mut text = || -> Vec<Token> {
            let phrase: Vec<Token> = (0..rng.random_range(20..80)).map(|_| rng.random_range(32..127)).collect();
            phrase.iter().cycle().take(rng.random_range(lengths.clone())).copied().collect()
        };
        let rows = (0..count).map(|_| text()).collect();
        Self { rows, steps: (0..rng.random_range(2..=4)).map(|_| rng.random_range(1..=count)).collect() }
    }

    /// Tokens of a row that are prefilled; the others are fed to its steps whatever the model answers.
    fn prefilled(&self, row: usize) -> usize {
        self.rows[row].len() - self.steps.len()
    }
}

/// Everything that a run can be compared by.
#[derive(Debug, PartialEq)]
struct Run {
    tokens: Vec<Vec<Token>>,
    /// Hash of all cache bytes but those of page 0, where padded rows write.
    caches: u64,
    /// By rows of the step.
    hits: Vec<(u32, RaceHit)>,
}

impl Run {
    fn same(&self, other: &Self) -> bool {
        self.tokens == other.tokens && self.caches == other.caches
    }
}

/// A model that is put back into its first state before each run, so that one capture serves many.
struct Rig<'a> {
    model: Model,
    caches: &'a [Range<u64>],
}

impl Rig<'_> {
    fn run(&mut self, script: &Script) -> Run {
        for cache in self.caches {
            let zeros = vec![0; (cache.end - cache.start) as usize];
            self.model.device().copy_in(cache.start, &zeros).expect("an idle device");
        }
        let tables: Vec<Vec<u32>> = (0..ROWS as u32).map(|r| (r * PAGES + 1..=(r + 1) * PAGES).collect()).collect();
        for (row, tokens) in script.rows.iter().enumerate() {
            let range = 0..script.prefilled(row) as u32;
            let (page_table, window_page) = (tables[row].as_slice(), row as u32 + 1);
            let chunk = Prefill { tokens, range, page_table, window_page, resumed: false, session: None };
            self.model.prefill(&chunk).expect("room");
        }
        let mut at: Vec<usize> = (0..script.rows.len()).map(|row| script.prefilled(row)).collect();
        let (mut tokens, mut hits) = (Vec::new(), Vec::new());
        for &size in &script.steps {
            let row = |row: usize| DecodeRow {
                token: script.rows[row][at[row]],
                position: at[row] as u32,
                page_table: &tables[row],
                window_page: row as u32 + 1,
                session: None,
            };
            let rows: Vec<DecodeRow<'_>> = (0..size).map(row).collect();
            tokens.push(self.model.decode(&rows).expect("a step"));
            let races = self.model.take_races().into_iter().flat_map(|races| races.hits);
            hits.extend(races.map(|hit| (size as u32, hit)));
            at[..size].iter_mut().for_each(|at| *at += 1);
        }
        Run { tokens, caches: self.hash(), hits }
    }

    fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for cache in self.caches {
            let mut bytes = vec![0; (cache.end - cache.start) as usize];
            self.model.device().copy_out(cache.start, &mut bytes).expect("an idle device");
            hasher.write(&bytes);
        }
        hasher.finish()
    }
}

/// What all runs with one format of index keys share.
struct Bench<'a> {
    weights: &'a Weights,
    keys: &'static str,
    /// Caches without page 0; they are made first, so that all configurations have them at the same addresses.
    caches: Vec<Range<u64>>,
    scripts: Vec<Script>,
    /// Runs of the eager single stream in host order, by top-k and script.
    references: BTreeMap<u32, Vec<Run>>,
}

impl<'a> Bench<'a> {
    fn new(weights: &'a Weights, keys: &'static str) -> Self {
        let toggles = toggles(&vec![(KEYS, keys.to_owned())], "host");
        let graphs = engine::graphs(&toggles, ROWS as u32 * PAGES).expect("graphs");
        let key_page = toggles.geometry(1).keys.page_bytes();
        let page = |name: &str| match name {
            "swa_cache" => Some(SWA_PAGE),
            "index_ring" => Some(INDEX_RING_PAGE),
            "index_keys" => Some(key_page),
            "core_ring" => Some(CORE_RING_PAGE),
            "c4_entries" => Some(ENTRY_PAGE),
            _ => None,
        };
        let caches = graphs[0].1.lifetimes.iter().filter_map(|l| Some(l.address + page(&l.name)?..l.address + l.bytes));
        let scripts = (0..SCRIPTS).map(Script::random).collect();
        Self { weights, keys, caches: caches.collect(), scripts, references: BTreeMap::new() }
    }

    fn rig(&self, variables: &Variables, order: &str) -> Rig<'_> {
        let toggles = toggles(variables, order);
        self.rig_on(virtual_gpu(&toggles), &toggles)
    }

    fn rig_on(&self, device: Device, toggles: &Toggles) -> Rig<'_> {
        let model = Model::on(device, toggles, ROWS as u32 * PAGES, self.weights).expect("a model");
        Rig { model, caches: &self.caches }
    }

    /// Makes the runs of the eager single stream. Its buckets fit each batch: what a batch is padded to changes nothing.
    fn with_references(mut self) -> Self {
        for top_k in TOPKS {
            let off = |name| (name, "0".to_owned());
            let mut variables = vec![off("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP"), off("TOOLSTORM_CUDA_GRAPH")];
            variables.push((KEYS, self.keys.to_owned()));
            variables.push(("TOOLSTORM_BUCKETS", "1,2,3".to_owned()));
            variables.push(("TOOLSTORM_INDEX_TOPK", top_k.to_string()));
            let mut rig = self.rig(&variables, "host");
            let runs = self.scripts.iter().map(|script| rig.run(script)).collect();
            self.references.insert(top_k, runs);
        }
        self
    }
}

/// The hazards of every bucket, or of each of its pieces.
struct Predicted {
    toggles: Toggles,
    graphs: Vec<(Capture, Analysis)>,
}

impl Predicted {
    fn new(toggles: Toggles) -> Self {
        let captures = engine::captures_with_pages(&toggles, ROWS as u32 * PAGES).expect("captures");
        let graphs = captures.into_iter().map(|capture| (analyse(&capture).expect("a sound graph"), capture));
        Self { graphs: graphs.map(|(analysis, capture)| (capture, analysis)).collect(), toggles }
    }

    /// The graphs of the bucket that so many rows pad up to.
    fn of(&self, rows: u32) -> impl Iterator<Item = &(Capture, Analysis)> {
        let sizes = self.toggles.buckets.sizes(ROWS as u32);
        let bucket = sizes.into_iter().find(|size| *size >= rows).expect("a bucket");
        let is = move |name: &str| {
            let rest = name.strip_prefix("decode_").and_then(|rest| rest.strip_prefix(&bucket.to_string()));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['_', ' ']))
        };
        self.graphs.iter().filter(move |(capture, _)| is(&capture.name))
    }

    fn exposes(&self, script: &Script) -> bool {
        script.steps.iter().any(|&rows| self.of(rows as u32).any(|(_, analysis)| !analysis.hazards.is_empty()))
    }

    /// Whether a hit lies inside a hazard: both kernels, their layers, and the bytes. A step without capture has its
    /// transients elsewhere than the graph that stands for it, and pieces count their ops anew.
    fn predicts(&self, rows: u32, hit: &RaceHit) -> bool {
        let (eager, whole) = (!self.toggles.graph, self.toggles.graph && !self.toggles.indexer_eager);
        let sides = [&hit.first, &hit.second].map(|side| (side.kernel, side.layer.map(u32::from)));
        self.of(rows).any(|(capture, analysis)| {
            let node = |op: u32| {
                let node = &capture.nodes[op as usize];
                (node.kernel.as_str(), node.layer)
            };
            analysis.hazards.iter().any(|hazard| {
                [node(hazard.first), node(hazard.second)] == sides
                    && (!whole || (hazard.first, hazard.second) == (hit.first.op, hit.second.op))
                    && (eager || (hazard.bytes.start <= hit.bytes.start && hit.bytes.end <= hazard.bytes.end))
            })
        })
    }
}

/// What came of all runs.
#[derive(Debug, Default)]
struct Tally {
    runs: u32,
    /// Runs in host order, and those of them that a hazard lay open to.
    host: [u32; 2],
    /// Other runs without a hazard.
    clean: u32,
    /// Other runs with one, by order; and those of them that differed.
    exposed: BTreeMap<&'static str, [u32; 2]>,
    hits: usize,
    /// Checks of the canary and samples of the differential.
    probed: u64,
    /// Tensors that were raced for: in one graph a step, in pieces, without a graph.
    raced: [BTreeSet<String>; 3],
}

impl Tally {
    fn differed(&self) -> u32 {
        self.exposed.values().map(|[_, differed]| differed).sum()
    }
}

/// Cases of one format, and the runs of a case: in host order, and in another.
const CASES: u64 = 96;
const RUNS: [usize; 2] = [4, 12];

/// Random cases; panics on a run that differs without a hazard, and on a race that was not predicted.
fn check_cases(bench: &Bench<'_>) -> Tally {
    let mut tally = Tally::default();
    for case in 0..CASES {
        let mut rng = Seed(case).fork("case").fork(bench.keys).rng();
        let variables = random_variables(&mut rng, bench.keys);
        let other = *["adversarial", "adversarial", "random", "pct:3"].choose(&mut rng).expect("some");
        let predicted = Predicted::new(toggles(&variables, other));
        for (order, runs) in ["host", other].into_iter().zip(RUNS) {
            let mut rig = bench.rig(&variables, order);
            for _ in 0..runs {
                let number = rng.random_range(0..bench.scripts.len());
                let script = &bench.scripts[number];
                let run = rig.run(script);
                let reference = &bench.references[&predicted.toggles.index_topk][number];
                check(&predicted, (order, script), &run, reference, &mut tally);
            }
            let probes = rig.model.activity();
            let found = probes.canary_hits.unwrap_or(0) + probes.ge_diff_divergences.unwrap_or(0);
            let quiet = order == "host" || predicted.graphs.iter().all(|(_, analysis)| analysis.hazards.is_empty());
            assert!(!quiet || found == 0, "a probe found something where nothing raced: {probes:?}");
            tally.probed += probes.canary_checks.unwrap_or(0) + probes.ge_diff_samples.unwrap_or(0);
        }
    }
    tally
}

fn check(
    predicted: &Predicted,
    (order, script): (&'static str, &Script),
    run: &Run,
    reference: &Run,
    tally: &mut Tally,
) {
    let (same, exposed) = (run.same(reference), predicted.exposes(script));
    tally.runs += 1;
    tally.hits += run.hits.len();
    if order == "host" {
        assert!(same && run.hits.is_empty(), "in host order: {:?}", predicted.toggles);
        tally.host[0] += 1;
        tally.host[1] += u32::from(exposed);
    } else if exposed {
        let counts = tally.exposed.entry(order).or_default();
        counts[0] += 1;
        counts[1] += u32::from(!same);
        assert!(same || !run.hits.is_empty(), "a difference without a race hit: {:?}", predicted.toggles);
    } else {
        assert!(same && run.hits.is_empty(), "no hazard, yet a difference or a hit: {:?}", predicted.toggles);
        tally.clean += 1;
    }
    for (rows, hit) in &run.hits {
        assert!(predicted.predicts(*rows, hit), "{rows} rows, not predicted: {hit:?} with {:?}", predicted.toggles);
        let form = if predicted.toggles.graph { usize::from(predicted.toggles.indexer_eager) } else { 2 };
        tally.raced[form].insert(hit.first.tensor.clone().into_owned());
    }
}

/// A line that `cargo test` shows of a test that passes too.
fn say(line: &str) {
    writeln!(std::io::stderr(), "{line}").expect("an open stderr");
}

#[test]
fn short_runs_differ_only_where_a_hazard_was_predicted() {
    let weights = Weights::new(CONTEXT);
    let [fp8, bf16] = thread::scope(|scope| {
        let check = |keys| check_cases(&Bench::new(&weights, keys).with_references());
        let formats = [scope.spawn(move || check("0")), scope.spawn(move || check("1"))];
        formats.map(|format| format.join().expect("what the other thread said"))
    });
    for (name, tally) in [("fp8", &fp8), ("bf16", &bf16)] {
        let Tally { runs, host, clean, exposed, hits, .. } = tally;
        say(&format!(
            "{name}: {runs} runs, {} differed: {} in host order ({} with a hazard), {clean} in others without one, and \
             of those with one, by order: {exposed:?}; {hits} race hits, all predicted",
            tally.differed(),
            host[0],
            host[1],
        ));
        assert!(host[1] > 50 && *clean > 200 && tally.probed > 1000, "too few runs of a kind");
        assert!(tally.raced.iter().all(|tensors| tensors.contains("qkv_a")), "{:?}", tally.raced);
    }
    let [exposed, differed] = bf16.exposed["adversarial"];
    assert!(2 * differed > exposed, "an adversary makes most runs of the baseline differ: {differed} of {exposed}");
    assert!(fp8.differed() > 0, "mistake B never bit");
    assert!(bf16.raced[0].len() > 1, "only {:?} was raced for", bf16.raced[0]);
}

/// What of a race log does not depend on when an op that nothing overlaps is executed.
fn essence(run: &Run) -> Vec<(u32, RaceHit)> {
    let mut hits = run.hits.clone();
    hits.sort_by_key(|(_, hit)| (hit.launch, hit.kind, hit.first.op, hit.second.op, hit.reader));
    for (_, hit) in &mut hits {
        hit.at_ns = 0;
        hit.expected.truncate(1);
        hit.seen.truncate(1);
    }
    hits
}

/// The virtual GPU without its fast paths: every op block by block, every read in slices, no packed keys.
fn full(toggles: &Toggles) -> Device {
    let config = sim::Config {
        seed: toggles.seed,
        schedule: toggles.order.clone(),
        cost: toggles.cost.clone(),
        full: true,
        ..sim::Config::default()
    };
    Device::new(Box::new(Sim::new(config, Box::new(Reference::dense()))))
}

#[test]
fn fast_paths_give_what_full_simulation_gives() {
    let weights = Weights::new(CONTEXT);
    let (mut runs, mut differed, mut hits) = (0, 0, 0);
    for keys in ["0", "1"] {
        let bench = Bench::new(&weights, keys);
        for (case, order) in (0..).zip(["adversarial", "random", "pct:3", "adversarial", "pct:3", "random"]) {
            let variables = mistaken_variables(case, keys);
            let toggles = toggles(&variables, order);
            let devices = [virtual_gpu(&toggles), full(&toggles)];
            let [mut fast, mut slow] = devices.map(|device| bench.rig_on(device, &toggles));
            let mut host = bench.rig(&variables, "host");
            for script in &bench.scripts[..8] {
                let (a, b) = (fast.run(script), slow.run(script));
                assert!(a.same(&b), "{toggles:?}");
                assert_eq!(essence(&a), essence(&b), "{toggles:?}");
                runs += 1;
                differed += u32::from(!a.same(&host.run(script)));
                hits += a.hits.len();
            }
        }
    }
    say(&format!("fast and full simulation: {runs} runs alike, {differed} differed from host order, {hits} race hits"));
    assert!(differed > 5 && hits > 50);
}

#[test]
fn running_twice_gives_what_running_once_gives() {
    let weights = Weights::new(CONTEXT);
    let bench = Bench::new(&weights, "1");
    let (mut runs, mut differed, mut hits) = (0, 0, 0);
    for (case, order) in (0..).zip(["adversarial", "random", "pct:2", "host", "adversarial"]) {
        let variables = mistaken_variables(case, bench.keys);
        let [mut once, mut twice, mut host] =
            [order, &format!("twice:{order}"), "host"].map(|order| bench.rig(&variables, order));
        for script in &bench.scripts[..16] {
            // Where the two differ, the step is an error and the test ends.
            let run = once.run(script);
            assert_eq!(run, twice.run(script), "{order} with {variables:?}");
            runs += 1;
            differed += u32::from(!run.same(&host.run(script)));
            hits += run.hits.len();
        }
    }
    say(&format!("run twice: {runs} runs alike, {differed} differed from host order, {hits} race hits"));
    assert!(differed > 5 && hits > 50);
}
