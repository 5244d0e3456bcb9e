//! Stopping early without peeking: tests whose error rates hold at every look.

use std::collections::BTreeMap;

use statrs::function::beta::{beta_reg, ln_beta};

use super::{Counts, Interval};

/// What a sequential test has concluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The rate is the low one (SPRT), or below the limit (always-valid bound).
    Low,
    /// The rate is the high one, or above the limit.
    High,
}

/// A rule that may be consulted after every session.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Test {
    /// Wald's sequential probability ratio test.
    Sprt(Sprt),
    /// Stop when the confidence sequence leaves the limit on one side.
    AlwaysValid {
        /// The rate in question.
        limit: f64,
        /// Confidence of each of the two conclusions.
        confidence: f64,
    },
}

impl Test {
    /// What `counts`, taken in start order, show; `None` to go on.
    pub fn decide(&self, counts: Counts) -> Option<Decision> {
        match *self {
            Self::Sprt(sprt) => sprt.decide(counts),
            Self::AlwaysValid { limit, confidence } => {
                if always_valid_upper(counts, confidence) < limit {
                    Some(Decision::Low)
                } else if always_valid_lower(counts, confidence) > limit {
                    Some(Decision::High)
                } else {
                    None
                }
            }
        }
    }
}

/// Wald's sequential probability ratio test of "the rate is `p0`" against "it is `p1`". Wald (1945), Annals of
/// Mathematical Statistics 16:117.
///
/// The limits are `1/alpha` and `beta` in place of Wald's approximate `(1-beta)/alpha` and `beta/(1-alpha)`: by Ville's
/// inequality both error rates then hold exactly, whatever the overshoot.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sprt {
    event: f64,
    quiet: f64,
    upper: f64,
    lower: f64,
    p0: f64,
    p1: f64,
}

impl Sprt {
    /// The test with false alarms at most `alpha` and misses at most `beta`; `None` unless `0 < p0 < p1 < 1` and both
    /// error rates lie strictly between 0 and 1. A `p0` of zero would let the first event decide everything.
    pub fn new(p0: f64, p1: f64, alpha: f64, beta: f64) -> Option<Self> {
        let open = |x: f64| x > 0.0 && x < 1.0;
        (open(p0) && open(p1) && p0 < p1 && open(alpha) && open(beta)).then(|| Self {
            event: (p1 / p0).ln(),
            quiet: (-p1).ln_1p() - (-p0).ln_1p(),
            upper: -alpha.ln(),
            lower: beta.ln(),
            p0,
            p1,
        })
    }

    /// The logarithm of the likelihood ratio of `p1` to `p0`.
    pub fn log_ratio(&self, counts: Counts) -> f64 {
        self.event * counts.events as f64 + self.quiet * (counts.trials - counts.events) as f64
    }

    /// What `counts` show; `None` to go on.
    pub fn decide(&self, counts: Counts) -> Option<Decision> {
        let ratio = self.log_ratio(counts);
        if ratio >= self.upper {
            Some(Decision::High)
        } else if ratio <= self.lower {
            Some(Decision::Low)
        } else {
            None
        }
    }

    /// Expected sessions until a decision when the rate is `p0`, and when it is `p1`: Wald's approximation, which ignores
    /// the overshoot.
    pub fn expected_trials(&self) -> (f64, f64) {
        let (alpha, beta) = ((-self.upper).exp(), self.lower.exp());
        let drift = |p: f64| p * self.event + (1.0 - p) * self.quiet;
        let low = alpha * self.upper + (1.0 - alpha) * self.lower;
        let high = (1.0 - beta) * self.upper + beta * self.lower;
        (low / drift(self.p0), high / drift(self.p1))
    }
}

/// Shape of the mixing distribution: Jeffreys' prior.
const MIXTURE: f64 = 0.5;

/// An upper bound on the rate that holds at every look at once, with probability `confidence`.
///
/// A beta mixture, cut off at the hypothesised rate, of likelihood ratios: a nonnegative supermartingale under every rate
/// at or above the hypothesis, so by Ville's inequality it exceeds `1/(1-confidence)` at any time with probability at most
/// `1 - confidence`. Robbins (1970), Annals of Mathematical Statistics 41:1397; Howard, Ramdas, McAuliffe and Sekhon
/// (2021), Annals of Statistics 49:1055.
pub fn always_valid_upper(counts: Counts, confidence: f64) -> f64 {
    let Some(rate) = counts.rate() else { return 1.0 };
    if counts.events == counts.trials {
        return 1.0;
    }
    let limit = -(1.0 - confidence).ln();
    let (mut below, mut above) = (rate, 1.0);
    while above - below > 1e-12 {
        let middle = below.midpoint(above);
        if log_mixture_ratio(counts, middle) < limit {
            below = middle;
        } else {
            above = middle;
        }
    }
    above
}

