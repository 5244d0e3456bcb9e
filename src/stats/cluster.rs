//! Correlated observations: calls inside sessions, sessions inside launches.

use rand::{Rng, RngExt};

use super::{Counts, Interval, interval};

/// Resamples behind a bootstrap interval.
const RESAMPLES: usize = 2000;

/// Clusters below which neither the correlation nor a bootstrap can be trusted.
pub const FEW_CLUSTERS: usize = 5;

/// A percentile bootstrap interval for the pooled rate that resamples whole clusters. Davison and Hinkley (1997),
/// *Bootstrap Methods and their Application*, section 3.8.
///
/// `None` where no event, or nothing but events, was seen: a bootstrap of zeros says nothing, and the exact bound by
/// cluster stands instead. `None` below two clusters.
pub fn bootstrap(clusters: &[Counts], confidence: f64, rng: &mut impl Rng) -> Option<Interval> {
    let total = total(clusters);
    if clusters.len() < 2 || total.events == 0 || total.events == total.trials {
        return None;
    }
    let mut rates: Vec<f64> = (0..RESAMPLES).map(|_| resample(clusters, rng).rate().unwrap_or_default()).collect();
    rates.sort_by(f64::total_cmp);
    let tail = (1.0 - confidence) / 2.0;
    Some(Interval { lower: quantile(&rates, tail), upper: quantile(&rates, 1.0 - tail) })
}

fn total(clusters: &[Counts]) -> Counts {
    clusters.iter().fold(Counts::default(), |sum, &cluster| sum + cluster)
}

fn resample(clusters: &[Counts], rng: &mut impl Rng) -> Counts {
    (0..clusters.len()).fold(Counts::default(), |sum, _| sum + clusters[rng.random_range(0..clusters.len())])
}

/// The quantile of sorted values by linear interpolation (type 7 of Hyndman and Fan, 1996, American Statistician 50:361).
///
/// # Panics
/// Without values.
pub fn quantile(sorted: &[f64], p: f64) -> f64 {
    quantile_of(sorted.len(), p, |index| sorted[index])
}

/// The same of `count` values, of which `at` gives the one at an index in ascending order.
///
/// # Panics
/// Without values.
pub fn quantile_of(count: usize, p: f64, at: impl Fn(usize) -> f64) -> f64 {
    let position = p * (count - 1) as f64;
    let (below, above) = (at(position.floor() as usize), at(position.ceil() as usize));
    below + (above - below) * position.fract()
}

/// How much less the observations of clusters say than as many independent ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clustering {
    /// Clusters with at least one observation.
    pub clusters: usize,
    /// All observations.
    pub total: Counts,
    /// The intra-cluster correlation by analysis of variance; `None` where the data cannot tell (fewer than two
    /// clusters, one observation in each, or no variation at all). Below zero when clusters are more alike than chance.
    pub correlation: Option<f64>,
    /// By what factor the variance of the pooled rate exceeds that of independent observations; never below one, and one
    /// where the correlation is unknown.
    pub design_effect: f64,
}

impl Clustering {
    /// Estimates the correlation by the analysis-of-variance estimator for binary data, Ridout, Demétrio and Firth (1999),
    /// Biometrics 55:137, and the design effect by Kish (1965), *Survey Sampling*, section 5.4, with the size-weighted mean
    /// cluster.
    pub fn of(clusters: &[Counts]) -> Self {
        let clusters: Vec<Counts> = clusters.iter().copied().filter(|cluster| cluster.trials > 0).collect();
        let total = total(&clusters);
        let correlation = correlation(&clusters, total);
        let squares: f64 = clusters.iter().map(|cluster| (cluster.trials as f64).powi(2)).sum();
        let mean_size = if total.trials == 0 { 1.0 } else { squares / total.trials as f64 };
        let design_effect = correlation.map_or(1.0, |rho| (1.0 + (mean_size - 1.0) * rho).max(1.0));
        Self { clusters: clusters.len(), total, correlation, design_effect }
    }

    /// Whether there are too few clusters for the correlation to be trusted.
    pub fn is_thin(&self) -> bool {
        self.clusters < FEW_CLUSTERS
    }

    /// Independent observations that would say as much.
    pub fn effective_trials(&self) -> f64 {
        self.total.trials as f64 / self.design_effect
    }

    /// The Clopper-Pearson interval at the effective sample size. Korn and Graubard (1998), Survey Methodology 24:193.
    pub fn interval(&self, confidence: f64) -> Interval {
        let rate = self.total.rate().unwrap_or_default();
        let trials = self.effective_trials();
        interval::clopper_pearson_effective(rate * trials, trials, confidence)
    }
}

fn correlation(clusters: &[Counts], total: Counts) -> Option<f64> {
    let (k, n) = (clusters.len() as f64, total.trials as f64);
    if clusters.len() < 2 || n <= k {
        return None;
    }
    let rate = total.rate()?;
    let squares: f64 = clusters.iter().map(|cluster| (cluster.trials as f64).powi(2)).sum();
    let size = (n - squares / n) / (k - 1.0);
    let (mut between, mut within) = (0.0, 0.0);
    for cluster in clusters {
        let own = cluster.rate()?;
        let trials = cluster.trials as f64;
        between += trials * (own - rate).powi(2) / (k - 1.0);
        within += trials * own * (1.0 - own) / (n - k);
    }
    let denominator = between + (size - 1.0) * within;
    (denominator > 0.0).then(|| (between - within) / denominator)
}
