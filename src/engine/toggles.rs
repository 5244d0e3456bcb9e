//! The engine's toggles: environment variables, read once, listed in one registry.

use std::{fmt::Display, ops::RangeInclusive, str::FromStr};

use super::geometry::{BATCHES, Buckets, CONTEXTS, Geometry, TOPKS};
use crate::{
    device::{
        kernel::KeyFormat,
        sim::{Schedule, cost::CostModel},
    },
    env,
    error::{Error, Result},
    seed::Seed,
};

/// Which backend runs the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA where a GPU and its libraries are found, the virtual GPU elsewhere.
    Auto,
    /// The virtual GPU.
    Sim,
    /// CUDA.
    Cuda,
}

/// Lockstep as announced at launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockstepSize {
    /// Sessions of the whole run.
    pub sessions: u32,
    /// Sessions that the client keeps going at a time.
    pub concurrency: u32,
}

/// Every toggle, resolved.
#[derive(Debug, Clone, PartialEq)]
pub struct Toggles {
    /// Side streams under capture.
    pub overlap: bool,
    /// bf16 index keys instead of fp8.
    pub bf16_index_keys: bool,
    /// The paged reader instead of the fallback.
    pub paged_reader: bool,
    /// Graph capture.
    pub graph: bool,
    /// Side streams outside capture too.
    pub overlap_eager: bool,
    /// The indexer outside the graph.
    pub indexer_eager: bool,
    /// Logits in a persistent buffer.
    pub persistent_logits: bool,
    /// References held until the join.
    pub hold_until_join: bool,
    /// The allocator told of every other user.
    pub record_stream: bool,
    /// The graph-against-eager probe.
    pub ge_diff: bool,
    /// The index-key canary.
    pub index_k_canary: bool,
    /// Index entries selected a row.
    pub index_topk: u32,
    /// Largest batch.
    pub max_batch: u32,
    /// Longest sequence.
    pub max_context: u32,
    /// Captured batch sizes.
    pub buckets: Buckets,
    /// Which backend.
    pub device: DeviceChoice,
    /// Order and jitter of the virtual GPU.
    pub seed: Seed,
    /// Order of execution.
    pub order: Schedule,
    /// What the virtual GPU charges.
    pub cost: CostModel,
    /// Lockstep, if announced at launch.
    pub lockstep: Option<LockstepSize>,
    /// Longest wait of lockstep, in seconds.
    pub lockstep_wait: u32,
    /// Whether pages of finished sequences are kept.
    pub prefix_cache: bool,
    /// Prompt tokens that one step prefills.
    pub prefill_chunk: u32,
    /// Tokens in one server-sent event.
    pub sse_tokens: u32,
    /// Whether `/metrics` answers.
    pub metrics: bool,
}

/// One variable: everything about it.
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What holds where it is unset.
    pub default: &'static str,
    /// Values that it takes.
    pub takes: &'static str,
    /// What it means, in one sentence.
    pub meaning: &'static str,
    set: fn(&mut Toggles, &str) -> Option<()>,
}

const SWITCH: &str = "0 or 1";

macro_rules! switch {
    ($name:literal, $default:literal, $field:ident, $meaning:literal) => {
        Variable {
            name: $name,
            default: $default,
            takes: SWITCH,
            meaning: $meaning,
            set: |toggles, text| {
                toggles.$field = switch(text)?;
                Some(())
            },
        }
    };
}

