//! Exact tests of two proportions.

use statrs::function::factorial::ln_binomial;

use super::Counts;

/// Relative slack within which two table probabilities count as equal, as in R's `fisher.test`.
const TIE: f64 = 1.0 + 1e-7;

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

    /// The probability of `events` or more in the first arm.
    fn at_least(&self, events: u64) -> f64 {
        self.support().filter(|&x| x >= events).map(|x| self.probability(x)).sum::<f64>().min(1.0)
    }
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

/// The binomial probabilities of `0..=trials` events.
pub(super) fn binomial(trials: u64, rate: f64) -> Vec<f64> {
    let term = |base: f64, times: u64| if times == 0 { 0.0 } else { times as f64 * base };
    let (ln_rate, ln_rest) = (rate.ln(), (-rate).ln_1p());
    (0..=trials).map(|x| (ln_binomial(trials, x) + term(ln_rate, x) + term(ln_rest, trials - x)).exp()).collect()
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
