//! Seeds: a number or a commit hash, forked by name, so that one seed decides everything and no two uses share a stream.

use std::{fmt, str::FromStr};

use rand_pcg::Pcg64Mcg;
use sha2::{Digest, Sha256};

/// The root of every random choice of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Seed(pub u64);

impl Seed {
    /// An independent seed for the use called `name`. Stable across versions: SHA-256 of the number and the name.
    #[must_use]
    pub fn fork(self, name: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0.to_le_bytes());
        hash.update(name.as_bytes());
        let digest = hash.finalize();
        let mut head = [0; 8];
        head.copy_from_slice(&digest[..8]);
        Self(u64::from_le_bytes(head))
    }

    /// An independent seed for the `index`-th of many equal uses.
    #[must_use]
    pub fn index(self, index: u64) -> Self {
        self.fork(&index.to_string())
    }

    /// A generator whose stream is fixed for all time (PCG, 64-bit output, MCG variant).
    pub fn rng(self) -> Pcg64Mcg {
        let spread = u128::from(self.0) << 64 | u128::from(self.0.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        Pcg64Mcg::new(spread | 1)
    }
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Why a text is no seed.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no seed: a number below 2^64 or a hexadecimal commit hash of 7 to 40 digits is wanted")]
pub struct ParseSeedError(String);

impl FromStr for Seed {
    type Err = ParseSeedError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(number) = text.parse() {
            return Ok(Self(number));
        }
        let is_hash = (7..=40).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
        if is_hash { Ok(Self(0).fork(&text.to_ascii_lowercase())) } else { Err(ParseSeedError(text.to_owned())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_differ_and_are_stable() {
        assert_eq!(Seed(1).fork("workload"), Seed(1).fork("workload"));
        assert_ne!(Seed(1).fork("workload"), Seed(1).fork("launch"));
        assert_ne!(Seed(1).fork("workload"), Seed(2).fork("workload"));
    }

    #[test]
    fn a_commit_hash_is_a_seed_and_a_word_is_not() {
        assert!("a5652dd9".parse::<Seed>().is_ok());
        assert_eq!("17".parse::<Seed>().ok(), Some(Seed(17)));
        assert!("banana".parse::<Seed>().is_err());
    }
}
