//! The engine on a GPU: every arm answers dictated calls, and what a step costs in each. Prints JSON lines.

use serde_json::{Value, json};
use toolstorm::{
    clock::Clock,
    engine::{
        DecodeRow,
        model::Model,
        selftest::{Load, dictate},
        toggles::Toggles,
    },
    hazard,
    seed::Seed,
};

type Pairs = &'static [(&'static str, &'static str)];

const BF16: (&str, &str) = ("SGLANG_DSV4_BF16_INDEX_K", "1");

/// Arms of the table, and whether a wrong byte is a failure of the engine.
const ARMS: &[(&str, bool, Pairs)] = &[
    ("baseline", false, &[BF16]),
    ("persistent-logits", false, &[BF16, ("TOOLSTORM_PERSISTENT_LOGITS", "1")]),
    ("ge-diff", false, &[BF16, ("TOOLSTORM_GE_DIFF", "1")]),
    ("eager", true, &[BF16, ("TOOLSTORM_CUDA_GRAPH", "0")]),
    ("eager-overlap", false, &[BF16, ("TOOLSTORM_CUDA_GRAPH", "0"), ("TOOLSTORM_OVERLAP_EAGER", "1")]),
    ("fp8", false, &[]),
    ("fallback-reader", false, &[BF16, ("SGLANG_SM120_TRITON_INDEXER", "0")]),
    ("overlap-off", true, &[BF16, ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0")]),
    ("fp8-overlap-off", true, &[("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0")]),
    ("hold-until-join", true, &[BF16, ("TOOLSTORM_HOLD_UNTIL_JOIN", "1")]),
    ("fp8-hold-until-join", true, &[("TOOLSTORM_HOLD_UNTIL_JOIN", "1")]),
    ("record-stream", true, &[BF16, ("TOOLSTORM_RECORD_STREAM", "1")]),
    ("indexer-eager", false, &[BF16, ("TOOLSTORM_INDEXER_EAGER", "1")]),
    ("canary", false, &[BF16, ("TOOLSTORM_INDEX_K_CANARY", "1")]),
];

const CONTEXTS: [u32; 2] = [4096, 16_384];
const PAGE: u32 = 256;

fn model(pairs: &[(&str, &str)], rows: u32, longest: u32) -> Model {
    let size = rows.to_string();
    let context = longest.to_string();
    let common = [
        ("TOOLSTORM_DEVICE", "cuda"),
        ("TOOLSTORM_MAX_BATCH", size.as_str()),
        ("TOOLSTORM_MAX_CONTEXT", context.as_str()),
    ];
    let toggles = Toggles::resolve(pairs.iter().copied().chain(common)).expect("toggles");
    Model::new(&toggles, 1 + rows * longest.div_ceil(PAGE)).expect("a model")
}

fn dictated(arm: &str, pairs: Pairs, rows: u32, context: u32, turns: u32) -> (u32, Value) {
    let mut model = model(pairs, rows, context);
    let clock = Clock::start();
    let outcome = dictate(&mut model, Load { rows, context, turns }, Seed(u64::from(rows))).expect("a run");
    let seconds = clock.elapsed().as_secs_f64();
    let line = json!({
        "arm": arm, "rows": rows, "context": context, "turns": outcome.turns, "wrong": outcome.wrong,
        "tokens": outcome.tokens, "steps": model.steps(), "seconds": seconds,
        "ge_diff": model.differential().map(|found| (found.samples, found.divergences)),
        "canary_hits": model.canary().map(|found| found.hits),
    });
    (outcome.wrong, line)
}

#[test]
#[ignore = "needs a GPU"]
fn arms_answer_dictated_calls() {
    let mut failed = Vec::new();
    for (arm, must_be_right, pairs) in ARMS {
        // The canary's host compares the sums of every live page twice a step.
        let turns = if *arm == "canary" { 32 } else { 256 };
        let (wrong, line) = dictated(arm, pairs, 64, CONTEXTS[1], turns);
        println!("{line}");
        if wrong > 0 && *must_be_right {
            failed.push(*arm);
        }
    }
    for context in CONTEXTS {
        for rows in [1, 2, 4, 8, 16, 32, 64, 128] {
            println!("{}", dictated("baseline", &[BF16], rows, context, 4 * rows.clamp(4, 64)).1);
        }
    }
    assert!(failed.is_empty(), "wrong bytes where none may be: {failed:?}");
}

/// Pages of rows of `context` tokens.
fn page_tables(rows: u32, context: u32) -> Vec<Vec<u32>> {
    let pages = context.div_ceil(PAGE);
    (0..rows).map(|row| (1 + row * pages..=(row + 1) * pages).collect()).collect()
}

/// Rows at the end of `context`.
fn last_tokens(tables: &[Vec<u32>], context: u32) -> Vec<DecodeRow<'_>> {
    fn row(table: &[u32], page: u32, context: u32) -> DecodeRow<'_> {
        DecodeRow { token: b'a', position: context - 1, page_table: table, window_page: page, session: None }
    }
    tables.iter().zip(1..).map(|(table, page)| row(table, page, context)).collect()
}

