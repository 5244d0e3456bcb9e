//! Exact tests of two proportions.

use statrs::function::factorial::ln_binomial;

use super::Counts;

/// Relative slack within which two table probabilities count as equal, as in R's `fisher.test`.
const TIE: f64 = 1.0 + 1e-7;

/// A term this small against the sum before it changes nothing; nor do the terms that follow, which are smaller still.
const NEGLIGIBLE: f64 = 1e-18;

/// The distribution of the first arm's events, given the margins of the table.
struct Hypergeometric {
    first: u64,
    second: u64,
    events: u64,
    ln_total: f64,
}

impl Hypergeometric {
    fn of(first: Counts, second: Counts) -> Self {
        Self::given(first.trials, second.trials, first.events + second.events)
    }

    fn given(first: u64, second: u64, events: u64) -> Self {
        Self { first, second, events, ln_total: ln_binomial(first + second, events) }
    }

    /// The numbers of events that the first arm can have.
    fn support(&self) -> std::ops::RangeInclusive<u64> {
        self.events.saturating_sub(self.second)..=self.events.min(self.first)
    }

    fn probability(&self, events: u64) -> f64 {
        (ln_binomial(self.first, events) + ln_binomial(self.second, self.events - events) - self.ln_total).exp()
    }

    /// How many times as likely as `events` one more event in the first arm is.
    fn ratio(&self, events: u64) -> f64 {
        let more = (self.events - events) as f64 * (self.first - events) as f64;
        more / ((events + 1) as f64 * (self.second + events + 1 - self.events) as f64)
    }

    /// The probability of `events` or more in the first arm.
    fn at_least(&self, events: u64) -> f64 {
        let (least, most) = self.support().into_inner();
        if events <= least {
            return 1.0;
        }
        if events > most {
            return 0.0;
        }
        // From the likeliest number on, terms fall in both directions, the faster the farther.
        let likeliest = (self.events + 1) as f64 * (self.first + 1) as f64 / (self.first + self.second + 2) as f64;
        let start = events.max((likeliest as u64).clamp(least, most));
        let peak = self.probability(start);
        let above = falling_sum(peak, (start..most).map(|x| self.ratio(x)));
        let below = falling_sum(peak, (events..start).rev().map(|x| self.ratio(x).recip())) - peak;
        (above + below).min(1.0)
    }
}

/// The sum of `term` and those after it, each the one before times the next of `ratios`, which fall and begin at 1 or less.
fn falling_sum(mut term: f64, ratios: impl Iterator<Item = f64>) -> f64 {
    let mut sum = term;
    for ratio in ratios {
        term *= ratio;
        sum += term;
        if term <= sum * NEGLIGIBLE {
            break;
        }
    }
    sum
}

/// Fisher's exact test, two-sided: the probability of every table with these margins that is no likelier than the
/// observed one. Fisher (1935), JRSS 98:39; the two-sided rule is that of R's `fisher.test` and SciPy's `fisher_exact`.
pub fn fisher(first: Counts, second: Counts) -> f64 {
    let tables = Hypergeometric::of(first, second);
    let observed = tables.probability(first.events) * TIE;
    tables.support().map(|x| tables.probability(x)).filter(|&p| p <= observed).sum::<f64>().min(1.0)
}

/// Boschloo's exact test, two-sided: Fisher's one-sided p as the statistic, maximised over the unknown common rate, the
/// smaller side doubled as in SciPy's `boschloo_exact`. Uniformly more powerful than Fisher's test.
/// Boschloo (1970), Statistica Neerlandica 24:1.
pub fn boschloo(first: Counts, second: Counts) -> f64 {
    (2.0 * one_sided(first, second).min(one_sided(second, first))).min(1.0)
}

/// Boschloo's p for "the first arm's rate is higher".
fn one_sided(first: Counts, second: Counts) -> f64 {
    if first.trials == 0 || second.trials == 0 {
        return 1.0;
    }
    let observed = Hypergeometric::of(first, second).at_least(first.events) * TIE;
    if observed >= 1.0 {
        // Every table is as extreme.
        return 1.0;
    }
    let region = rejection_region(first.trials, second.trials, observed);
    maximise(|rate| region_probability(&region, first.trials, second.trials, rate))
}

/// For each number of events in the first arm, how many events of the second (from zero) make a table at least as
/// extreme. The region is a staircase: one more event in the first arm never makes a table less extreme.
fn rejection_region(first: u64, second: u64, observed: f64) -> Vec<u64> {
    let mut extreme = 0;
    (0..=first)
        .map(|x| {
            while extreme <= second && Hypergeometric::given(first, second, x + extreme).at_least(x) <= observed {
                extreme += 1;
            }
            extreme
        })
        .collect()
}

fn region_probability(region: &[u64], first: u64, second: u64, rate: f64) -> f64 {
    let mut below = vec![0.0];
    for p in binomial(second, rate) {
        below.push(below[below.len() - 1] + p);
    }
    binomial(first, rate).iter().zip(region).map(|(p, &extreme)| p * below[extreme as usize]).sum()
}

