//! The probe that tells most about the answer for its price.

use std::collections::BTreeSet;

use rand::RngExt;

use super::{
    Subset,
    hypothesis::{Cause, Level},
    posterior::{Posterior, RATES},
};
use crate::{seed::Seed, stats::Counts};

/// Multiples of the smallest probe that are considered.
const SIZES: [u64; 3] = [1, 2, 4];

/// Outcomes are told apart by these numbers of corrupted sessions; finer bins would hardly change the choice.
const BINS: [u64; 5] = [0, 1, 2, 4, 8];

/// Explanations that stand in for all of them, drawn evenly from the posterior.
const SAMPLES: usize = 512;

/// Up to this many toggles every configuration is considered.
const EXHAUSTIVE: usize = 8;

/// Random configurations considered beyond that, before the best are improved one toggle at a time.
const RANDOM: usize = 40;

type Bins = [f64; BINS.len()];

/// A configuration, a number of sessions, and what they are expected to tell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Toggles at their bad value.
    pub bad: Subset,
    /// Sessions to spend.
    pub sessions: u64,
    /// Expected information about the answer in nats.
    pub gain: f64,
}

/// Up to `count` configurations and sizes, for probes side by side: each the one with the highest expected information
/// about the answer per session, given that the earlier ones will be known, where starting a server counts as half a
/// smallest probe. Lindley (1956), Annals of Mathematical Statistics 27:986. Configurations in `barred` did not start.
/// Fewer where all others are barred or tell nothing.
pub fn choose(
    posterior: &Posterior,
    smallest: u64,
    count: usize,
    barred: &BTreeSet<Subset>,
    seed: Seed,
) -> Vec<Choice> {
    let sample = Sample::draw(posterior, smallest);
    let mut prospects = vec![Prospect { probability: 1.0, weights: sample.members.iter().map(|m| m.weight).collect() }];
    let mut barred = barred.clone();
    let mut choices: Vec<Choice> = Vec::new();
    while choices.len() < count.max(1) {
        let Some(choice) = best(posterior, &sample, &prospects, &barred, seed) else { break };
        if !choices.is_empty() && choice.gain <= 0.0 {
            break;
        }
        prospects = sample.split(posterior, &prospects, choice);
        barred.insert(choice.bad);
        choices.push(choice);
    }
    choices
}

/// The most telling choice over all `prospects`.
fn best(
    posterior: &Posterior,
    sample: &Sample<'_>,
    prospects: &[Prospect],
    barred: &BTreeSet<Subset>,
    seed: Seed,
) -> Option<Choice> {
    let smallest = sample.smallest;
    let price = |sessions: u64| sessions as f64 + smallest as f64 / 2.0;
    let best_size = |bad: Subset| {
        let of = |size: usize| Choice {
            bad,
            sessions: smallest * SIZES[size],
            gain: sample.gain(posterior, prospects, bad, size),
        };
        (0..SIZES.len()).map(of).max_by(|a, b| (a.gain / price(a.sessions)).total_cmp(&(b.gain / price(b.sessions))))
    };
    let value = |choice: &Choice| choice.gain / price(choice.sessions);
    let free = |bad: &Subset| !barred.contains(bad);
    let mut best = candidates(posterior, seed).into_iter().filter(free).filter_map(best_size).fold(
        None,
        |best, next| match best {
            Some(best) if value(&best) >= value(&next) => Some(best),
            _ => Some(next),
        },
    )?;
    if posterior.toggles() > EXHAUSTIVE {
        loop {
            let neighbours = (0..posterior.toggles()).map(|index| best.bad.flip(index)).filter(free);
            let better = neighbours.filter_map(best_size).max_by(|a, b| value(a).total_cmp(&value(b)));
            match better {
                Some(better) if value(&better) > value(&best) * (1.0 + 1e-9) => best = better,
                _ => break,
            }
        }
    }
    Some(best)
}

/// Configurations worth a look: all of them when they are few; else random ones of every density, and the likeliest
/// answers with their complements.
fn candidates(posterior: &Posterior, seed: Seed) -> Vec<Subset> {
    let n = posterior.toggles();
    if n <= EXHAUSTIVE {
        return (0..1_u32 << n).map(Subset).collect();
    }
    let full = Subset::full(n);
    let mut rng = seed.rng();
    let mut candidates = Vec::with_capacity(RANDOM + 8);
    for index in 0..RANDOM {
        let density = [0.2, 0.4, 0.6, 0.8][index % 4];
        let members = (0..n).filter(|_| rng.random_bool(density)).fold(0, |set, index| set | 1 << index);
        candidates.push(Subset(members));
    }
    for (answer, _) in posterior.answers().into_iter().take(4) {
        candidates.extend([answer, full.without(answer)]);
    }
    candidates
}

