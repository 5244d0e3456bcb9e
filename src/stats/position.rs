//! Rates against position: where in a session, a launch or an output corruption sits.

use std::collections::BTreeMap;

use super::{Counts, Interval, cluster::Clustering, interval};

/// One judged call at a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observation {
    /// Where: a round, a bin of output lengths, a concurrency.
    pub position: u64,
    /// The session it belongs to.
    pub session: u64,
    /// Whether it was corrupted.
    pub corrupted: bool,
}

/// The rate at one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// The position.
    pub position: u64,
    /// Sessions that were observed there.
    pub sessions: u64,
    /// Corrupted observations of all there.
    pub counts: Counts,
    /// Bounds that allow for the correlation inside a session (Korn and Graubard).
    pub interval: Interval,
}

/// One row a position, in order. Nothing is assumed of the shape: a rate may rise and fall again.
pub fn rates(observations: impl IntoIterator<Item = Observation>, confidence: f64) -> Vec<Row> {
    let mut cells: BTreeMap<u64, BTreeMap<u64, Counts>> = BTreeMap::new();
    for Observation { position, session, corrupted } in observations {
        let cell = cells.entry(position).or_default().entry(session).or_default();
        *cell = *cell + Counts::new(u64::from(corrupted), 1);
    }
    let row = |(position, sessions): (u64, BTreeMap<u64, Counts>)| {
        let clusters: Vec<Counts> = sessions.into_values().collect();
        let clustering = Clustering::of(&clusters);
        // Without variation the correlation is unknown, so each session counts once.
        let interval = if clustering.correlation.is_some() {
            clustering.interval(confidence)
        } else {
            let hit = clusters.iter().filter(|cluster| cluster.events > 0).count() as u64;
            interval::clopper_pearson(Counts::new(hit, clusters.len() as u64), confidence)
        };
        Row { position, sessions: clusters.len() as u64, counts: clustering.total, interval }
    };
    cells.into_iter().map(row).collect()
}

/// The smallest power of two that is at least `value`: a bin for lengths and indices; 0 stays 0.
pub fn bin(value: u64) -> u64 {
    if value == 0 { 0 } else { value.checked_next_power_of_two().unwrap_or(u64::MAX) }
}

/// The next multiple of an eighth of the next power of two: a finer bin, for lengths that lie close together.
pub fn fine_bin(value: u64) -> u64 {
    value.next_multiple_of(fine_width(value))
}

/// How many values share the fine bin of `value`.
pub fn fine_width(value: u64) -> u64 {
    (bin(value) / 8).max(1)
}

/// One session's course: rounds judged, and the first corrupted one (from zero).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Course {
    /// Rounds that were judged, up to and including the first corrupted one.
    pub rounds: u64,
    /// The first corrupted round, if any.
    pub corrupted: Option<u64>,
}

/// The hazard of a round, and the share of sessions still clean after it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hazard {
    /// The round, from zero.
    pub round: u64,
    /// First corruptions among the sessions that reached this round clean.
    pub counts: Counts,
    /// Exact bounds of the hazard.
    pub interval: Interval,
    /// The Kaplan-Meier estimate of the share still clean after this round.
    pub surviving: f64,
}

/// First corruption against round, with sessions censored where they end clean. Kaplan and Meier (1958), JASA 53:457.
pub fn hazard(sessions: &[Course], confidence: f64) -> Vec<Hazard> {
    let last = sessions.iter().map(|session| session.rounds).max().unwrap_or(0);
    let mut surviving = 1.0;
    (0..last)
        .map(|round| {
            let at_risk =
                sessions.iter().filter(|s| s.rounds > round && s.corrupted.is_none_or(|first| first >= round));
            let (events, trials) = at_risk.fold((0, 0), |(e, n), s| (e + u64::from(s.corrupted == Some(round)), n + 1));
            let counts = Counts::new(events, trials);
            surviving *= 1.0 - counts.rate().unwrap_or_default();
            Hazard { round, counts, interval: interval::clopper_pearson(counts, confidence), surviving }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn correlated_calls_widen_the_bounds() {
        let calls = |sessions: u64, each: u64| {
            (0..sessions).flat_map(move |session| {
                (0..each).map(move |_| Observation { position: 0, session, corrupted: session % 4 == 0 })
            })
        };
        let clustered = rates(calls(20, 10), 0.95)[0];
        let independent = interval::clopper_pearson(Counts::new(50, 200), 0.95);
        assert_eq!(clustered.counts, Counts::new(50, 200));
        assert!(clustered.interval.upper > independent.upper && clustered.interval.lower < independent.lower);
    }

    #[test]
    fn clean_positions_are_bounded_by_sessions_and_not_by_calls() {
        let calls = (0..100).map(|i| Observation { position: 3, session: i % 10, corrupted: false });
        let row = rates(calls, 0.9)[0];
        assert!((row.interval.upper - interval::upper_bound(Counts::new(0, 10), 0.95)).abs() < 1e-12);
    }

    #[test]
    fn hazards_censor_and_survive() {
        let sessions = [
            Course { rounds: 3, corrupted: None },
            Course { rounds: 1, corrupted: Some(0) },
            Course { rounds: 2, corrupted: Some(1) },
            Course { rounds: 1, corrupted: None },
        ];
        let rows = hazard(&sessions, 0.95);
        assert_eq!(
            rows.iter().map(|row| row.counts).collect::<Vec<_>>(),
            [Counts::new(1, 4), Counts::new(1, 2), Counts::new(0, 1)]
        );
        assert!((rows[2].surviving - 0.375).abs() < 1e-12);
    }

    #[test]
    fn bins_are_powers_of_two() {
        assert_eq!([0, 1, 2, 3, 8, 9].map(bin), [0, 1, 2, 4, 8, 16]);
        assert_eq!([0, 1, 7, 8, 9, 65, 80, 81, 128, 129].map(fine_bin), [0, 1, 7, 8, 10, 80, 80, 96, 128, 160]);
        assert!((0..2000).all(|value| fine_width(value) == fine_width(fine_bin(value))));
    }
}