/// The binomial probabilities of `0..=trials` events: that of the likeliest number, and from there each from its neighbour's.
pub(super) fn binomial(trials: u64, rate: f64) -> Vec<f64> {
    let term = |base: f64, times: u64| if times == 0 { 0.0 } else { times as f64 * base };
    let peak = (((trials + 1) as f64 * rate) as u64).min(trials);
    let mut terms = vec![0.0; trials as usize + 1];
    let ln_peak = ln_binomial(trials, peak) + term(rate.ln(), peak) + term((-rate).ln_1p(), trials - peak);
    terms[peak as usize] = ln_peak.exp();
    let odds = rate / (1.0 - rate);
    // What is too small for full precision would slow the arithmetic down and add nothing.
    let normal = |term: f64| if term < f64::MIN_POSITIVE { 0.0 } else { term };
    for x in peak..trials {
        terms[x as usize + 1] = normal(terms[x as usize] * odds * ((trials - x) as f64 / (x + 1) as f64));
    }
    for x in (0..peak).rev() {
        terms[x as usize] = normal(terms[x as usize + 1] / odds * ((x + 1) as f64 / (trials - x) as f64));
    }
    terms
}

/// The exact sign test of two dependent arms, two-sided: how likely so uneven a split of the discordant pairs is when
/// either side is as likely. `McNemar` (1947), Psychometrika 12:153, in its exact form.
pub fn sign(first: u64, second: u64) -> f64 {
    let tail: f64 = binomial(first + second, 0.5).iter().take(first.min(second) as usize + 1).sum();
    (2.0 * tail).min(1.0)
}

/// The maximum of a smooth function on the unit interval: a grid that is dense at the ends, refined around its best
/// points by golden sections.
fn maximise(f: impl Fn(f64) -> f64) -> f64 {
    const POINTS: usize = 256;
    let at = |i: usize| {
        ((i as f64 / POINTS as f64 * std::f64::consts::PI).cos().mul_add(-0.5, 0.5)).clamp(1e-12, 1.0 - 1e-12)
    };
    let grid: Vec<f64> = (0..=POINTS).map(|i| f(at(i))).collect();
    let peaks = (0..=POINTS).filter(|&i| (i == 0 || grid[i] >= grid[i - 1]) && (i == POINTS || grid[i] >= grid[i + 1]));
    let best = grid.iter().copied().fold(0.0, f64::max);
    peaks
        .filter(|&i| grid[i] > 0.9 * best)
        .map(|i| golden(&f, at(i.saturating_sub(1)), at((i + 1).min(POINTS))))
        .fold(best, f64::max)
}

fn golden(f: &impl Fn(f64) -> f64, mut low: f64, mut high: f64) -> f64 {
    const RATIO: f64 = 0.618_033_988_749_894_9;
    let mut best = 0.0_f64;
    for _ in 0..24 {
        let (left, right) = (high - RATIO * (high - low), low + RATIO * (high - low));
        let (at_left, at_right) = (f(left), f(right));
        best = best.max(at_left).max(at_right);
        if at_left < at_right {
            low = left;
        } else {
            high = right;
        }
    }
    best
}

/// Holm's step-down adjustment: p-values that hold jointly, whatever their dependence, in the order given.
/// Holm (1979), Scandinavian Journal of Statistics 6:65.
pub fn holm(p_values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p_values.len()).collect();
    order.sort_by(|&a, &b| p_values[a].total_cmp(&p_values[b]));
    let mut adjusted = vec![1.0; p_values.len()];
    let mut floor = 0.0_f64;
    for (rank, &index) in order.iter().enumerate() {
        floor = floor.max(p_values[index] * (p_values.len() - rank) as f64).min(1.0);
        adjusted[index] = floor;
    }
    adjusted
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn near(fast: f64, plain: f64) -> bool {
        (fast - plain).abs() <= 1e-9 * plain || plain < 1e-300
    }

    proptest! {
        #[test]
        fn a_tail_is_the_sum_of_its_terms(first in 1..6000u64, second in 1..6000u64, events in 0.0..1.0f64, at in 0.0..1.0f64) {
            let events = (events * (first + second) as f64) as u64;
            let tables = Hypergeometric::given(first, second, events);
            let x = (at * events.min(first) as f64) as u64;
            let plain: f64 = tables.support().filter(|&other| other >= x).map(|other| tables.probability(other)).sum();
            prop_assert!(near(tables.at_least(x), plain.min(1.0)), "{} {plain}", tables.at_least(x));
        }

        #[test]
        fn binomial_terms_are_those_of_their_logarithms(trials in 0..6000u64, rate in 1e-9..1.0f64) {
            for (x, term) in (0..=trials).zip(binomial(trials, rate)) {
                let ln = ln_binomial(trials, x) + x as f64 * rate.ln() + (trials - x) as f64 * (-rate).ln_1p();
                prop_assert!(near(term, ln.exp()), "{x}: {term} {}", ln.exp());
            }
        }
    }

    #[test]
    fn certain_rates_have_one_outcome() {
        assert_eq!((binomial(3, 0.0), binomial(3, 1.0)), (vec![1.0, 0.0, 0.0, 0.0], vec![0.0, 0.0, 0.0, 1.0]));
        assert_eq!(binomial(0, 0.3), [1.0]);
    }
}