/// One way in which the probes chosen so far may come out.
struct Prospect {
    probability: f64,
    /// The weights of the sample's members in that case.
    weights: Vec<f64>,
}

/// Prospects that are followed; the least likely are dropped beyond.
const PROSPECTS: usize = 25;

/// One explanation of the sample.
struct Member {
    index: usize,
    answer: usize,
    weight: f64,
    /// By size and level: probability of each bin in a configuration that was never probed.
    fresh: [[Bins; 3]; SIZES.len()],
    rates: [f64; RATES.len()],
}

struct Sample<'a> {
    members: Vec<Member>,
    hypotheses: Vec<&'a super::hypothesis::Hypothesis>,
    answers: usize,
    smallest: u64,
}

impl<'a> Sample<'a> {
    /// Systematic resampling (Kitagawa, 1996, Journal of Computational and Graphical Statistics 5:1): every explanation is
    /// represented in proportion to its weight, without chance.
    fn draw(posterior: &'a Posterior, smallest: u64) -> Self {
        let never = Subset(u32::MAX);
        let tables = SIZES.map(|size| bin_tables(posterior, never, smallest * size));
        let mut causes: Vec<Cause> = Vec::new();
        let (mut members, mut hypotheses): (Vec<Member>, Vec<_>) = (Vec::new(), Vec::new());
        let mut passed = 0.0;
        let mut next = 0.5 / SAMPLES as f64;
        for (hypothesis, weights) in posterior.iter() {
            let weight: f64 = weights.iter().sum();
            passed += weight;
            let mut hits = 0;
            while next < passed {
                hits += 1;
                next += 1.0 / SAMPLES as f64;
            }
            if hits == 0 {
                continue;
            }
            let rates = weights.map(|w| w / weight);
            let answer = causes.iter().position(|&cause| same_answer(cause, hypothesis.cause)).unwrap_or_else(|| {
                causes.push(hypothesis.cause);
                causes.len() - 1
            });
            let fresh = std::array::from_fn(|size| mix(&tables[size], &rates));
            let weight = f64::from(hits) / SAMPLES as f64;
            members.push(Member { index: hypotheses.len(), answer, weight, fresh, rates });
            hypotheses.push(hypothesis);
        }
        Self { members, hypotheses, answers: causes.len(), smallest }
    }

    /// By member, the probability of each bin when `bad` is probed with the size numbered `size`.
    fn outcomes(&self, posterior: &Posterior, bad: Subset, size: usize) -> Vec<Bins> {
        let seen = (posterior.seen(bad).trials > 0).then(|| bin_tables(posterior, bad, self.smallest * SIZES[size]));
        let bins = |member: &Member| {
            let level = self.hypotheses[member.index].level(bad);
            match &seen {
                None => member.fresh[size][level as usize],
                Some(tables) => mix_level(tables, level, &member.rates),
            }
        };
        self.members.iter().map(bins).collect()
    }

    /// The mutual information of the answer and the outcome of probing `bad` with the size numbered `size`, in the mean
    /// over the prospects.
    fn gain(&self, posterior: &Posterior, prospects: &[Prospect], bad: Subset, size: usize) -> f64 {
        let outcomes = self.outcomes(posterior, bad, size);
        prospects.iter().map(|prospect| prospect.probability * self.information(&outcomes, &prospect.weights)).sum()
    }

    fn information(&self, outcomes: &[Bins], weights: &[f64]) -> f64 {
        let mut by_answer = vec![(0.0, [0.0; BINS.len()]); self.answers];
        for ((member, bins), share) in self.members.iter().zip(outcomes).zip(weights) {
            let (weight, sums) = &mut by_answer[member.answer];
            *weight += share;
            for (sum, p) in sums.iter_mut().zip(bins) {
                *sum += share * p;
            }
        }
        let mut total = [0.0; BINS.len()];
        let mut conditional = 0.0;
        for (weight, sums) in by_answer.iter().filter(|(weight, _)| *weight > 0.0) {
            for (sum, p) in total.iter_mut().zip(sums) {
                *sum += p;
            }
            conditional += weight * entropy(&sums.map(|p| p / weight));
        }
        (entropy(&total) - conditional).max(0.0)
    }

