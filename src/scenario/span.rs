//! Lengths of time in files and flags: `250ms`, `30s`, `10m`, or a bare number of seconds.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// A length of time, written as people write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Span(pub Duration);

impl Span {
    /// A span of whole seconds.
    pub const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }
}

/// The longest span: sums of a few still are instants.
const LONGEST: Duration = Duration::from_hours(10 * 366 * 24);

/// Why a text is no length of time.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no length of time up to 10 years: write for example `250ms`, `30s` or `10m`")]
pub struct ParseSpanError(String);

impl FromStr for Span {
    type Err = ParseSpanError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = || ParseSpanError(text.to_owned());
        let span = if let Ok(seconds) = text.parse::<f64>() {
            Duration::try_from_secs_f64(seconds).map_err(|_| fail())?
        } else {
            let signed: jiff::SignedDuration = text.parse().map_err(|_| fail())?;
            Duration::try_from(signed).map_err(|_| fail())?
        };
        if span > LONGEST { Err(fail()) } else { Ok(Self(span)) }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        if millis.is_multiple_of(1000) { write!(f, "{}s", millis / 1000) } else { write!(f, "{millis}ms") }
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Raw {
            Seconds(f64),
            Text(String),
        }
        match Raw::deserialize(deserializer)? {
            Raw::Seconds(seconds) => seconds.to_string().parse().map_err(D::Error::custom),
            Raw::Text(text) => text.parse().map_err(D::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, millis) in [("250ms", 250), ("30s", 30_000), ("10m", 600_000), ("1.5", 1500), ("0", 0)] {
            assert_eq!(text.parse::<Span>().unwrap().0.as_millis(), millis, "{text}");
        }
        for text in ["", "soon", "-3", "-3s", "10 parsecs", "9223372036854775807s", "1e300", "nan"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_printed_reads_back() {
        for millis in [0, 1, 999, 1000, 61_000] {
            let span = Span(Duration::from_millis(millis));
            assert_eq!(span.to_string().parse::<Span>().unwrap(), span);
        }
    }
}
