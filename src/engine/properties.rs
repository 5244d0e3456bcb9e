//! What must hold of the engine's probes, prefill, ballast and fixes. What must hold whatever the toggles, batch mixes and
//! seeds is in `tests/hazards/runs.rs`.

use rand::RngExt;

use super::{
    DecodeRow, Prefill,
    differential::Differential,
    geometry::COMPRESSED,
    model::{Model, virtual_gpu},
    selftest::{Load, dictate},
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

/// Overlap share, and virtual time in ns of a step, of eight steps of so many rows.
fn pace(rows: u32, variable: Option<(&'static str, &str)>) -> (f64, f64) {
    let mut list = pairs(&[("SGLANG_DSV4_BF16_INDEX_K", "1"), ("TOOLSTORM_BUCKETS", &rows.to_string())]);
    list.extend(variable.map(|(name, value)| (name, value.to_owned())));
    let mut model = model(rows, &list);
    let tokens = text(300);
    let tables: Vec<[u32; 2]> = (0..rows).map(|row| [2 * row + 1, 2 * row + 2]).collect();
    for (page_table, window_page) in tables.iter().zip(1..) {
        let chunk = Prefill { tokens: &tokens, range: 0..290, page_table, window_page, resumed: false, session: None };
        model.prefill(&chunk).unwrap();
    }
    for position in 290..298 {
        let step: Vec<DecodeRow<'_>> = tables
            .iter()
            .zip(1..)
            .map(|(page_table, window_page)| DecodeRow {
                token: tokens[position as usize],
                position,
                page_table,
                window_page,
                session: None,
            })
            .collect();
        model.decode(&step).unwrap();
    }
    let stats = model.decode_stats();
    (stats.overlap_share(), stats.total_ns as f64 / model.steps() as f64)
}

#[test]
fn fixes_keep_the_overlap() {
    for rows in [4, 64] {
        let (baseline, step) = pace(rows, None);
        for fix in ["TOOLSTORM_HOLD_UNTIL_JOIN", "TOOLSTORM_RECORD_STREAM"] {
            let (fixed, fixed_step) = pace(rows, Some((fix, "1")));
            assert!(
                baseline > 0.05 && fixed > 0.9 * baseline,
                "{rows} rows: overlap {baseline} became {fixed} by {fix}"
            );
            assert!(fixed_step < 1.02 * step, "{rows} rows: a step of {step} ns takes {fixed_step} ns by {fix}");
        }
        assert_eq!(pace(rows, Some(("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"))).0, 0.0);
    }
}