/// Host-to-host times of a decode step with every row at the same position, and what it takes the device: the time of
/// many of the same, one after the other, divided by their number.
fn step_times(model: &mut Model, rows: u32, context: u32) -> ([f64; 3], f64) {
    const TIMES: u32 = 40;
    let tables = page_tables(rows, context);
    let batch = last_tokens(&tables, context);
    let mut times: Vec<f64> = (0..150)
        .map(|_| {
            let clock = Clock::start();
            model.decode(&batch).expect("a step");
            clock.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.drain(..20);
    times.sort_by(f64::total_cmp);
    let mut device: Vec<f64> = (0..5)
        .map(|_| {
            let clock = Clock::start();
            model.repeat(TIMES).expect("steps");
            clock.elapsed().as_secs_f64() * 1e6 / f64::from(TIMES)
        })
        .collect();
    device.sort_by(f64::total_cmp);
    ([times[times.len() / 10], times[times.len() / 2], times[times.len() * 9 / 10]], device[device.len() / 2])
}

#[test]
#[ignore = "needs a GPU"]
fn steps_cost() {
    for (arm, _, pairs) in ARMS {
        for rows in [1, 8, 64] {
            let context = CONTEXTS[1];
            let ([low, median, high], device) = step_times(&mut model(pairs, rows, context), rows, context);
            println!(
                "{}",
                json!({"arm": arm, "rows": rows, "context": context, "step_us": [low, median, high], "device_us": device,
                    "tokens_a_second": f64::from(rows) / median * 1e6})
            );
        }
    }
}

/// A few eager steps of each batch and nothing else, for a profiler: `benches/gpu/step_table.py` makes a table of them.
#[test]
#[ignore = "needs a GPU"]
fn steps_for_a_profiler() {
    let context = CONTEXTS[1];
    for rows in [1, 8, 64] {
        let size = rows.to_string();
        let pairs = [BF16, ("TOOLSTORM_CUDA_GRAPH", "0"), ("TOOLSTORM_BUCKETS", size.as_str())];
        let mut model = model(&pairs, rows, context);
        let tables = page_tables(rows, context);
        for _ in 0..4 {
            model.decode(&last_tokens(&tables, context)).expect("a step");
        }
    }
}

#[test]
#[ignore = "needs a GPU"]
fn captures_have_the_hazards_of_their_traces() {
    for (arm, _, pairs) in ARMS.iter().filter(|arm| arm.0 != "eager" && arm.0 != "eager-overlap") {
        // Each capture is read back from the driver as it ends, and compared with the trace; this examines the traces.
        for (bucket, trace) in model(pairs, 64, CONTEXTS[1]).graphs() {
            let found = hazard::analyse(&hazard::trace::capture(&trace, &[])).expect("an analysis");
            println!(
                "{}",
                json!({"arm": arm, "bucket": bucket, "ops": trace.ops.len(), "edges": trace.edges.len(),
                    "hazards": found.hazards.len() as u64 + found.omitted})
            );
        }
    }
}
