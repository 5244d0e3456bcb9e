//! Nonces of sessions, and their search in what another session received.

use std::{
    collections::HashMap,
    sync::{PoisonError, RwLock},
};

/// Bytes of a canary that key the search.
const HEAD: usize = 6;

/// Every canary of a run. Sessions add theirs when they start; a search costs one look-up a byte, however many there are.
#[derive(Debug, Default)]
pub struct Canaries(RwLock<HashMap<[u8; HEAD], Vec<String>>>);

impl Canaries {
    /// No canaries yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a session's canary. Those shorter than six bytes prove nothing and are left out.
    pub fn add(&self, canary: &str) {
        let Some(head) = canary.as_bytes().first_chunk::<HEAD>() else { return };
        let mut map = self.0.write().unwrap_or_else(PoisonError::into_inner);
        map.entry(*head).or_default().push(canary.to_owned());
    }

    /// The first canary in `text` other than `own`.
    pub fn find(&self, text: &str, own: Option<&str>) -> Option<String> {
        let map = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let bytes = text.as_bytes();
        (0..bytes.len().saturating_sub(HEAD - 1)).find_map(|start| {
            let head = bytes[start..].first_chunk::<HEAD>()?;
            let found = map.get(head)?.iter().find(|canary| bytes[start..].starts_with(canary.as_bytes()))?;
            (Some(found.as_str()) != own).then(|| found.clone())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_foreign_canaries_only() {
        let canaries = Canaries::new();
        canaries.add("S-0417-QX");
        canaries.add("S-0102-KD");
        canaries.add("tiny");
        assert_eq!(canaries.find("say S-0417-QX", Some("S-0102-KD")).as_deref(), Some("S-0417-QX"));
        assert_eq!(canaries.find("say S-0102-KD or tiny", Some("S-0102-KD")), None);
        assert_eq!(canaries.find("S-04", None), None);
    }
}
