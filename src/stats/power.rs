//! How many sessions a question needs.

use super::{Counts, exact, interval};

/// Lower rates are not searched for.
const LOWEST_RATE: f64 = 1e-12;

/// The fewest sessions whose one-sided bound lies below `rate` when `events` of them are corrupted.
///
/// With no event this is `ln(1 - confidence) / ln(1 - rate)`: 299 for 1 %, 2 995 for 0.1 %, at 95 %.
/// `None` unless `0 < rate < 1`, and below 10⁻¹², which no run can exclude.
pub fn sessions_for_bound(rate: f64, events: u64, confidence: f64) -> Option<u64> {
    if !(LOWEST_RATE..1.0).contains(&rate) {
        return None;
    }
    let enough = |trials| interval::upper_bound(Counts { events, trials }, confidence) < rate;
    let mut high = (events + 1).max(2);
    while !enough(high) {
        high *= 2;
    }
    let mut low = high / 2;
    while high - low > 1 {
        let middle = low.midpoint(high);
        if middle > events && enough(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    Some(high)
}

/// The fewest sessions that show at least one event with probability `power` at this rate: `ln(1 - power) / ln(1 - rate)`.
/// `None` unless both lie strictly between 0 and 1.
pub fn sessions_to_see(rate: f64, power: f64) -> Option<u64> {
    let open = |x: f64| x > 0.0 && x < 1.0;
    (open(rate) && open(power)).then(|| ((1.0 - power).ln() / (-rate).ln_1p()).ceil() as u64)
}

/// Sessions in each of two arms for Fisher's exact test to tell `p1` from `p2`: the approximation of Casagrande, Pike and
/// Smith (1978), Biometrics 34:483. `None` for equal rates or rates outside the unit interval.
pub fn sessions_to_compare(p1: f64, p2: f64, alpha: f64, power: f64) -> Option<u64> {
    let unit = 0.0..=1.0;
    let difference = (p1 - p2).abs();
    if difference == 0.0 || !unit.contains(&p1) || !unit.contains(&p2) {
        return None;
    }
    let mean = p1.midpoint(p2);
    let (z_alpha, z_power) = (interval::normal_quantile(1.0 - alpha / 2.0), interval::normal_quantile(power));
    let spread = z_alpha * (2.0 * mean * (1.0 - mean)).sqrt() + z_power * (p1 * (1.0 - p1) + p2 * (1.0 - p2)).sqrt();
    let uncorrected = (spread / difference).powi(2);
    let root = (1.0 + 4.0 / (uncorrected * difference)).sqrt();
    Some((uncorrected / 4.0 * (1.0 + root).powi(2)).ceil() as u64)
}

/// The exact power of Fisher's two-sided test at level `alpha` with `sessions` in each arm.
pub fn fisher_power(p1: f64, p2: f64, sessions: u64, alpha: f64) -> f64 {
    let (first, second) = (exact::binomial(sessions, p1), exact::binomial(sessions, p2));
    let mut power = 0.0;
    for (x, px) in first.iter().enumerate().filter(|(_, p)| **p > 1e-9) {
        for (y, py) in second.iter().enumerate().filter(|(_, p)| **p > 1e-9) {
            let p = exact::fisher(Counts::new(x as u64, sessions), Counts::new(y as u64, sessions));
            power += if p <= alpha { px * py } else { 0.0 };
        }
    }
    power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_session_counts() {
        assert_eq!(sessions_for_bound(0.05, 0, 0.95), Some(59));
        assert_eq!(sessions_for_bound(0.01, 0, 0.95), Some(299));
        assert_eq!(sessions_for_bound(0.001, 0, 0.95), Some(2995));
        assert_eq!(sessions_for_bound(0.05, 1, 0.95), Some(93));
        assert_eq!(sessions_to_see(0.15, 0.95), Some(19));
        assert_eq!(sessions_for_bound(0.0, 0, 0.95), None);
        assert_eq!(sessions_for_bound(1e-300, 0, 0.95), None);
        assert!(sessions_for_bound(1e-12, 0, 0.95).is_some_and(|sessions| sessions > 1 << 40));
    }

    #[test]
    fn the_approximate_size_has_the_exact_power() {
        for (p1, p2) in [(0.15, 0.0), (0.15, 0.02), (0.3, 0.1)] {
            let sessions = sessions_to_compare(p1, p2, 0.05, 0.8).unwrap();
            let power = fisher_power(p1, p2, sessions, 0.05);
            assert!((0.78..0.92).contains(&power), "{sessions} sessions for {p1} against {p2}: power {power}");
        }
        assert_eq!(sessions_to_compare(0.1, 0.1, 0.05, 0.8), None);
    }
}