/// Every variable that decides what the engine does.
pub const VARIABLES: &[Variable] = &[
    switch!(
        "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP",
        "1",
        overlap,
        "run key-value store, compressor and indexer on side streams in captured steps"
    ),
    switch!("SGLANG_DSV4_BF16_INDEX_K", "0", bf16_index_keys, "keep index keys in bf16 instead of fp8"),
    switch!(
        "SGLANG_SM120_TRITON_INDEXER",
        "1",
        paged_reader,
        "read index keys with the paged kernel; 0: with the fallback, whose cost grows with the longest context"
    ),
    switch!("TOOLSTORM_CUDA_GRAPH", "1", graph, "replay captured graphs; 0: enqueue every step eagerly"),
    switch!("TOOLSTORM_OVERLAP_EAGER", "0", overlap_eager, "use the side streams in eager steps too"),
    switch!(
        "TOOLSTORM_INDEXER_EAGER",
        "0",
        indexer_eager,
        "run the indexer eagerly between two captured pieces a layer"
    ),
    switch!(
        "TOOLSTORM_PERSISTENT_LOGITS",
        "0",
        persistent_logits,
        "keep the logits in a buffer of their own: cures what befalls the logits, not the workspace"
    ),
    switch!(
        "TOOLSTORM_HOLD_UNTIL_JOIN",
        "0",
        hold_until_join,
        "hold references until the join: cures all lifetime mistakes, costs no synchronisation"
    ),
    switch!(
        "TOOLSTORM_RECORD_STREAM",
        "0",
        record_stream,
        "tell the allocator of every other user: cures all lifetime mistakes, costs memory"
    ),
    switch!(
        "TOOLSTORM_GE_DIFF",
        "0",
        ge_diff,
        "keep each step's inputs, recompute the logits eagerly and compare; perturbs what it measures"
    ),
    switch!(
        "TOOLSTORM_INDEX_K_CANARY",
        "0",
        index_k_canary,
        "checksum live index-key pages and report changes that no store explains"
    ),
    Variable {
        name: "TOOLSTORM_INDEX_TOPK",
        default: "64",
        takes: "1 to 512",
        meaning: "index entries selected a row",
        set: |toggles, text| {
            toggles.index_topk = number(text, TOPKS)?;
            Some(())
        },
    },
    Variable {
        name: "TOOLSTORM_MAX_BATCH",
        default: "64",
        takes: "1 to 512",
        meaning: "largest batch",
        set: |toggles, text| {
            toggles.max_batch = number(text, BATCHES)?;
            Some(())
        },
    },
    Variable {
        name: "TOOLSTORM_MAX_CONTEXT",
        default: "16384",
        takes: "256 to 32768",
        meaning: "tokens of the longest sequence",
        set: |toggles, text| {
            toggles.max_context = number(text, CONTEXTS)?;
            Some(())
        },
    },
    Variable {
        name: "TOOLSTORM_BUCKETS",
        default: "fine",
        takes: "fine, coarse or sizes: 1,8,64",
        meaning: "batch sizes that get a graph of their own; batches pad up to the next one",
        set: |toggles, text| {
            toggles.buckets = buckets(text)?;
            Some(())
        },
    },
    Variable {
        name: "TOOLSTORM_DEVICE",
        default: "auto",
        takes: "auto, sim or cuda",
        meaning: "the backend; auto takes CUDA where it finds a GPU",
        set: |toggles, text| {
            toggles.device = match text {
                "auto" => DeviceChoice::Auto,
                "sim" => DeviceChoice::Sim,
                "cuda" => DeviceChoice::Cuda,
                _ => return None,
            };
            Some(())
        },
    },
    Variable {
        name: "TOOLSTORM_SEED",
        default: "0",
        takes: "a number or a commit hash",
        meaning: "decides order and jitter of the virtual GPU, launch by launch",
        set: |toggles, text| {
            toggles.seed = text.parse().ok()?;
            Some(())
        },
    },
    Variable {
        name: "TOOLSTORM_ORDER",
        default: "random",
        takes: "random, pct:<depth>, host, adversarial, replay:<token> or twice:<order>",
        meaning: "the order in which the virtual GPU runs what no edge orders; twice:<order> does all work on two and compares",
        set: |toggles, text| {
            toggles.order = text.parse().ok()?;
            Some(())
        },
    },
    Variable {
        name: "TOOLSTORM_COST",
        default: "",
        takes: "name=factor pairs with commas between them, as in jitter_sigma=0.8,ffn_up=1.25",
        meaning: "scales constants of the virtual GPU's cost model, for sensitivity studies",
        set: |toggles, text| {
            toggles.cost = CostModel::with_factors(text).ok()?;
            Some(())
        },
    },
    Variable {
        name: "TOOLSTORM_LOCKSTEP",
        default: "",
        takes: "a number of sessions, or sessions:concurrency",
        meaning: "step only when every announced session has a request, so that a run is a function of its seeds",
        set: |toggles, text| {
            toggles.lockstep = if text.is_empty() { None } else { Some(lockstep(text)?) };
            Some(())
        },
    },
    Variable {
        name: "TOOLSTORM_LOCKSTEP_WAIT",
        default: "60",
        takes: "1 to 86400",
        meaning: "seconds after which lockstep gives up waiting for a session",
        set: |toggles, text| {
            toggles.lockstep_wait = number(text, 1..=86_400)?;
            Some(())
        },
    },
    switch!(
        "TOOLSTORM_PREFIX_CACHE",
        "1",
        prefix_cache,
        "keep pages of finished sequences for requests that resend their tokens"
    ),
    Variable {
        name: "TOOLSTORM_PREFILL_CHUNK",
        default: "512",
        takes: "1 to 16384",
        meaning: "prompt tokens that one step prefills",
        set: |toggles, text| {
            toggles.prefill_chunk = number(text, 1..=16_384)?;
            Some(())
        },
    },
    Variable {
        name: "TOOLSTORM_SSE_TOKENS",
        default: "1",
        takes: "1 to 1024",
        meaning: "tokens in one server-sent event",
        set: |toggles, text| {
            toggles.sse_tokens = number(text, 1..=1024)?;
            Some(())
        },
    },
    switch!("TOOLSTORM_METRICS", "1", metrics, "answer /metrics"),
];

