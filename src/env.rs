//! Every environment variable that the product reads, in one registry; the only caller of `std::env::var`.

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
