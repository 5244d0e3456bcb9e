//! When the next session is meant to start: pure offsets from the launch's start.

use std::time::Duration;

use rand::RngExt;
use rand_pcg::Pcg64Mcg;

use crate::{scenario::Arrival, seed::Seed};

/// The planned starts of a launch's sessions.
#[derive(Debug)]
pub(super) struct Pacing {
    arrival: Arrival,
    gap: Duration,
    concurrency: u32,
    ramp: Duration,
    rng: Pcg64Mcg,
    index: u64,
    next: Duration,
}

impl Pacing {
    /// Starts for `arrival` at `rate` sessions a second.
    pub(super) fn new(arrival: Arrival, rate: Option<f64>, concurrency: u32, ramp: Duration, seed: Seed) -> Self {
        let gap = Duration::from_secs_f64(rate.map_or(0.0, |rate| 1.0 / rate));
        Self { arrival, gap, concurrency, ramp, rng: seed.fork("arrival").rng(), index: 0, next: Duration::ZERO }
    }

    /// The next session's planned start. Under closed arrivals it only holds back the first ones, along the ramp.
    pub(super) fn next(&mut self) -> Duration {
        let index = self.index;
        self.index += 1;
        match self.arrival {
            Arrival::Closed => {
                let places = u64::from(self.concurrency);
                if index < places { self.ramp.mul_f64(index as f64 / places as f64) } else { Duration::ZERO }
            }
            Arrival::Constant => self.gap.mul_f64(index as f64),
            Arrival::Burst => {
                let size = u64::from(self.concurrency);
                self.gap.mul_f64((index / size * size) as f64)
            }
            Arrival::Poisson => {
                let planned = self.next;
                let uniform: f64 = self.rng.random();
                self.next += self.gap.mul_f64(-(1.0 - uniform).ln());
                planned
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(arrival: Arrival, count: usize) -> Vec<f64> {
        let mut pacing = Pacing::new(arrival, Some(10.0), 4, Duration::from_secs(2), Seed(1));
        (0..count).map(|_| pacing.next().as_secs_f64()).collect()
    }

    #[test]
    fn open_arrivals_keep_their_mean_rate() {
        let constant = starts(Arrival::Constant, 101);
        assert!((constant[100] - 10.0).abs() < 1e-9);
        let burst = starts(Arrival::Burst, 9);
        assert_eq!(burst[..4], [0.0; 4]);
        assert!((burst[4] - 0.4).abs() < 1e-9 && burst[4] == burst[7]);
        let poisson = starts(Arrival::Poisson, 4001);
        assert!((380.0..420.0).contains(&poisson[4000]), "{}", poisson[4000]);
        assert!(poisson.windows(2).all(|pair| pair[1] >= pair[0]));
    }

    #[test]
    fn closed_arrivals_ramp_up_and_then_never_wait() {
        assert_eq!(starts(Arrival::Closed, 6), [0.0, 0.5, 1.0, 1.5, 0.0, 0.0]);
    }
}
