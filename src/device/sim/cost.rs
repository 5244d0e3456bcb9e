//! The cost model: how long a block holds its slot. A function of kernel, bytes and FLOPs alone.
//!
//! Every constant has a unit, a reason and a name by which [`CostModel::with_factors`] scales it, for sensitivity studies.

use std::collections::BTreeMap;

use crate::{
    device::{Block, kernel::Kernel},
    error::{Error, Result},
};

/// The constants of the machine.
#[derive(Debug, Clone, PartialEq)]
pub struct CostModel {
    /// Blocks that run at once (`slots`): 132 multiprocessors with two each. With one each, head-of-line blocking makes an
    /// event batch-wide.
    pub slots: usize,
    /// From a finished predecessor to the first block of its successor, ns (`node_latency`): what replays of captured
    /// graphs show between dependent nodes.
    pub node_latency_ns: u64,
    /// Host time of one eager launch, ns (`eager_launch`): a launch from Python costs 5 to 8 µs.
    pub eager_launch_ns: u64,
    /// Host time of one graph launch among other work, ns (`graph_launch`).
    pub graph_launch_ns: u64,
    /// Lognormal spread of a block's duration (`jitter_sigma`): contention for memory, clocks, refresh. Small enough that
    /// the waves of a wide batch, and not the spread, use up the slack between the indexer's chain and the main stream's.
    pub jitter_sigma: f64,
    /// One block's share of memory traffic, B/ns (`bytes_per_ns`): few blocks run at small batches and leave most of
    /// 4.8 TB/s to each.
    pub bytes_per_ns: f64,
    /// One block's share of dense bf16 arithmetic, FLOP/ns (`bf16_per_ns`): half a multiprocessor's 990 TFLOP/s / 132.
    pub bf16_per_ns: f64,
    /// The same in e4m3, FLOP/ns (`fp8_per_ns`).
    pub fp8_per_ns: f64,
    /// For each kernel (by its name), the time of a block that moves and computes nothing, ns.
    floors_ns: BTreeMap<&'static str, f64>,
}

/// What a kernel's blocks are like.
#[derive(Clone, Copy)]
struct Class {
    kernel: &'static str,
    floor_ns: f64,
    /// Its arithmetic runs at the e4m3 rate.
    fp8: bool,
    /// So many blocks of the machine share the work of one of ours, in a split of the inner dimension.
    ways: f64,
}

const fn bf16(kernel: &'static str, floor_ns: f64) -> Class {
    Class { kernel, floor_ns, fp8: false, ways: 1.0 }
}

const fn fp8(kernel: &'static str, floor_ns: f64) -> Class {
    Class { kernel, floor_ns, fp8: true, ways: 1.0 }
}

const fn split(class: Class, ways: f64) -> Class {
    Class { ways, ..class }
}

/// Floors: prologue, dependent loads, reductions across the block. With the charged bytes and FLOPs of 64 rows they give
/// the durations named on the right.
const CLASSES: [Class; 27] = [
    // One reduction a row.
    bf16("rms_norm", 1200.0),   // 1.5 µs
    bf16("q_norm", 1400.0),     // 1.5 µs
    bf16("final_norm", 1200.0), // 1.5 µs
    bf16("quantise", 1400.0),   // 1.5 µs
    // Pages are found through two dependent loads.
    bf16("kv_store", 1700.0),    // 1.8 µs
    bf16("index_store", 1400.0), // 1.5 µs
    bf16("core_store", 1400.0),  // 1.5 µs
    // Sines and cosines.
    bf16("index_rope", 1100.0),     // 1.5 µs
    bf16("q_rope", 1700.0),         // 2.0 µs
    bf16("wqkv_a", 1700.0),         // 4.0 µs
    bf16("index_compress", 1200.0), // 3.5 µs
    fp8("core_compress", 300.0),    // 4.8 µs
    fp8("wq_b_idx", 500.0),         // 3.0 µs
    // 64 columns would leave the machine idle: the inner dimension is split.
    split(bf16("weights_proj", 800.0), 64.0), // 1.0 µs
    fp8("wq_b", 1700.0),                      // 4.2 µs
    bf16("ffn_up", 4650.0),                   // 13.6 µs
    // The inner dimension is twice the outer one, and split in two.
    split(fp8("ffn_down", 800.0), 2.0), // 3.0 µs
    bf16("logits", 2000.0),             // 3.4 µs a full tile
    bf16("logits_fallback", 2000.0),
    // Several passes over a row with block-wide counts between them.
    bf16("topk_select", 1800.0), // 2.5 µs
    // One thread block walks a row's candidates and their pages one after the other.
    bf16("topk_finalise", 8200.0), // 8.5 µs
    // A row's heads are split four ways, and what they found is merged.
    split(bf16("attention", 3400.0), 4.0), // 9.0 µs
    fp8("o_proj", 300.0),                  // 4.8 µs
    // Outside the layers, or not in every configuration.
    bf16("embed", 800.0),
    bf16("head", 800.0),
    bf16("copy", 800.0),
    bf16("prefill", 800.0),
];

impl Default for CostModel {
    fn default() -> Self {
        Self {
            slots: 264,
            node_latency_ns: 1000,
            eager_launch_ns: 6000,
            graph_launch_ns: 6000,
            jitter_sigma: 0.125,
            bytes_per_ns: 60.0,
            bf16_per_ns: 3750.0,
            fp8_per_ns: 7500.0,
            floors_ns: CLASSES.iter().map(|class| (class.kernel, class.floor_ns)).collect(),
        }
    }
}

