//! Time. The only caller of the operating system's clocks; everything else is handed a [`Clock`].

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A monotonic clock with a fixed origin, and the wall time of that origin.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    origin: Instant,
    started: SystemTime,
}

impl Clock {
    /// A clock whose origin is now.
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the operating system's clocks")]
    pub fn start() -> Self {
        Self { origin: Instant::now(), started: SystemTime::now() }
    }

    /// Time since the origin.
    pub fn elapsed(&self) -> Duration {
        self.origin.elapsed()
    }

    /// Milliseconds since the origin.
    pub fn elapsed_ms(&self) -> f64 {
        self.elapsed().as_secs_f64() * 1e3
    }

    /// The wall time of the origin plus `elapsed`, as microseconds since the Unix epoch.
    pub fn unix_micros(&self, elapsed: Duration) -> i64 {
        let since_epoch = self.started.duration_since(UNIX_EPOCH).unwrap_or_default() + elapsed;
        since_epoch.as_micros() as i64
    }

    /// The wall time now, for names and manifests.
    pub fn timestamp(&self) -> jiff::Timestamp {
        jiff::Timestamp::from_microsecond(self.unix_micros(self.elapsed())).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
    }
}
