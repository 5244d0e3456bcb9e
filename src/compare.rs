//! Two arms against each other: difference, interval, exact p; by class and by position; latency quantiles.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::{
    report::{
        position::{Axis, SendOrder, is_counted, session_of},
        summary::CallRecord,
    },
    seed::Seed,
    stats::{
        Counts, Interval,
        cluster::{quantile, quantile_of},
        exact, interval,
    },
    validate::Verdict,
};

/// Name and version of the comparison's format.
pub const SCHEMA: &str = "toolstorm-compare/1";

/// Resamples behind a latency interval.
const RESAMPLES: usize = 500;

/// One arm of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    /// What it is called in tables.
    pub name: String,
    /// Corrupted sessions of judged ones.
    pub sessions: Counts,
    /// Its calls.
    pub calls: Vec<CallRecord>,
}

/// Two proportions against each other. The unit is the session.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// What is compared.
    pub key: String,
    /// Events of the first side.
    pub first: Counts,
    /// Events of the second side.
    pub second: Counts,
    /// First rate minus second; null where either is unknown.
    pub difference: Option<f64>,
    /// Newcombe's interval of the difference.
    pub interval: Interval,
    /// Fisher's exact p.
    pub fisher_p: f64,
    /// Boschloo's exact p.
    pub boschloo_p: f64,
    /// Fisher's p, adjusted by Holm for the rows of its table.
    pub adjusted_p: f64,
}

/// A family of rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Table {
    /// What tells the rows apart.
    pub by: &'static str,
    /// The rows.
    pub rows: Vec<Row>,
}

/// A latency quantile of both sides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Latency {
    /// The summary's name: `p99_ttft_ms`.
    pub metric: String,
    /// First side.
    pub first: f64,
    /// Second side.
    pub second: f64,
    /// First minus second.
    pub difference: f64,
    /// Bootstrap interval of the difference, by session.
    pub interval: Interval,
}

/// One pair of arms.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// First arm.
    pub first: String,
    /// Second arm.
    pub second: String,
    /// Corrupted sessions.
    pub sessions: Row,
    /// By class and by position.
    pub tables: Vec<Table>,
    /// Latency quantiles.
    pub latency: Vec<Latency>,
}

/// Compares two arms.
pub fn compare(first: &Side, second: &Side, confidence: f64, seed: Seed) -> Comparison {
    let sessions = row("sessions".to_owned(), first.sessions, second.sessions, confidence);
    let mut tables = vec![by_class(first, second, confidence)];
    tables.extend(Axis::ALL.into_iter().map(|axis| by_axis(axis, first, second, confidence)));
    tables.retain(|table| !table.rows.is_empty());
    let latency = latency(first, second, confidence, seed);
    Comparison { first: first.name.clone(), second: second.name.clone(), sessions, tables, latency }
}

/// Adjusts the session tests of several pairs for each other.
pub fn adjust(comparisons: &mut [Comparison]) {
    let adjusted = exact::holm(&comparisons.iter().map(|pair| pair.sessions.fisher_p).collect::<Vec<_>>());
    for (pair, p) in comparisons.iter_mut().zip(adjusted) {
        pair.sessions.adjusted_p = p;
    }
}

fn row(key: String, first: Counts, second: Counts, confidence: f64) -> Row {
    let fisher_p = exact::fisher(first, second);
    Row {
        key,
        first,
        second,
        difference: first.rate().zip(second.rate()).map(|(a, b)| a - b),
        interval: interval::newcombe(first, second, confidence),
        fisher_p,
        boschloo_p: exact::boschloo(first, second),
        adjusted_p: fisher_p,
    }
}

fn table(by: &'static str, mut rows: Vec<Row>) -> Table {
    let adjusted = exact::holm(&rows.iter().map(|row| row.fisher_p).collect::<Vec<_>>());
    for (row, p) in rows.iter_mut().zip(adjusted) {
        row.adjusted_p = p;
    }
    Table { by, rows }
}

type Sessions = BTreeSet<(u32, u64)>;

