//! Inclusive ranges in files: `[3, 7]`, or a bare number.

use rand::{Rng, RngExt};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// An inclusive range to draw from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range(pub u64, pub u64);

impl Range {
    /// A number of the range.
    pub fn draw(self, rng: &mut impl Rng) -> u64 {
        rng.random_range(self.0..=self.1)
    }

    /// The middle, for estimates.
    pub fn mean(self) -> f64 {
        self.0.midpoint(self.1) as f64
    }
}

impl Serialize for Range {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        [self.0, self.1].serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Range {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a number or a range `[low, high]`")]
        enum Raw {
            One(u64),
            Two([u64; 2]),
        }
        match Raw::deserialize(deserializer)? {
            Raw::One(only) => Ok(Self(only, only)),
            Raw::Two([low, high]) if low <= high => Ok(Self(low, high)),
            Raw::Two([low, high]) => Err(D::Error::custom(format!("the range [{low}, {high}] is empty"))),
        }
    }
}