/// A lower bound on the rate that holds at every look at once: the mirror image of [`always_valid_upper`].
pub fn always_valid_lower(counts: Counts, confidence: f64) -> f64 {
    1.0 - always_valid_upper(Counts { events: counts.trials - counts.events, ..counts }, confidence)
}

/// A two-sided confidence sequence: the union of both errors is at most `1 - confidence`, at every look at once.
pub fn confidence_sequence(counts: Counts, confidence: f64) -> Interval {
    let side = 1.0 - (1.0 - confidence) / 2.0;
    Interval { lower: always_valid_lower(counts, side), upper: always_valid_upper(counts, side) }
}

/// The logarithm of the mixture of likelihoods over rates below `rate`, relative to the likelihood of `rate`.
pub(crate) fn log_mixture_ratio(Counts { events, trials }: Counts, rate: f64) -> f64 {
    let (events, quiet) = (events as f64, (trials - events) as f64);
    let (a, b) = (MIXTURE + events, MIXTURE + quiet);
    let posterior = ln_beta(a, b) + beta_reg(a, b, rate).ln();
    let prior = ln_beta(MIXTURE, MIXTURE) + beta_reg(MIXTURE, MIXTURE, rate).ln();
    posterior - prior - events * rate.ln() - quiet * (-rate).ln_1p()
}

/// Outcomes in the order in which sessions *started*.
///
/// A corrupted session ends early, so a look at completions over-counts corruption. This holds an outcome back until
/// every session that started before it has ended too.
#[derive(Debug, Clone, Default)]
pub struct StartOrder {
    waiting: BTreeMap<u64, Option<bool>>,
    next: u64,
    counts: Counts,
}

impl StartOrder {
    /// Records that session number `index` (from zero, in start order) ended: `Some(corrupted)`, or `None` where it could
    /// not be judged.
    pub fn end(&mut self, index: u64, outcome: Option<bool>) {
        self.waiting.insert(index, outcome);
        while let Some(outcome) = self.waiting.remove(&self.next) {
            self.next += 1;
            if let Some(corrupted) = outcome {
                self.counts = self.counts + Counts::new(u64::from(corrupted), 1);
            }
        }
    }

    /// The sessions before the first that is still running.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_order_holds_back_what_ended_early() {
        let mut order = StartOrder::default();
        order.end(2, Some(true));
        order.end(1, Some(true));
        assert_eq!(order.counts(), Counts::default());
        order.end(0, Some(false));
        assert_eq!(order.counts(), Counts::new(2, 3));
        order.end(3, None);
        order.end(4, Some(false));
        assert_eq!(order.counts(), Counts::new(2, 4));
    }

    #[test]
    fn the_mixture_ratio_grows_above_the_observed_rate() {
        let mut checked = 0;
        for trials in [2, 3, 20, 80, 500, 5000] {
            for events in [0, 1, trials / 10, trials / 2, trials - 1] {
                let counts = Counts::new(events, trials);
                let rate = counts.events as f64 / trials as f64;
                let points = (1..200).map(|i| rate + (1.0 - rate) * f64::from(i) / 201.0);
                let values: Vec<f64> = points.map(|p| log_mixture_ratio(counts, p)).collect();
                assert!(values.windows(2).all(|pair| pair[0] <= pair[1] + 1e-9), "{counts:?}");
                checked += 1;
            }
        }
        assert_eq!(checked, 30);
    }

    #[test]
    fn an_sprt_needs_a_positive_low_rate() {
        assert!(Sprt::new(0.0, 0.1, 0.05, 0.05).is_none());
        assert!(Sprt::new(0.1, 0.05, 0.05, 0.05).is_none());
        let sprt = Sprt::new(0.01, 0.15, 0.05, 0.05).unwrap();
        assert_eq!(sprt.decide(Counts::new(0, 10)), None);
        assert_eq!(sprt.decide(Counts::new(0, 80)), Some(Decision::Low));
        assert_eq!(sprt.decide(Counts::new(3, 10)), Some(Decision::High));
    }

    #[test]
    fn an_always_valid_bound_is_wider_than_a_fixed_one_and_shrinks() {
        let bound = |trials| always_valid_upper(Counts::new(0, trials), 0.95);
        assert!(bound(80) > super::super::interval::upper_bound(Counts::new(0, 80), 0.95));
        assert!(bound(80) < 0.06 && bound(800) < bound(80) / 8.0);
        assert_eq!(always_valid_upper(Counts::default(), 0.95), 1.0);
        assert_eq!(always_valid_lower(Counts::default(), 0.95), 0.0);
    }
}