/// Sessions by the class of their first corrupted call, against all judged sessions.
fn by_class(first: &Side, second: &Side, confidence: f64) -> Table {
    let sessions = |side: &Side| {
        let mut classes: BTreeMap<&'static str, Sessions> = BTreeMap::new();
        let corrupted = side.calls.iter().filter(|call| is_counted(call) && call.verdict == Verdict::Corrupted);
        for call in corrupted {
            classes.entry(call.class.as_str()).or_default().insert(session_of(call));
        }
        classes
    };
    let (one, two) = (sessions(first), sessions(second));
    let classes: BTreeSet<&'static str> = one.keys().chain(two.keys()).copied().collect();
    let of = |sessions: &BTreeMap<&str, Sessions>, class: &str, side: &Side| {
        let events = sessions.get(class).map_or(0, BTreeSet::len) as u64;
        Counts::new(events.min(side.sessions.trials), side.sessions.trials)
    };
    let rows = classes
        .iter()
        .map(|class| row((*class).to_owned(), of(&one, class, first), of(&two, class, second), confidence));
    table("class", rows.collect())
}

/// Sessions with a corrupted call at a position, of the sessions with any call there.
fn by_axis(axis: Axis, first: &Side, second: &Side, confidence: f64) -> Table {
    let sessions = |side: &Side| {
        let mut cells: BTreeMap<u64, (Sessions, Sessions)> = BTreeMap::new();
        let order = SendOrder::of(&side.calls);
        for call in side.calls.iter().filter(|call| is_counted(call)) {
            let Some(position) = axis.position(call, &order) else { continue };
            let (corrupted, all) = cells.entry(position).or_default();
            all.insert(session_of(call));
            if call.verdict == Verdict::Corrupted {
                corrupted.insert(session_of(call));
            }
        }
        cells
    };
    let (one, two) = (sessions(first), sessions(second));
    let of = |cells: &BTreeMap<u64, (Sessions, Sessions)>, position: u64| {
        cells
            .get(&position)
            .map_or_else(Counts::default, |(corrupted, all)| Counts::new(corrupted.len() as u64, all.len() as u64))
    };
    let positions: BTreeSet<u64> = one.keys().chain(two.keys()).copied().collect();
    let rows =
        positions.iter().map(|&position| row(axis.label(position), of(&one, position), of(&two, position), confidence));
    table(axis.title(), rows.collect())
}

/// A time of a response, where it was measured.
type Time = fn(&CallRecord) -> Option<f64>;

fn latency(first: &Side, second: &Side, confidence: f64, seed: Seed) -> Vec<Latency> {
    let times: [(&str, Time); 2] = [("ttft_ms", |call| call.ttft_ms), ("e2el_ms", |call| call.e2el_ms)];
    let mut rows = Vec::new();
    for (name, time) in times {
        let (one, two) = (times_by_session(first, time), times_by_session(second, time));
        if one.is_empty() || two.is_empty() {
            continue;
        }
        let (one, two) = (Times::new(&one), Times::new(&two));
        let draws = resampled_differences(&one, &two, seed.fork(name));
        for (index, (label, p)) in QUANTILES.into_iter().enumerate() {
            let [a, b] = [&one, &two].map(|times| quantile_of(times.sorted.len(), p, |at| times.sorted[at].0));
            let mut differences: Vec<f64> = draws.iter().map(|draw| draw[index]).collect();
            differences.sort_by(f64::total_cmp);
            let tail = (1.0 - confidence) / 2.0;
            let interval = Interval { lower: quantile(&differences, tail), upper: quantile(&differences, 1.0 - tail) };
            rows.push(Latency { metric: format!("{label}_{name}"), first: a, second: b, difference: a - b, interval });
        }
    }
    rows
}