impl CostModel {
    /// The names that [`CostModel::with_factors`] knows.
    pub fn names(&self) -> Vec<&'static str> {
        let machine = [
            "slots",
            "node_latency",
            "eager_launch",
            "graph_launch",
            "jitter_sigma",
            "bytes_per_ns",
            "bf16_per_ns",
            "fp8_per_ns",
        ];
        machine.into_iter().chain(self.floors_ns.keys().copied()).collect()
    }

    /// The shipped constants, some of them scaled: `jitter_sigma=0.8,ffn_up=1.25`. A kernel's name scales its floor.
    pub fn with_factors(text: &str) -> Result<Self> {
        let mut model = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let refuse = |what: &str| Error::usage(format!("`{part}` is no cost factor: {what}"));
            let Some((name, factor)) = part.split_once('=') else {
                return Err(refuse("there is no `=`").hint("name=factor, as in ffn_up=1.25"));
            };
            let factor: f64 = match factor.trim().parse() {
                Ok(factor) if (0.01..=100.0).contains(&factor) => factor,
                _ => return Err(refuse("the factor is no number").hint("a number from 0.01 to 100")),
            };
            model.scale(name.trim(), factor)?;
        }
        Ok(model)
    }

    fn scale(&mut self, name: &str, factor: f64) -> Result<()> {
        let whole = |value: u64| (value as f64 * factor).round() as u64;
        match name {
            "slots" => self.slots = (whole(self.slots as u64) as usize).max(1),
            "node_latency" => self.node_latency_ns = whole(self.node_latency_ns).max(1),
            "eager_launch" => self.eager_launch_ns = whole(self.eager_launch_ns),
            "graph_launch" => self.graph_launch_ns = whole(self.graph_launch_ns),
            "jitter_sigma" => self.jitter_sigma *= factor,
            "bytes_per_ns" => self.bytes_per_ns *= factor,
            "bf16_per_ns" => self.bf16_per_ns *= factor,
            "fp8_per_ns" => self.fp8_per_ns *= factor,
            _ => match self.floors_ns.get_mut(name) {
                Some(floor) => *floor *= factor,
                None => return Err(self.unknown(name)),
            },
        }
        Ok(())
    }

    fn unknown(&self, name: &str) -> Error {
        let error = Error::usage(format!("`{name}` is no constant of the cost model"));
        let nearest = self.names().into_iter().min_by_key(|known| strsim::damerau_levenshtein(known, name));
        error.hint(format!("the nearest is `{}`", nearest.unwrap_or_default()))
    }

    /// The rate of `kernel`.
    pub fn rate(&self, kernel: &Kernel) -> Rate {
        let name = kernel.name();
        // A test holds every kernel to a class of its own.
        let class = CLASSES.iter().find(|class| class.kernel == name);
        let (fp8, ways) = class.map_or((false, 1.0), |class| (class.fp8, class.ways));
        let flops_per_ns = if fp8 { self.fp8_per_ns } else { self.bf16_per_ns };
        Rate {
            floor_ns: self.floors_ns.get(name).copied().unwrap_or_default(),
            byte_ns: 1.0 / (ways * self.bytes_per_ns),
            flop_ns: 1.0 / (ways * flops_per_ns),
        }
    }
}

/// How fast one block of a kernel works.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Time of a block that moves and computes nothing, ns.
    pub floor_ns: f64,
    /// Time a byte, ns.
    pub byte_ns: f64,
    /// Time a FLOP, ns.
    pub flop_ns: f64,
}

impl Rate {
    /// Duration of `block` before jitter, ns: the roofline above a floor.
    pub fn duration_ns(&self, block: &Block) -> f64 {
        self.floor_ns + (block.bytes as f64 * self.byte_ns).max(block.flops as f64 * self.flop_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_scales_one_constant_and_nothing_else() {
        let shipped = CostModel::default();
        for name in shipped.names() {
            let scaled = CostModel::with_factors(&format!(" {name} = 0.5 ")).expect(name);
            assert_ne!(scaled, shipped, "{name}");
            let back = scaled.names().len();
            assert_eq!(back, shipped.names().len());
        }
        let both = CostModel::with_factors("jitter_sigma=0.8,wq_b=1.25").expect("two factors");
        assert!((both.jitter_sigma - 0.8 * shipped.jitter_sigma).abs() < 1e-12);
        assert!((both.floors_ns["wq_b"] - 1.25 * shipped.floors_ns["wq_b"]).abs() < 1e-9);
        assert_eq!(CostModel::with_factors("").expect("no factor"), shipped);
    }

    #[test]
    fn a_factor_that_says_nothing_is_an_error_with_a_cure() {
        for (text, cure) in [
            ("jiter_sigma=1", "jitter_sigma"),
            ("ffn_up", "name=factor"),
            ("ffn_up=fast", "number"),
            ("ffn_up=-1", "number"),
            ("ffn_up=NaN", "number"),
        ] {
            let error = CostModel::with_factors(text).expect_err(text);
            assert!(error.cure().is_some_and(|hint| hint.contains(cure)), "{text}: {error}");
        }
    }

    #[test]
    fn the_roofline_takes_the_slower_of_bytes_and_flops() {
        let rate = CostModel::default().rate(&Kernel::Copy);
        let block = |bytes, flops| Block { index: 0, part: 0, bytes, flops };
        assert!((rate.duration_ns(&block(6000, 0)) - 900.0).abs() < 1e-9);
        assert!((rate.duration_ns(&block(6000, 3_750_000)) - 1800.0).abs() < 1e-9);
    }
}
