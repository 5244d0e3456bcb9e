//! What the probes so far say: a probability for every explanation at every rate.

use std::collections::BTreeMap;

use statrs::function::{beta::ln_beta, factorial::ln_binomial};

use super::{
    Subset,
    hypothesis::{DAMPING, Hypothesis, Level, enumerate},
};
use crate::stats::Counts;

/// Rates that the bug may have, spaced evenly in the logarithm of the odds; equally likely at first.
pub const RATES: [f64; 12] = [0.004, 0.008, 0.015, 0.03, 0.06, 0.1, 0.17, 0.27, 0.4, 0.55, 0.75, 0.92];

/// Squared coefficient of variation of the rate from one configuration to the next: a harmless toggle shifts timing too,
/// and a race at the edge of its slack answers to that.
const VARIATION: f64 = 0.4;

/// A probability for every explanation at every rate.
#[derive(Debug, Clone)]
pub struct Posterior {
    toggles: usize,
    background: f64,
    hypotheses: Vec<Hypothesis>,
    weights: Vec<[f64; RATES.len()]>,
    seen: BTreeMap<Subset, Counts>,
}

impl Posterior {
    /// Before any probe. `background` is the rate of a configuration without the bug, above zero.
    pub fn new(toggles: usize, background: f64) -> Self {
        let hypotheses = enumerate(toggles);
        let weights = hypotheses.iter().map(|h| [h.prior / RATES.len() as f64; RATES.len()]).collect();
        Self { toggles, background, hypotheses, weights, seen: BTreeMap::new() }
    }

    /// The number of toggles.
    pub fn toggles(&self) -> usize {
        self.toggles
    }

    /// All that was seen of a configuration.
    pub fn seen(&self, bad: Subset) -> Counts {
        self.seen.get(&bad).copied().unwrap_or_default()
    }

    /// The explanations with their weights by rate.
    pub fn iter(&self) -> impl Iterator<Item = (&Hypothesis, &[f64; RATES.len()])> {
        self.hypotheses.iter().zip(&self.weights)
    }

    /// Takes in the outcome of a probe. Probes of one configuration share its rate, so their counts are pooled.
    pub fn update(&mut self, bad: Subset, counts: Counts) {
        let before = self.seen(bad);
        let factors = likelihoods(self.background, before, counts);
        self.seen.insert(bad, before + counts);
        let mut sum = 0.0;
        for (hypothesis, weights) in self.hypotheses.iter().zip(&mut self.weights) {
            let row = &factors[hypothesis.level(bad) as usize];
            for (weight, factor) in weights.iter_mut().zip(row) {
                *weight *= factor;
                sum += *weight;
            }
        }
        for weight in self.weights.iter_mut().flatten() {
            *weight /= sum;
        }
    }

    /// The probability of each smallest set to turn good into bad, likeliest first.
    pub fn answers(&self) -> Vec<(Subset, f64)> {
        let mut sums: BTreeMap<Subset, f64> = BTreeMap::new();
        for (hypothesis, weights) in self.iter() {
            let weight: f64 = weights.iter().sum();
            for answer in hypothesis.cause.answers() {
                *sums.entry(answer).or_default() += weight;
            }
        }
        let mut answers: Vec<(Subset, f64)> = sums.into_iter().collect();
        answers.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        answers
    }

    /// The probability of each toggle to be part of the cause.
    pub fn inclusion(&self) -> Vec<f64> {
        let mut sums = vec![0.0; self.toggles];
        for (hypothesis, weights) in self.iter() {
            let weight: f64 = weights.iter().sum();
            for index in hypothesis.cause.involved().members() {
                sums[index] += weight;
            }
        }
        sums
    }

    /// The expected rate of the bug.
    pub fn rate(&self) -> f64 {
        self.weights.iter().flat_map(|weights| weights.iter().zip(RATES)).map(|(weight, rate)| weight * rate).sum()
    }

    /// The probability of `counts` at each level and rate, given what was seen of the configuration before.
    pub fn predictions(&self, bad: Subset, counts: Counts) -> Likelihoods {
        likelihoods(self.background, self.seen(bad), counts)
    }
}

/// A probability by level and rate.
pub type Likelihoods = [[f64; RATES.len()]; 3];

fn likelihoods(background: f64, before: Counts, counts: Counts) -> Likelihoods {
    let clean = binomial(background, counts);
    let mut table = [[clean; RATES.len()]; 3];
    for (index, rate) in RATES.into_iter().enumerate() {
        table[Level::Bad as usize][index] = overdispersed(rate, before, counts);
        table[Level::Damped as usize][index] = overdispersed(rate * DAMPING, before, counts);
    }
    table
}

fn binomial(rate: f64, Counts { events, trials }: Counts) -> f64 {
    let quiet = (trials - events) as f64;
    (ln_binomial(trials, events) + events as f64 * rate.ln() + quiet * (-rate).ln_1p()).exp()
}

/// The beta-binomial probability of `counts` for a configuration whose own rate varies around `mean`, after `before`.
fn overdispersed(mean: f64, before: Counts, counts: Counts) -> f64 {
    let size = ((1.0 - mean) / (mean * VARIATION) - 1.0).max(1.0);
    let a = mean * size + before.events as f64;
    let b = (1.0 - mean) * size + (before.trials - before.events) as f64;
    let quiet = (counts.trials - counts.events) as f64;
    (ln_binomial(counts.trials, counts.events) + ln_beta(a + counts.events as f64, b + quiet) - ln_beta(a, b)).exp()
}

/// How much likelier `bad` is under some rate of the bug than under the background.
pub(super) fn bayes_factor(background: f64, counts: Counts) -> f64 {
    let table = likelihoods(background, Counts::default(), counts);
    let bad = table[Level::Bad as usize].iter().sum::<f64>() / RATES.len() as f64;
    bad / table[Level::Clean as usize][0].max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_sum_to_one() {
        let mut posterior = Posterior::new(4, 0.001);
        posterior.update(Subset(5), Counts::new(3, 20));
        let mut sums = [[0.0; RATES.len()]; 3];
        for events in 0..=10 {
            let table = posterior.predictions(Subset(5), Counts::new(events, 10));
            for (sum, p) in sums.iter_mut().flatten().zip(table.iter().flatten()) {
                *sum += p;
            }
        }
        assert!(sums.iter().flatten().all(|sum| (sum - 1.0).abs() < 1e-9), "{sums:?}");
    }

    #[test]
    fn one_probe_or_two_halves_say_the_same() {
        let mut whole = Posterior::new(3, 0.001);
        whole.update(Subset(1), Counts::new(2, 20));
        let mut halves = Posterior::new(3, 0.001);
        halves.update(Subset(1), Counts::new(2, 8));
        halves.update(Subset(1), Counts::new(0, 12));
        for (a, b) in whole.answers().iter().zip(halves.answers()) {
            assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-9);
        }
    }

    #[test]
    fn evidence_moves_the_answer() {
        let mut posterior = Posterior::new(4, 0.001);
        posterior.update(Subset(0b0011), Counts::new(5, 20));
        posterior.update(Subset(0b0001), Counts::new(0, 60));
        posterior.update(Subset(0b0010), Counts::new(4, 20));
        let (best, probability) = posterior.answers()[0];
        assert_eq!(best, Subset(0b0010));
        assert!(probability > 0.9, "{probability}");
        assert!(posterior.inclusion()[1] > posterior.inclusion()[0]);
    }
}