const QUANTILES: [(&str, f64); 4] = [("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)];

/// The times of the responses of each session: one line a response counts, its first.
fn times_by_session(side: &Side, time: Time) -> Vec<Vec<f64>> {
    let mut sessions: BTreeMap<(u32, u64), Vec<f64>> = BTreeMap::new();
    for call in side.calls.iter().filter(|call| call.call == 0 && !call.warmup) {
        if let Some(value) = time(call) {
            sessions.entry(session_of(call)).or_default().push(value);
        }
    }
    sessions.into_values().collect()
}

/// The times of all sessions.
struct Times {
    sessions: usize,
    /// In ascending order, each with the index of its session.
    sorted: Vec<(f64, usize)>,
}

impl Times {
    fn new(sessions: &[Vec<f64>]) -> Self {
        let times = sessions.iter().enumerate().flat_map(|(index, times)| times.iter().map(move |&time| (time, index)));
        let mut sorted: Vec<_> = times.collect();
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self { sessions: sessions.len(), sorted }
    }

    /// Quantiles of the times of as many sessions, drawn with replacement. What is sorted once stays sorted, however often
    /// each session was drawn.
    fn resample(&self, rng: &mut impl rand::Rng) -> [f64; QUANTILES.len()] {
        use rand::RngExt;

        let mut drawn = vec![0; self.sessions];
        for _ in 0..self.sessions {
            drawn[rng.random_range(0..self.sessions)] += 1;
        }
        let mut count = 0;
        let up_to = self.sorted.iter().map(|&(_, session)| {
            count += drawn[session];
            count
        });
        let up_to: Vec<usize> = up_to.collect();
        QUANTILES.map(|(_, p)| quantile_of(count, p, |at| self.sorted[up_to.partition_point(|&upto| upto <= at)].0))
    }
}

fn resampled_differences(one: &Times, two: &Times, seed: Seed) -> Vec<[f64; QUANTILES.len()]> {
    let mut rng = seed.rng();
    (0..RESAMPLES)
        .map(|_| {
            let (a, b) = (one.resample(&mut rng), two.resample(&mut rng));
            std::array::from_fn(|index| a[index] - b[index])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::position::tests::call;

    fn side(name: &str, corrupted: u64) -> Side {
        let calls = (0..80)
            .flat_map(|session| (0..4).map(move |round| call(session, round, session < corrupted && round == 3)));
        Side { name: name.into(), sessions: Counts::new(corrupted, 80), calls: calls.collect() }
    }

    #[test]
    fn a_difference_is_found_and_located() {
        let result = compare(&side("baseline", 12), &side("fixed", 0), 0.95, Seed(1));
        assert!((result.sessions.difference.unwrap() - 0.15).abs() < 1e-12);
        assert!(result.sessions.fisher_p < 0.001 && result.sessions.interval.lower > 0.05);
        let rounds = result.tables.iter().find(|table| table.by == "round").unwrap();
        assert_eq!(rounds.rows.iter().map(|row| row.first.events).collect::<Vec<_>>(), [0, 0, 0, 12]);
        assert!(rounds.rows[3].adjusted_p < 0.01 && rounds.rows[0].adjusted_p == 1.0);
        let classes = result.tables.iter().find(|table| table.by == "class").unwrap();
        assert_eq!((classes.rows[0].key.as_str(), classes.rows[0].first), ("args_truncated", Counts::new(12, 80)));
    }

    #[test]
    fn equal_sides_do_not_differ() {
        let result = compare(&side("a", 5), &side("b", 5), 0.95, Seed(1));
        assert_eq!(result.sessions.difference, Some(0.0));
        assert!(result.sessions.fisher_p > 0.99);
        assert!(result.latency.iter().all(|row| row.interval.contains(row.difference)), "{:?}", result.latency);
        assert_eq!(result.latency.len(), 8);
    }

    #[test]
    fn a_resample_has_the_quantiles_of_the_times_that_were_drawn() {
        use rand::RngExt;

        let mut rng = Seed(3).rng();
        let sessions: Vec<Vec<f64>> =
            (1..40).map(|session| (0..=session % 5).map(|_| f64::from(rng.random_range(0..90))).collect()).collect();
        let mut again = rng.clone();
        let quantiles = Times::new(&sessions).resample(&mut rng);
        let drawn = sessions.iter().flat_map(|_| &sessions[again.random_range(0..sessions.len())]);
        let mut pooled: Vec<f64> = drawn.copied().collect();
        pooled.sort_by(f64::total_cmp);
        assert_eq!(quantiles, QUANTILES.map(|(_, p)| quantile(&pooled, p)));
    }

    #[test]
    fn several_pairs_are_adjusted_together() {
        let mut pairs = [12, 10, 0].map(|corrupted| compare(&side("a", corrupted), &side("b", 2), 0.95, Seed(1)));
        let before = pairs[0].sessions.fisher_p;
        adjust(&mut pairs);
        assert!((pairs[0].sessions.adjusted_p - 3.0 * before).abs() < 1e-12);
    }
}
