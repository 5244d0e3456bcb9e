//! Intervals for one proportion and for the difference of two.

use statrs::distribution::{ContinuousCDF, Normal};
use statrs::function::beta::beta_reg;

use super::{Counts, Interval};

/// The quantile of the standard normal distribution at `p`.
pub fn normal_quantile(p: f64) -> f64 {
    Normal::standard().inverse_cdf(p)
}

/// The quantile of the beta distribution at `p`, by bisection on its distribution function, which is monotone: slower
/// than Newton's method and never lost.
fn beta_quantile(a: f64, b: f64, p: f64) -> f64 {
    let (mut below, mut above) = (0.0_f64, 1.0_f64);
    loop {
        let middle = below.midpoint(above);
        if middle <= below || middle >= above || above - below < above * 1e-13 {
            return middle;
        }
        if beta_reg(a, b, middle) < p {
            below = middle;
        } else {
            above = middle;
        }
    }
}

/// The exact two-sided interval of Clopper and Pearson (1934), Biometrika 26:404, by beta quantiles.
///
/// Without trials it is the whole unit interval.
pub fn clopper_pearson(counts: Counts, confidence: f64) -> Interval {
    let tail = (1.0 - confidence) / 2.0;
    Interval { lower: lower_limit(counts, tail), upper: upper_limit(counts, tail) }
}

/// The exact one-sided upper bound of Clopper and Pearson: the rate is at most this, at `confidence`.
///
/// Zero events of `n` give `1 - (1 - confidence)^(1/n)`: 3.7 % for 80, just below 1 % for 299.
pub fn upper_bound(counts: Counts, confidence: f64) -> f64 {
    upper_limit(counts, 1.0 - confidence)
}

/// The exact one-sided lower bound of Clopper and Pearson: the rate is at least this, at `confidence`.
pub fn lower_bound(counts: Counts, confidence: f64) -> f64 {
    lower_limit(counts, 1.0 - confidence)
}

/// Clopper and Pearson's interval where design effects make counts fractional.
pub(super) fn clopper_pearson_effective(events: f64, trials: f64, confidence: f64) -> Interval {
    if trials <= 0.0 {
        return Interval::UNIT;
    }
    let tail = (1.0 - confidence) / 2.0;
    let rest = trials - events;
    Interval {
        lower: if events <= 0.0 { 0.0 } else { beta_quantile(events, rest + 1.0, tail) },
        upper: if rest <= 0.0 { 1.0 } else { beta_quantile(events + 1.0, rest, 1.0 - tail) },
    }
}

fn lower_limit(Counts { events, trials }: Counts, tail: f64) -> f64 {
    if events == 0 {
        return 0.0;
    }
    if events == trials {
        return tail.powf(1.0 / trials as f64);
    }
    beta_quantile(events as f64, (trials - events + 1) as f64, tail)
}

fn upper_limit(Counts { events, trials }: Counts, tail: f64) -> f64 {
    if events == trials {
        return 1.0;
    }
    if events == 0 {
        return -(tail.ln() / trials as f64).exp_m1();
    }
    beta_quantile((events + 1) as f64, (trials - events) as f64, 1.0 - tail)
}

/// The score interval of Wilson (1927), JASA 22:209, without continuity correction.
pub fn wilson(counts: Counts, confidence: f64) -> Interval {
    let Some(rate) = counts.rate() else { return Interval::UNIT };
    let n = counts.trials as f64;
    let z = normal_quantile(f64::midpoint(1.0, confidence));
    let square = z * z / n;
    let centre = (rate + square / 2.0) / (1.0 + square);
    let half = z * (rate * (1.0 - rate) / n + square / (4.0 * n)).sqrt() / (1.0 + square);
    Interval {
        lower: if counts.events == 0 { 0.0 } else { (centre - half).max(0.0) },
        upper: if counts.events == counts.trials { 1.0 } else { (centre + half).min(1.0) },
    }
}

/// The interval for `first - second` from two Wilson intervals: method 10 of Newcombe (1998), Statistics in Medicine
/// 17:873.
pub fn newcombe(first: Counts, second: Counts, confidence: f64) -> Interval {
    let (Some(p1), Some(p2)) = (first.rate(), second.rate()) else { return Interval { lower: -1.0, upper: 1.0 } };
    let (one, two) = (wilson(first, confidence), wilson(second, confidence));
    let difference = p1 - p2;
    Interval {
        lower: difference - (p1 - one.lower).hypot(two.upper - p2),
        upper: difference + (one.upper - p1).hypot(p2 - two.lower),
    }
}