fn switch(text: &str) -> Option<bool> {
    match text {
        "0" | "off" | "false" => Some(false),
        "1" | "on" | "true" => Some(true),
        _ => None,
    }
}

fn number<T: FromStr + PartialOrd>(text: &str, range: RangeInclusive<T>) -> Option<T> {
    text.parse().ok().filter(|number| range.contains(number))
}

fn buckets(text: &str) -> Option<Buckets> {
    match text {
        "fine" => Some(Buckets::Fine),
        "coarse" => Some(Buckets::Coarse),
        list => list.split(',').map(|size| number(size.trim(), BATCHES)).collect::<Option<_>>().map(Buckets::List),
    }
}

fn lockstep(text: &str) -> Option<LockstepSize> {
    let (sessions, concurrency) = text.split_once(':').unwrap_or((text, text));
    let size = LockstepSize { sessions: sessions.parse().ok()?, concurrency: concurrency.parse().ok()? };
    Some(size).filter(|size| size.sessions > 0 && size.concurrency > 0)
}

impl Default for Toggles {
    fn default() -> Self {
        let mut toggles = Self {
            overlap: false,
            bf16_index_keys: false,
            paged_reader: false,
            graph: false,
            overlap_eager: false,
            indexer_eager: false,
            persistent_logits: false,
            hold_until_join: false,
            record_stream: false,
            ge_diff: false,
            index_k_canary: false,
            index_topk: 0,
            max_batch: 0,
            max_context: 0,
            buckets: Buckets::Fine,
            device: DeviceChoice::Auto,
            seed: Seed(0),
            order: Schedule::Random,
            cost: CostModel::default(),
            lockstep: None,
            lockstep_wait: 0,
            prefix_cache: false,
            prefill_chunk: 0,
            sse_tokens: 0,
            metrics: false,
        };
        for variable in VARIABLES {
            let set = (variable.set)(&mut toggles, variable.default);
            debug_assert!(set.is_some(), "the default of {} is no value of it", variable.name);
        }
        toggles
    }
}

impl Toggles {
    /// Resolves variables by name; of equal names the last wins. Names of other programs and those that are read outside
    /// the engine are ignored, but an unknown one that starts with `TOOLSTORM_` is an error, as is a value that its
    /// variable does not take.
    pub fn resolve<N: AsRef<str>, V: AsRef<str>>(pairs: impl IntoIterator<Item = (N, V)>) -> Result<Self> {
        let mut toggles = Self::default();
        for (name, value) in pairs {
            toggles.set(name.as_ref(), value.as_ref())?;
        }
        Ok(toggles)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let Some(variable) = VARIABLES.iter().find(|variable| variable.name == name) else {
            let elsewhere = env::VARIABLES.iter().any(|variable| variable.name == name);
            return if name.starts_with("TOOLSTORM_") && !elsewhere { Err(unknown(name)) } else { Ok(()) };
        };
        (variable.set)(self, value.trim()).ok_or_else(|| refused(variable, value))
    }

