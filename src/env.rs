//! Every environment variable that the product reads; the only caller of `std::env::var`.
//!
//! The engine's toggles have a registry of their own, `engine::toggles`, since each says how it is parsed;
//! `docs/ENVIRONMENT.md` shows both.

/// A variable that is read outside the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// What it does, in one sentence.
    pub meaning: &'static str,
}

/// Every variable that is read outside the engine.
pub const VARIABLES: &[Variable] = &[
    Variable { name: "HOME", meaning: "its .cache holds compiled CUDA kernels where XDG_CACHE_HOME is not set" },
    Variable { name: "NO_COLOR", meaning: "when it is set and not empty, nothing is coloured unless --color always" },
    Variable {
        name: "PYTHONPATH",
        meaning: "kept, behind the exporter's own folder, for the Python program whose graphs are captured",
    },
    Variable {
        name: "TOOLSTORM_CAPTURE_DIR",
        meaning: "where a Python program with the exporter on its path writes the graphs that it captures",
    },
    Variable {
        name: "TOOLSTORM_CAPTURE_MARKS",
        meaning: "what the exporter marks: dispatch, calls or both, the default",
    },
    Variable { name: "XDG_CACHE_HOME", meaning: "where compiled CUDA kernels are kept, by content hash" },
];

/// Reads a variable of the process's environment; unset and non-Unicode values are `None`.
#[expect(clippy::disallowed_methods, reason = "the one place that reads the process's environment")]
pub fn var(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// All variables of the process's environment whose name and value are Unicode, sorted by name.
pub fn all() -> Vec<(String, String)> {
    let mut pairs: Vec<_> =
        std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?))).collect();
    pairs.sort();
    pairs
}