    /// Every prospect, once for each outcome of `choice`.
    fn split(&self, posterior: &Posterior, prospects: &[Prospect], choice: Choice) -> Vec<Prospect> {
        let size = SIZES.iter().position(|size| size * self.smallest == choice.sessions).unwrap_or(0);
        let outcomes = self.outcomes(posterior, choice.bad, size);
        let after = |prospect: &Prospect, bin: usize| {
            let joint: Vec<f64> =
                prospect.weights.iter().zip(&outcomes).map(|(weight, bins)| weight * bins[bin]).collect();
            let sum: f64 = joint.iter().sum();
            let weights = joint.iter().map(|weight| weight / sum.max(f64::MIN_POSITIVE)).collect();
            Prospect { probability: prospect.probability * sum, weights }
        };
        let all = prospects.iter().flat_map(|prospect| (0..BINS.len()).map(move |bin| (prospect, bin)));
        let mut split: Vec<Prospect> = all.map(|(prospect, bin)| after(prospect, bin)).collect();
        split.sort_by(|a, b| b.probability.total_cmp(&a.probability));
        split.truncate(PROSPECTS);
        split
    }
}

fn same_answer(a: Cause, b: Cause) -> bool {
    a == b || (!matches!(a, Cause::Any(_)) && !matches!(b, Cause::Any(_)) && a.answers() == b.answers())
}

/// By level and rate, the probability of each bin.
type Tables = [[Bins; RATES.len()]; 3];

fn bin_tables(posterior: &Posterior, bad: Subset, sessions: u64) -> Tables {
    let mut tables = [[[0.0; BINS.len()]; RATES.len()]; 3];
    for events in 0..=sessions {
        let bin = BINS.iter().rposition(|&from| from <= events).unwrap_or(0);
        let likelihoods = posterior.predictions(bad, Counts::new(events, sessions));
        for (rows, levels) in tables.iter_mut().zip(likelihoods) {
            for (row, p) in rows.iter_mut().zip(levels) {
                row[bin] += p;
            }
        }
    }
    tables
}

fn mix(tables: &Tables, rates: &[f64; RATES.len()]) -> [Bins; 3] {
    [Level::Clean, Level::Bad, Level::Damped].map(|level| mix_level(tables, level, rates))
}

fn mix_level(tables: &Tables, level: Level, rates: &[f64; RATES.len()]) -> Bins {
    let mut bins = [0.0; BINS.len()];
    for (row, weight) in tables[level as usize].iter().zip(rates) {
        for (bin, p) in bins.iter_mut().zip(row) {
            *bin += weight * p;
        }
    }
    bins
}

fn entropy(probabilities: &Bins) -> f64 {
    probabilities.iter().filter(|&&p| p > 0.0).map(|p| -p * p.ln()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_probe_splits_the_toggles() {
        let mut posterior = Posterior::new(8, 0.001);
        posterior.update(Subset::full(8), Counts::new(12, 24));
        let choice = choose(&posterior, 24, 1, &BTreeSet::new(), Seed(1))[0];
        assert!((3..=6).contains(&choice.bad.len()), "{choice:?}");
        assert!(choice.gain > 0.3, "{choice:?}");
    }

    #[test]
    fn the_ends_tell_nothing_and_the_barred_are_not_chosen() {
        let mut posterior = Posterior::new(4, 0.001);
        posterior.update(Subset::full(4), Counts::new(5, 24));
        let first = choose(&posterior, 24, 1, &BTreeSet::new(), Seed(1))[0];
        assert!(!first.bad.is_empty() && first.bad != Subset::full(4));
        let second = choose(&posterior, 24, 1, &BTreeSet::from([first.bad]), Seed(1))[0];
        assert_ne!(second.bad, first.bad);
        let all = (0..16).map(Subset).collect();
        assert!(choose(&posterior, 24, 1, &all, Seed(1)).is_empty());
    }

    #[test]
    fn a_second_probe_beside_the_first_splits_what_the_first_leaves() {
        let mut posterior = Posterior::new(8, 0.001);
        posterior.update(Subset::full(8), Counts::new(12, 24));
        let [first, second] = choose(&posterior, 24, 2, &BTreeSet::new(), Seed(1))[..] else { panic!("two wanted") };
        let both = first.bad.0 & second.bad.0;
        assert!(both != 0 && both != first.bad.0, "{first:?} {second:?}");
        assert!(second.gain > 0.2 && second.gain <= first.gain, "{first:?} {second:?}");
    }
}
