//! What may be behind a bug: every explanation the search can think of, with its prior probability.

use super::Subset;

/// The most toggles that act together in an explanation.
const LARGEST_CAUSE: usize = 3;

/// By what factor a damper lowers the rate: probes that perturb timing have been seen to hide a race five- to tenfold.
pub(super) const DAMPING: f64 = 0.15;

/// When a bug appears.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// When all of these are bad: a single culprit, or an interaction.
    All(Subset),
    /// When any of these is bad: two causes, each sufficient.
    Any(Subset),
    /// When `cause` is bad, unless `mask` is bad and `unmask` is good.
    Unmasked {
        /// The culprit.
        cause: usize,
        /// What hides it at its bad value.
        mask: usize,
        /// What takes the mask away at its bad value.
        unmask: usize,
    },
}

impl Cause {
    /// Whether the bug can appear with these at their bad value.
    pub fn is_met(self, bad: Subset) -> bool {
        match self {
            Self::All(set) => bad.contains(set),
            Self::Any(set) => bad.meets(set),
            Self::Unmasked { cause, mask, unmask } => bad.has(cause) && (!bad.has(mask) || bad.has(unmask)),
        }
    }

    /// Whether `set` is a smallest set that turns good into bad.
    pub fn is_answered_by(self, set: Subset) -> bool {
        match self {
            Self::All(all) => all == set,
            Self::Any(any) => set.len() == 1 && any.contains(set),
            Self::Unmasked { cause, .. } => Subset::one(cause) == set,
        }
    }

    /// The smallest sets that turn good into bad.
    pub fn answers(self) -> Vec<Subset> {
        match self {
            Self::All(all) => vec![all],
            Self::Any(any) => any.members().map(Subset::one).collect(),
            Self::Unmasked { cause, .. } => vec![Subset::one(cause)],
        }
    }

    /// Everything that decides whether the bug can appear.
    pub fn involved(self) -> Subset {
        match self {
            Self::All(set) | Self::Any(set) => set,
            Self::Unmasked { cause, mask, unmask } => Subset(1 << cause | 1 << mask | 1 << unmask),
        }
    }
}

/// How often a configuration fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Never, background aside.
    Clean,
    /// At the bug's rate.
    Bad,
    /// At a fraction of it.
    Damped,
}

/// One explanation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hypothesis {
    /// When the bug appears.
    pub cause: Cause,
    /// A toggle outside the cause whose bad value makes the bug rarer.
    pub damper: Option<usize>,
    /// Probability before any probe.
    pub prior: f64,
}

impl Hypothesis {
    /// What it predicts for a configuration.
    pub fn level(&self, bad: Subset) -> Level {
        match (self.cause.is_met(bad), self.damper) {
            (false, _) => Level::Clean,
            (true, Some(damper)) if bad.has(damper) => Level::Damped,
            (true, _) => Level::Bad,
        }
    }
}

/// Prior weight of each family of causes: most bugs have one culprit.
const SINGLE: f64 = 0.70;
const PAIR: f64 = 0.18;
const TRIPLE: f64 = 0.04;
const EITHER: f64 = 0.04;
const UNMASKED: f64 = 0.04;

/// Prior probability that some toggle makes the bug rarer.
const DAMPED: f64 = 0.15;

/// Every explanation over `n` toggles, with normalised priors. Sparse: at most three toggles act together.
pub fn enumerate(n: usize) -> Vec<Hypothesis> {
    let mut all = Vec::new();
    let sets = subsets(n);
    for (size, weight) in [(1, SINGLE), (2, PAIR), (3, TRIPLE)] {
        spread(&mut all, n, weight, sets.iter().filter(|set| set.len() == size).map(|&set| Cause::All(set)));
    }
    spread(&mut all, n, EITHER, sets.iter().filter(|set| set.len() == 2).map(|&set| Cause::Any(set)));
    spread(&mut all, n, UNMASKED, unmasked(n));
    let sum: f64 = all.iter().map(|hypothesis| hypothesis.prior).sum();
    for hypothesis in &mut all {
        hypothesis.prior /= sum;
    }
    all
}

fn subsets(n: usize) -> Vec<Subset> {
    let mut sets: Vec<Subset> = (0..n).map(Subset::one).collect();
    let mut start = 0;
    for _ in 1..LARGEST_CAUSE {
        let end = sets.len();
        for index in start..end {
            let largest = 31 - sets[index].0.leading_zeros() as usize;
            sets.extend((largest + 1..n).map(|next| sets[index].flip(next)).collect::<Vec<_>>());
        }
        start = end;
    }
    sets
}

fn unmasked(n: usize) -> impl Iterator<Item = Cause> {
    let triples = (0..n).flat_map(move |a| (0..n).flat_map(move |b| (0..n).map(move |c| (a, b, c))));
    triples.filter(|(a, b, c)| a != b && b != c && a != c).map(|(cause, mask, unmask)| Cause::Unmasked {
        cause,
        mask,
        unmask,
    })
}

fn spread(all: &mut Vec<Hypothesis>, n: usize, weight: f64, causes: impl Iterator<Item = Cause>) {
    let causes: Vec<Cause> = causes.collect();
    for &cause in &causes {
        let prior = weight / causes.len() as f64;
        let outside: Vec<usize> = (0..n).filter(|&index| !cause.involved().has(index)).collect();
        let may_damp = matches!(cause, Cause::All(_)) && !outside.is_empty();
        all.push(Hypothesis { cause, damper: None, prior: if may_damp { prior * (1.0 - DAMPED) } else { prior } });
        if may_damp {
            let share = prior * DAMPED / outside.len() as f64;
            all.extend(outside.iter().map(|&index| Hypothesis { cause, damper: Some(index), prior: share }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_priors_sum_to_one_and_no_explanation_comes_twice() {
        for n in [1, 2, 3, 8, 12] {
            let all = enumerate(n);
            assert!((all.iter().map(|h| h.prior).sum::<f64>() - 1.0).abs() < 1e-9);
            let mut keys: Vec<_> = all.iter().map(|h| (h.cause, h.damper)).collect();
            keys.sort();
            keys.dedup();
            assert_eq!(keys.len(), all.len());
        }
        let singles = enumerate(8).iter().filter(|h| matches!(h.cause, Cause::All(set) if set.len() == 1)).count();
        assert_eq!(singles, 8 * 8);
    }

    #[test]
    fn every_explanation_is_good_at_the_good_end_and_bad_at_the_bad_one() {
        for hypothesis in enumerate(6) {
            assert_eq!(hypothesis.level(Subset::default()), Level::Clean);
            assert_ne!(hypothesis.level(Subset::full(6)), Level::Clean);
            for answer in hypothesis.cause.answers() {
                assert_ne!(hypothesis.level(answer), Level::Clean, "{hypothesis:?}");
                assert!(hypothesis.cause.is_answered_by(answer));
            }
        }
    }
}
