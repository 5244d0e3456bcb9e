//! What must hold of the engine whatever the toggles, batch mixes and seeds. Each test counts the runs that could have
//! failed, and fails when there were none.

use rand::RngExt;

use super::{
    DecodeRow, Prefill,
    differential::Differential,
    geometry::COMPRESSED,
    model::{Model, virtual_gpu},
    selftest::{Load, Outcome, dictate},
    toggles::Toggles,
    weights::Weights,
};
use crate::{
    device::{
        Tensor,
        kernel::{LIVE, Q_LORA_GROUP, SWA_DIM, SWA_PAGE},
    },
    seed::Seed,
};

const CONTEXT: u32 = 2048;
const PAGES_PER_ROW: u32 = CONTEXT / 256;

type Pairs = Vec<(&'static str, String)>;

fn pairs(list: &[(&'static str, &str)]) -> Pairs {
    list.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
}

fn toggles(rows: u32, list: &Pairs) -> Toggles {
    let size = rows.to_string();
    let context = CONTEXT.to_string();
    let common = [("TOOLSTORM_MAX_CONTEXT", context), ("TOOLSTORM_MAX_BATCH", size)];
    Toggles::resolve(common.into_iter().chain(list.iter().cloned())).unwrap()
}

fn model(rows: u32, list: &Pairs) -> Model {
    Model::new(&toggles(rows, list), rows * PAGES_PER_ROW).unwrap()
}

fn run(rows: u32, turns: u32, list: &Pairs, seed: u64) -> Outcome {
    dictate(&mut model(rows, list), Load { rows, context: CONTEXT, turns }, Seed(seed)).unwrap()
}

const SWITCHES: [&str; 11] = [
    "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP",
    "SGLANG_DSV4_BF16_INDEX_K",
    "SGLANG_SM120_TRITON_INDEXER",
    "TOOLSTORM_CUDA_GRAPH",
    "TOOLSTORM_OVERLAP_EAGER",
    "TOOLSTORM_INDEXER_EAGER",
    "TOOLSTORM_PERSISTENT_LOGITS",
    "TOOLSTORM_HOLD_UNTIL_JOIN",
    "TOOLSTORM_RECORD_STREAM",
    "TOOLSTORM_GE_DIFF",
    "TOOLSTORM_INDEX_K_CANARY",
];

fn random_pairs(rng: &mut impl RngExt) -> Pairs {
    let mut list: Pairs = SWITCHES.iter().map(|name| (*name, u8::from(rng.random::<bool>()).to_string())).collect();
    list.push(("TOOLSTORM_INDEX_TOPK", [16, 64, 200][rng.random_range(0..3)].to_string()));
    list.push(("TOOLSTORM_BUCKETS", ["fine", "coarse", "3"][rng.random_range(0..3)].to_owned()));
    list.push(("TOOLSTORM_SEED", rng.random::<u32>().to_string()));
    list
}

fn is_on(list: &Pairs, name: &str) -> bool {
    list.iter().any(|(key, value)| *key == name && value == "1")
}

#[test]
fn in_host_order_every_configuration_is_exact() {
    let mut rng = Seed(3).fork("host order").rng();
    let mut mistaken = 0;
    for case in 0..10 {
        let mut list = random_pairs(&mut rng);
        list.push(("TOOLSTORM_ORDER", "host".to_owned()));
        let fixed = is_on(&list, "TOOLSTORM_HOLD_UNTIL_JOIN") || is_on(&list, "TOOLSTORM_RECORD_STREAM");
        mistaken += u32::from(!fixed && is_on(&list, "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP"));
        let outcome = run(4, 5, &list, case);
        assert_eq!(outcome.wrong, 0, "{list:?}: {:?}", outcome.first);
    }
    assert!(mistaken > 0, "no case had a lifetime mistake in it");
}

#[test]
fn an_adversary_breaks_the_mistakes_and_nothing_else() {
    const BF16: (&str, &str) = ("SGLANG_DSV4_BF16_INDEX_K", "1");
    let arm = |list: &[(&'static str, &str)], seed: u64| {
        let mut list = pairs(list);
        list.push(("TOOLSTORM_ORDER", "adversarial".to_owned()));
        list.push(("TOOLSTORM_SEED", seed.to_string()));
        run(4, 6, &list, seed).wrong
    };
    let total = |list: &[(&'static str, &str)]| (0..2).map(|seed| arm(list, seed)).sum::<u32>();
    let baseline = total(&[BF16]);
    assert!(baseline >= 7, "baseline: {baseline} of 12 turns wrong");
    let fp8 = total(&[]);
    assert!(fp8 > 0, "mistake B never bit");
    for fix in [
        ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"),
        ("TOOLSTORM_HOLD_UNTIL_JOIN", "1"),
        ("TOOLSTORM_RECORD_STREAM", "1"),
    ] {
        assert_eq!(total(&[BF16, fix]), 0, "bf16 with {fix:?}");
        assert_eq!(total(&[fix]), 0, "fp8 with {fix:?}");
    }
}

/// All cache bytes but the window's ballast, which prefill leaves zero.
fn cache_bytes(model: &Model) -> Vec<u8> {
    let read = |tensor: &Tensor| {
        let mut bytes = vec![0; tensor.bytes() as usize];
        model.device().copy_out(tensor.address(), &mut bytes).unwrap();
        bytes
    };
    let mut all = Vec::new();
    for layer in &model.network.caches {
        let window = read(&layer.window);
        all.extend(window[SWA_PAGE as usize..].chunks(SWA_DIM as usize * 2).flat_map(|entry| &entry[..16]));
        if let Some(cache) = &layer.compressed {
            let page = cache.index_ring.bytes() as usize / (model.network.geometry.ring_pages() as usize);
            all.extend(&read(&cache.index_ring)[page..]);
            let page = model.network.geometry.keys.page_bytes() as usize;
            all.extend(&read(&cache.index_keys)[page..]);
            let page = cache.core_ring.bytes() as usize / (model.network.geometry.ring_pages() as usize);
            all.extend(&read(&cache.core_ring)[page..]);
            let page = cache.entries.bytes() as usize / model.network.geometry.pages as usize;
            all.extend(&read(&cache.entries)[page..]);
        }
    }
    all
}

#[test]
fn a_captured_single_stream_leaves_the_eager_bytes() {
    for keys in ["0", "1"] {
        let both = ["0", "1"].map(|graph| {
            let list = pairs(&[
                ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"),
                ("SGLANG_DSV4_BF16_INDEX_K", keys),
                ("TOOLSTORM_CUDA_GRAPH", graph),
            ]);
            let mut model = model(3, &list);
            let outcome = dictate(&mut model, Load { rows: 3, context: CONTEXT, turns: 5 }, Seed(9)).unwrap();
            (outcome, cache_bytes(&model), model.graphs().len())
        });
        let [(eager, eager_bytes, none), (graph, graph_bytes, some)] = both;
        assert_eq!((none, some > 0), (0, true));
        assert_eq!(eager, graph);
        assert!(eager_bytes == graph_bytes, "the caches differ");
        assert!(eager.tokens > 200, "{eager:?}");
    }
}

#[test]
fn a_run_is_a_function_of_its_seed() {
    let list = pairs(&[("SGLANG_DSV4_BF16_INDEX_K", "1"), ("TOOLSTORM_SEED", "5"), ("TOOLSTORM_ORDER", "adversarial")]);
    let once = || {
        let mut model = model(4, &list);
        let outcome = dictate(&mut model, Load { rows: 4, context: CONTEXT, turns: 3 }, Seed(1)).unwrap();
        (outcome, cache_bytes(&model), *model.decode_stats())
    };
    let (first, second) = (once(), once());
    assert!(first.2.race_hits > 0, "nothing raced");
    assert!(first == second);
}

/// Ninety random tokens, some of them control tokens, over and over, so that long and short matches are found.
fn text(length: usize) -> Vec<u8> {
    let mut rng = Seed(4).fork("text").rng();
    let phrase: Vec<u8> = (0..90).map(|_| b"abcdefghijklmnop \xf8"[rng.random_range(0..18)]).collect();
    phrase.iter().cycle().take(length).copied().collect()
}

fn decode_all(model: &mut Model, tokens: &[u8], from: u32, table: &[u32], window_page: u32) -> Vec<u8> {
    (from..tokens.len() as u32)
        .map(|position| {
            let row =
                DecodeRow { token: tokens[position as usize], position, page_table: table, window_page, session: None };
            model.decode(&[row]).unwrap()[0]
        })
        .collect()
}

#[test]
fn prefill_leaves_what_decoding_would() {
    let tokens = text(330);
    for keys in ["0", "1"] {
        let list = pairs(&[
            ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"),
            ("SGLANG_DSV4_BF16_INDEX_K", keys),
            ("TOOLSTORM_BUCKETS", "1"),
        ]);
        let mut decoded = model(2, &list);
        let whole = decode_all(&mut decoded, &tokens, 0, &[5, 3], 1);
        for chunk in [330, 100, 7] {
            let mut prefilled = model(2, &list);
            for start in (0..330).step_by(chunk) {
                let range = start as u32..(start + chunk).min(330) as u32;
                let (page_table, window_page) = (&[5, 3][..], 1);
                let chunk = Prefill { tokens: &tokens, range, page_table, window_page, resumed: false, session: None };
                prefilled.prefill(&chunk).unwrap();
            }
            assert!(cache_bytes(&decoded) == cache_bytes(&prefilled), "chunks of {chunk}, bf16 = {keys}");
        }
        // Another sequence takes the first page from the cache and rebuilds its window from the tokens before it.
        let range = 256..300;
        let chunk =
            Prefill { tokens: &tokens, range, page_table: &[5, 7], window_page: 2, resumed: true, session: None };
        decoded.prefill(&chunk).unwrap();
        let resumed = decode_all(&mut decoded, &tokens, 300, &[5, 7], 2);
        assert_eq!(resumed, whole[300..]);
        let distinct: std::collections::BTreeSet<_> = whole.iter().collect();
        assert!(distinct.len() > 5, "the model said the same all along");
    }
}

#[test]
fn nothing_of_the_ballast_reaches_a_live_dim() {
    let mut weights = Weights::new(CONTEXT);
    let mut poisoned = 0;
    let mut poison = |values: &mut [f32]| {
        for (at, value) in values.iter_mut().enumerate() {
            *value = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][at % 3];
            poisoned += 1;
        }
    };
    let ballast = |weight: &crate::device::SparseWeight| -> Vec<usize> {
        (0..weight.column.len()).filter(|at| u64::from(weight.column[*at]) >= LIVE).collect()
    };
    for at in ballast(&weights.embedding) {
        poison(&mut weights.embedding.value[at..=at]);
    }
    for layer in &mut weights.layers {
        for at in ballast(&layer.qkv_a) {
            poison(&mut layer.qkv_a.value[at..=at]);
        }
        let spare: Vec<usize> =
            (0..layer.q_b.column.len()).filter(|at| u64::from(layer.q_b.column[*at]) >= Q_LORA_GROUP).collect();
        for at in spare {
            poison(&mut layer.q_b.value[at..=at]);
        }
        poison(&mut layer.feed_forward_up.value);
        poison(&mut layer.feed_forward_down.value);
    }
    assert!(poisoned > 100_000);
    for keys in ["0", "1"] {
        let list = pairs(&[("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"), ("SGLANG_DSV4_BF16_INDEX_K", keys)]);
        let toggles = toggles(4, &list);
        let mut model = Model::on(virtual_gpu(&toggles), &toggles, 4 * PAGES_PER_ROW, &weights).unwrap();
        let outcome = dictate(&mut model, Load { rows: 4, context: CONTEXT, turns: 5 }, Seed(6)).unwrap();
        assert_eq!(outcome.wrong, 0, "{:?}", outcome.first);
    }
}

#[test]
fn the_canary_sees_a_stray_byte_and_no_store() {
    for keys in ["0", "1"] {
        let list = pairs(&[
            ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"),
            ("SGLANG_DSV4_BF16_INDEX_K", keys),
            ("TOOLSTORM_INDEX_K_CANARY", "1"),
            ("TOOLSTORM_BUCKETS", "1"),
        ]);
        let mut model = model(1, &list);
        let tokens = text(300);
        let (table, layers) = ([2, 1], COMPRESSED.iter().filter(|has| **has).count() as u64);
        decode_all(&mut model, &tokens, 0, &table, 1);
        let clean = model.canary().unwrap().clone();
        assert_eq!((clean.hits, clean.first), (0, None));
        assert!(clean.checks >= 300 * layers);
        let at = model.index_key_page(3, 2).unwrap() + 5 * model.network.geometry.keys.key_bytes() + 9;
        let mut byte = [0];
        model.device().copy_out(at, &mut byte).unwrap();
        model.device().copy_in(at, &[byte[0] ^ 0x10]).unwrap();
        let more = [tokens.clone(), text(4)].concat();
        decode_all(&mut model, &more, 300, &table, 1);
        let seen = model.canary().unwrap();
        assert_eq!(seen.hits, 1, "{:?}", seen.first);
        let first = seen.first.unwrap();
        assert_eq!((first.step, first.layer, first.page, first.slot), (300, 3, 2, 5));
    }
}

#[test]
fn the_canary_changes_no_result() {
    let [without, with] = ["0", "1"].map(|canary| {
        let list = pairs(&[
            ("SGLANG_DSV4_BF16_INDEX_K", "1"),
            ("TOOLSTORM_SEED", "5"),
            ("TOOLSTORM_ORDER", "adversarial"),
            ("TOOLSTORM_INDEX_K_CANARY", canary),
        ]);
        let mut model = model(4, &list);
        let outcome = dictate(&mut model, Load { rows: 4, context: CONTEXT, turns: 3 }, Seed(1)).unwrap();
        let checks = model.canary().map(|canary| canary.checks);
        (outcome, cache_bytes(&model), *model.decode_stats(), model.device().stats(), checks)
    });
    assert!(without.0.wrong > 0 && without.2.race_hits > 0, "nothing raced: {:?}", without.0);
    assert_eq!((&with.0, with.2, with.3), (&without.0, without.2, without.3));
    assert!(with.1 == without.1, "the caches differ");
    assert!(with.4.is_some_and(|checks| checks > 1000), "{:?}", with.4);
}

#[test]
fn the_differential_agrees_where_nothing_raced() {
    for reader in ["0", "1"] {
        let list = pairs(&[
            ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"),
            ("SGLANG_DSV4_BF16_INDEX_K", "1"),
            ("SGLANG_SM120_TRITON_INDEXER", reader),
            ("TOOLSTORM_GE_DIFF", "1"),
        ]);
        let mut model = model(4, &list);
        let outcome = dictate(&mut model, Load { rows: 4, context: CONTEXT, turns: 4 }, Seed(8)).unwrap();
        let differential = model.differential().unwrap();
        assert_eq!((outcome.wrong, differential.divergences), (0, 0), "{:?}", differential.first);
        assert!(differential.samples > 400, "{differential:?}");
    }
}

#[test]
fn the_differential_names_a_logit_that_changed() {
    let list = pairs(&[("SGLANG_DSV4_BF16_INDEX_K", "1"), ("TOOLSTORM_GE_DIFF", "1")]);
    let mut model = model(4, &list);
    dictate(&mut model, Load { rows: 4, context: CONTEXT, turns: 4 }, Seed(8)).unwrap();
    // Captured logits land in the stash, which nothing overwrites: only a stray write can make them differ.
    assert_eq!(model.differential().unwrap().divergences, 0);
    let (network, batch) = (&model.network, &model.batch);
    let row = batch.rows - 1;
    let at = network.persistent(batch.bucket).unwrap().stashes[&3].logits.address()
        + row as u64 * network.logits_row()
        + 5 * 4;
    network.device.copy_in(at, &1e9f32.to_ne_bytes()).unwrap();
    let mut differential = Differential::default();
    differential.check(network, batch, 7, Some("ts1-0")).unwrap();
    assert_eq!(differential.divergences, 1, "{differential:?}");
    let first = differential.first.unwrap();
    assert_eq!((first.step, first.layer, first.row, first.entry), (7, 3, row as u32, 5));
    assert!(first.captured == 1e9 && first.eager != 1e9, "{first:?}");
    assert_eq!(first.replay.as_deref(), Some("ts1-0"));
}

#[test]
fn fixes_keep_the_overlap() {
    let share = |fix: Option<(&'static str, &str)>| {
        let mut list = pairs(&[("SGLANG_DSV4_BF16_INDEX_K", "1")]);
        list.extend(fix.map(|(name, value)| (name, value.to_owned())));
        let mut model = model(4, &list);
        dictate(&mut model, Load { rows: 4, context: CONTEXT, turns: 3 }, Seed(2)).unwrap();
        let stats = model.decode_stats();
        (stats.overlap_share(), stats.total_ns as f64 / model.steps() as f64)
    };
    let (baseline, step) = share(None);
    let (held, held_step) = share(Some(("TOOLSTORM_HOLD_UNTIL_JOIN", "1")));
    let (serial, _) = share(Some(("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0")));
    assert!(baseline > 0.05 && held > 0.9 * baseline, "overlap {baseline} became {held}");
    assert!(held_step < 1.02 * step, "a step of {step} ns takes {held_step} ns");
    assert_eq!(serial, 0.0);
}