    /// The sizes that these toggles choose, with `pages` leasable pages beside page 0.
    pub fn geometry(&self, pages: u32) -> Geometry {
        Geometry {
            max_context: self.max_context,
            buckets: self.buckets.sizes(self.max_batch),
            top_k: self.index_topk,
            pages: pages + 1,
            keys: if self.bf16_index_keys { KeyFormat::Bf16 } else { KeyFormat::Fp8 },
        }
    }
}

fn refused(variable: &Variable, value: impl Display) -> Error {
    Error::usage(format!("`{value}` is no value of {}", variable.name))
        .hint(format!("it takes {}; unset means `{}`", variable.takes, variable.default))
}

fn unknown(name: &str) -> Error {
    let toggles = VARIABLES.iter().map(|variable| (variable.name, variable.meaning));
    let known = toggles.chain(env::VARIABLES.iter().map(|variable| (variable.name, variable.meaning)));
    let error = Error::usage(format!("unknown variable {name}"));
    match known.min_by_key(|(known, _)| strsim::damerau_levenshtein(known, name)) {
        Some((nearest, meaning)) => error.hint(format!("did you mean {nearest}? {meaning}")),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_as_documented_and_names_are_unique() {
        let toggles = Toggles::default();
        assert!(toggles.overlap && toggles.graph && toggles.paged_reader && !toggles.bf16_index_keys);
        assert_eq!((toggles.index_topk, toggles.max_batch, toggles.max_context), (64, 64, 16_384));
        let mut names: Vec<_> = VARIABLES.iter().map(|variable| variable.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), VARIABLES.len());
        for variable in VARIABLES {
            let again = Toggles::resolve([(variable.name, variable.default)]).unwrap();
            assert_eq!(again, toggles, "{}", variable.name);
        }
    }

    #[test]
    fn values_arrive_and_the_last_one_wins() {
        let toggles = Toggles::resolve([
            ("PATH", "/bin"),
            ("TOOLSTORM_MAX_BATCH", "8"),
            ("SGLANG_DSV4_BF16_INDEX_K", "1"),
            ("TOOLSTORM_ORDER", "pct:3"),
            ("TOOLSTORM_LOCKSTEP", "80:64"),
            ("TOOLSTORM_BUCKETS", "3, 5"),
            ("TOOLSTORM_MAX_BATCH", "6"),
        ])
        .unwrap();
        assert_eq!(toggles.geometry(9).buckets, [3, 5, 6]);
        assert_eq!(toggles.geometry(9).pages, 10);
        assert_eq!(toggles.geometry(9).keys, KeyFormat::Bf16);
        assert_eq!(toggles.order, Schedule::Pct { depth: 3 });
        assert_eq!(toggles.lockstep, Some(LockstepSize { sessions: 80, concurrency: 64 }));
    }

    #[test]
    fn bad_values_and_unknown_names_are_errors_with_a_cure() {
        for (name, value) in [
            ("TOOLSTORM_MAX_BATCH", "0"),
            ("TOOLSTORM_MAX_BATCH", "many"),
            ("TOOLSTORM_MAX_CONTEXT", "65536"),
            ("TOOLSTORM_CUDA_GRAPH", "yes please"),
            ("TOOLSTORM_BUCKETS", "1,x"),
            ("TOOLSTORM_DEVICE", "rocm"),
            ("TOOLSTORM_LOCKSTEP", "0"),
            ("TOOLSTORM_ORDER", "sideways"),
        ] {
            let error = Toggles::resolve([(name, value)]).unwrap_err();
            assert!(error.to_string().contains(name) && error.cure().is_some(), "{error}");
        }
        let error = Toggles::resolve([("TOOLSTORM_INDEX_TOPKK", "3")]).unwrap_err();
        assert_eq!(error.to_string(), "unknown variable TOOLSTORM_INDEX_TOPKK");
        assert!(error.cure().unwrap().contains("did you mean TOOLSTORM_INDEX_TOPK?"));
        let error = Toggles::resolve([("TOOLSTORM_CAPTURE_DIRS", "x")]).unwrap_err();
        assert!(error.cure().unwrap().contains("did you mean TOOLSTORM_CAPTURE_DIR?"));
        // Read by the exporter, not by the engine.
        assert_eq!(Toggles::resolve([("TOOLSTORM_CAPTURE_DIR", "x")]).unwrap(), Toggles::default());
    }
}
