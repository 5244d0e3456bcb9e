//! The engine's toggles: environment variables, read once, listed in one registry.

use std::{ops::RangeInclusive, str::FromStr};

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
    /// The factors of it that were given: `name=factor` with commas between them.
    pub cost_factors: String,
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
    set: fn(&mut Toggles, &str) -> Taken<()>,
    get: fn(&Toggles) -> String,
}

/// A value that was taken, or why it was not.
type Taken<T> = std::result::Result<T, Refused>;

/// Why a value was not taken: what its own parser says, where that says more than that it is none.
struct Refused(Option<Error>);

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self(Some(error))
    }
}

const SWITCH: &str = "0 or 1";

macro_rules! switch {
    ($name:literal, $default:literal, $field:ident, $meaning:literal) => {
        Variable {
            name: $name,
            default: $default,
            takes: SWITCH,
            meaning: $meaning,
            set: |toggles, text| Ok(toggles.$field = switch(text)?),
            get: |toggles| u8::from(toggles.$field).to_string(),
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
        set: |toggles, text| Ok(toggles.index_topk = number(text, TOPKS)?),
        get: |toggles| toggles.index_topk.to_string(),
    },
    Variable {
        name: "TOOLSTORM_MAX_BATCH",
        default: "64",
        takes: "1 to 512",
        meaning: "largest batch",
        set: |toggles, text| Ok(toggles.max_batch = number(text, BATCHES)?),
        get: |toggles| toggles.max_batch.to_string(),
    },
    Variable {
        name: "TOOLSTORM_MAX_CONTEXT",
        default: "16384",
        takes: "256 to 32768",
        meaning: "tokens of the longest sequence",
        set: |toggles, text| Ok(toggles.max_context = number(text, CONTEXTS)?),
        get: |toggles| toggles.max_context.to_string(),
    },
    Variable {
        name: "TOOLSTORM_BUCKETS",
        default: "fine",
        takes: "fine, coarse or sizes: 1,8,64",
        meaning: "batch sizes that get a graph of their own; batches pad up to the next one",
        set: |toggles, text| Ok(toggles.buckets = buckets(text)?),
        get: |toggles| {
            let sizes = toggles.buckets.sizes(toggles.max_batch);
            sizes.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
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
                _ => return Err(Refused(None)),
            };
            Ok(())
        },
        get: |toggles| match toggles.device {
            DeviceChoice::Auto => "auto".into(),
            DeviceChoice::Sim => "sim".into(),
            DeviceChoice::Cuda => "cuda".into(),
        },
    },
    Variable {
        name: "TOOLSTORM_SEED",
        default: "0",
        takes: "a number or a commit hash",
        meaning: "decides order and jitter of the virtual GPU, launch by launch",
        set: |toggles, text| Ok(toggles.seed = text.parse().map_err(|_| Refused(None))?),
        get: |toggles| toggles.seed.to_string(),
    },
    Variable {
        name: "TOOLSTORM_ORDER",
        default: "random",
        takes: "random, pct:<depth>, host, adversarial, replay:<token> or twice:<order>",
        meaning: "the order in which the virtual GPU runs what no edge orders; twice:<order> does all work on two and compares",
        set: |toggles, text| Ok(toggles.order = text.parse()?),
        get: |toggles| toggles.order.to_string(),
    },
    Variable {
        name: "TOOLSTORM_COST",
        default: "",
        takes: "name=factor pairs with commas between them, as in jitter_sigma=0.8,ffn_up=1.25",
        meaning: "scales constants of the virtual GPU's cost model, for sensitivity studies",
        set: |toggles, text| {
            toggles.cost = CostModel::with_factors(text)?;
            let factors = text.split(',').map(str::trim).filter(|factor| !factor.is_empty());
            toggles.cost_factors = factors.collect::<Vec<_>>().join(",");
            Ok(())
        },
        get: |toggles| toggles.cost_factors.clone(),
    },
    Variable {
        name: "TOOLSTORM_LOCKSTEP",
        default: "",
        takes: "a number of sessions, or sessions:concurrency",
        meaning: "step only when every announced session has a request, so that a run is a function of its seeds",
        set: |toggles, text| {
            toggles.lockstep = if text.is_empty() { None } else { Some(lockstep(text)?) };
            Ok(())
        },
        get: |toggles| {
            let size = |size: LockstepSize| format!("{}:{}", size.sessions, size.concurrency);
            toggles.lockstep.map(size).unwrap_or_default()
        },
    },
    Variable {
        name: "TOOLSTORM_LOCKSTEP_WAIT",
        default: "60",
        takes: "1 to 86400",
        meaning: "seconds after which lockstep gives up waiting for a session",
        set: |toggles, text| Ok(toggles.lockstep_wait = number(text, 1..=86_400)?),
        get: |toggles| toggles.lockstep_wait.to_string(),
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
        set: |toggles, text| Ok(toggles.prefill_chunk = number(text, 1..=16_384)?),
        get: |toggles| toggles.prefill_chunk.to_string(),
    },
    Variable {
        name: "TOOLSTORM_SSE_TOKENS",
        default: "1",
        takes: "1 to 1024",
        meaning: "tokens in one server-sent event",
        set: |toggles, text| Ok(toggles.sse_tokens = number(text, 1..=1024)?),
        get: |toggles| toggles.sse_tokens.to_string(),
    },
    switch!("TOOLSTORM_METRICS", "1", metrics, "answer /metrics"),
];

fn switch(text: &str) -> Taken<bool> {
    match text {
        "0" | "off" | "false" => Ok(false),
        "1" | "on" | "true" => Ok(true),
        _ => Err(Refused(None)),
    }
}

fn number<T: FromStr + PartialOrd>(text: &str, range: RangeInclusive<T>) -> Taken<T> {
    text.parse().ok().filter(|number| range.contains(number)).ok_or(Refused(None))
}

fn buckets(text: &str) -> Taken<Buckets> {
    match text {
        "fine" => Ok(Buckets::Fine),
        "coarse" => Ok(Buckets::Coarse),
        list => list.split(',').map(|size| number(size.trim(), BATCHES)).collect::<Taken<_>>().map(Buckets::List),
    }
}

fn lockstep(text: &str) -> Taken<LockstepSize> {
    let (sessions, concurrency) = text.split_once(':').unwrap_or((text, text));
    Ok(LockstepSize { sessions: number(sessions, 1..=u32::MAX)?, concurrency: number(concurrency, 1..=u32::MAX)? })
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
            cost_factors: String::new(),
            lockstep: None,
            lockstep_wait: 0,
            prefix_cache: false,
            prefill_chunk: 0,
            sse_tokens: 0,
            metrics: false,
        };
        for variable in VARIABLES {
            let set = (variable.set)(&mut toggles, variable.default);
            debug_assert!(set.is_ok(), "the default of {} is no value of it", variable.name);
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

    /// Refuses a name that was meant for the engine and that it does not know. Only for what is set on purpose: an environment
    /// that servers inherit may well have variables for other programs.
    pub fn check_name(name: &str) -> Result<()> {
        let known = VARIABLES.iter().any(|variable| variable.name == name);
        if name.to_ascii_uppercase().starts_with("SGLANG_") && !known { Err(unknown(name)) } else { Ok(()) }
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let Some(variable) = VARIABLES.iter().find(|variable| variable.name == name) else {
            let elsewhere = env::VARIABLES.iter().any(|variable| variable.name == name);
            return if name.starts_with("TOOLSTORM_") && !elsewhere { Err(unknown(name)) } else { Ok(()) };
        };
        (variable.set)(self, value.trim()).map_err(|Refused(why)| refused(variable, value, why))
    }

    /// Every variable with what it resolved to, as a value that it takes: a switch is 0 or 1, buckets are the sizes.
    pub fn resolved(&self) -> impl Iterator<Item = (&'static str, String)> {
        VARIABLES.iter().map(|variable| (variable.name, (variable.get)(self)))
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

/// The error for a value that its variable does not take; `why` is what the value's own parser says, which knows more of
/// a cure than the variable does.
fn refused(variable: &Variable, value: &str, why: Option<Error>) -> Error {
    if let Some(why) = why {
        return why.within(variable.name);
    }
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
    fn resolved_values_are_canonical_and_resolve_to_the_same() {
        let given = [
            ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "off"),
            ("SGLANG_DSV4_BF16_INDEX_K", "on"),
            ("TOOLSTORM_GE_DIFF", "true"),
            ("TOOLSTORM_MAX_BATCH", " 10 "),
            ("TOOLSTORM_BUCKETS", "fine"),
            ("TOOLSTORM_SEED", "a5652dd9"),
            ("TOOLSTORM_ORDER", "pct:3"),
            ("TOOLSTORM_COST", " ffn_up=1.25, , jitter_sigma=0.8"),
            ("TOOLSTORM_LOCKSTEP", "80"),
        ];
        let toggles = Toggles::resolve(given).unwrap();
        let resolved: Vec<_> = toggles.resolved().collect();
        assert_eq!(resolved.len(), VARIABLES.len());
        let seed = toggles.seed.0.to_string();
        for (name, value) in [
            ("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "0"),
            ("SGLANG_DSV4_BF16_INDEX_K", "1"),
            ("TOOLSTORM_GE_DIFF", "1"),
            ("TOOLSTORM_MAX_BATCH", "10"),
            ("TOOLSTORM_BUCKETS", "1,2,4,8,10"),
            ("TOOLSTORM_SEED", &seed),
            ("TOOLSTORM_ORDER", "pct:3"),
            ("TOOLSTORM_COST", "ffn_up=1.25,jitter_sigma=0.8"),
            ("TOOLSTORM_LOCKSTEP", "80:80"),
        ] {
            assert!(resolved.contains(&(name, value.to_owned())), "{name} is not {value} in {resolved:?}");
        }
        let again = Toggles::resolve(resolved.clone()).unwrap();
        assert_eq!(again.resolved().collect::<Vec<_>>(), resolved);
        assert_eq!(Toggles { buckets: toggles.buckets.clone(), ..again }, toggles, "sizes are a list now");
    }

    #[test]
    fn every_variable_resolves_to_its_own_field() {
        for variable in VARIABLES {
            let other = match variable.default {
                "0" if variable.takes == SWITCH => "1",
                "1" if variable.takes == SWITCH => "0",
                _ => match variable.name {
                    "TOOLSTORM_BUCKETS" => "1,64",
                    "TOOLSTORM_DEVICE" => "sim",
                    "TOOLSTORM_ORDER" => "host",
                    "TOOLSTORM_COST" => "slots=0.5",
                    "TOOLSTORM_LOCKSTEP" => "8:4",
                    "TOOLSTORM_MAX_CONTEXT" => "1024",
                    _ => "7",
                },
            };
            let (toggles, unset) = (Toggles::resolve([(variable.name, other)]).unwrap(), Toggles::default());
            let changed: Vec<_> =
                toggles.resolved().zip(unset.resolved()).filter(|(now, unset)| now != unset).collect();
            // The largest batch is the last bucket.
            let expected = if variable.name == "TOOLSTORM_MAX_BATCH" { 2 } else { 1 };
            let named = changed.iter().any(|(now, _)| *now == (variable.name, other.to_owned()));
            assert!(changed.len() == expected && named, "{}: {changed:?}", variable.name);
        }
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
        // What the value's own parser knows is not lost.
        let token = "replay:ts1-0000000000ff1f36565bc46f1b0000000000000ac5791f8307a0457e8aed6bab3d";
        for (name, value, message, cure) in [
            ("TOOLSTORM_COST", "fnn_up=1.25", "`fnn_up` is no constant", "the nearest is `ffn_up`"),
            ("TOOLSTORM_COST", "ffn_up=0", "the factor is no number", "from 0.01 to 100"),
            ("TOOLSTORM_ORDER", token, "its checksum does not fit", "paste the whole token"),
            ("TOOLSTORM_ORDER", "pct:0", "`0` is no bug depth", "pct:3"),
        ] {
            let error = Toggles::resolve([(name, value)]).unwrap_err();
            let said = error.to_string();
            assert!(said.starts_with(&format!("{name}: ")) && said.contains(message), "{said}");
            assert!(error.cure().unwrap().contains(cure), "{:?}", error.cure());
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
