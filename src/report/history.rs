//! Past results in the order of their start: the trend of each arm, and whether it drifts.

use std::path::Path;

use serde::Serialize;

use super::{
    folder::Folder,
    load,
    plot::{self, Bar},
    summary::Summary,
    terminal::Console,
};
use crate::{
    error::{Error, Result},
    stats::{Counts, exact},
};

/// The p value below which an arm is said to drift.
const DRIFT: f64 = 0.01;

/// One past result.
#[derive(Debug, Clone, Serialize)]
pub struct Past {
    /// When it was started.
    pub created_at: String,
    /// Its summary.
    pub summary: Summary,
}

/// An arm over time.
#[derive(Debug, Clone, Serialize)]
pub struct Trend {
    /// The matrix or scenario.
    pub name: String,
    /// The arm.
    pub arm: String,
    /// The results that have it, oldest first.
    pub points: Vec<Point>,
    /// Exact p of the last result against all before it; null for a single one.
    pub p: Option<f64>,
    /// Whether that is small enough to be called a drift.
    pub drifts: bool,
}

/// An arm in one result.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// When the result was started.
    pub created_at: String,
    /// SHA-256 of its workload.
    pub workload_sha256: String,
    /// Judged sessions.
    pub sessions_judged: u64,
    /// Corrupted sessions.
    pub sessions_corrupted: u64,
    /// Bounds of the rate.
    pub interval: Option<[f64; 2]>,
}

/// All results under `dir`, oldest first, but for replays and with a warning for those that cannot be read.
pub fn read(dir: &Path, console: Console) -> Result<Vec<Past>> {
    let entries = std::fs::read_dir(dir).map_err(|error| Error::usage(format!("{}: {error}", dir.display())))?;
    let mut past = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        if path.join("manifest.json").is_file() && path.join("summary.json").is_file() {
            match one(&path) {
                Ok(found) => past.extend(found),
                Err(error) => console.warn(format!("{} is left out: {error}", path.display())),
            }
        }
    }
    past.sort_by(|a, b| a.created_at.cmp(&b.created_at));
    if past.is_empty() {
        return Err(Error::usage(format!("no finished result lies in {}", dir.display()))
            .hint("give the folder that holds result folders, for example results"));
    }
    Ok(past)
}

/// The result in `folder`; none where it is a replay, whose launch was chosen for its corruption.
fn one(folder: &Path) -> Result<Option<Past>> {
    let manifest = Folder::open(folder)?.manifest;
    let summary = load::summary(folder)?;
    Ok(manifest.replay_of.is_none().then_some(Past { created_at: manifest.created_at, summary }))
}

/// The trend of every arm that any result has.
pub fn trends(past: &[Past]) -> Vec<Trend> {
    let mut trends: Vec<Trend> = Vec::new();
    for result in past {
        for arm in &result.summary.arms {
            let point = Point {
                created_at: result.created_at.clone(),
                workload_sha256: result.summary.workload_sha256.clone(),
                sessions_judged: arm.sessions_judged,
                sessions_corrupted: arm.sessions_corrupted,
                interval: arm.session_corruption_rate_interval,
            };
            let name = &result.summary.name;
            match trends.iter_mut().find(|trend| trend.name == *name && trend.arm == arm.name) {
                Some(trend) => trend.points.push(point),
                None => trends.push(Trend {
                    name: name.clone(),
                    arm: arm.name.clone(),
                    points: vec![point],
                    p: None,
                    drifts: false,
                }),
            }
        }
    }
    for trend in &mut trends {
        trend.p = p_of_last(&trend.points);
        trend.drifts = trend.p.is_some_and(|p| p < DRIFT);
    }
    trends
}

/// Fisher's exact test of the last point against the sum of those before it.
fn p_of_last(points: &[Point]) -> Option<f64> {
    let (last, before) = points.split_last()?;
    let sum = |of: fn(&Point) -> u64| before.iter().map(of).sum::<u64>();
    let earlier = Counts::new(sum(|point| point.sessions_corrupted), sum(|point| point.sessions_judged));
    let now = Counts::new(last.sessions_corrupted, last.sessions_judged);
    (earlier.trials > 0 && now.trials > 0).then(|| exact::fisher(earlier, now))
}

impl Trend {
    /// Its drawing.
    pub fn plot(&self) -> String {
        let bar = |point: &Point| {
            let [low, high] = point.interval?;
            let middle = point.sessions_corrupted as f64 / point.sessions_judged as f64;
            Some(Bar {
                label: point.created_at.clone(),
                low: low * 100.0,
                middle: middle * 100.0,
                high: high * 100.0,
                alarming: false,
            })
        };
        plot::trend(&self.points.iter().filter_map(bar).collect::<Vec<_>>(), " %")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(corrupted: u64, judged: u64) -> Point {
        Point {
            created_at: String::new(),
            workload_sha256: String::new(),
            sessions_judged: judged,
            sessions_corrupted: corrupted,
            interval: None,
        }
    }

    #[test]
    fn a_sudden_rise_drifts_and_noise_does_not() {
        let p = |points: &[Point]| p_of_last(points).unwrap();
        assert!(p(&[point(0, 80), point(0, 80), point(12, 80)]) < DRIFT);
        assert!(p(&[point(11, 80), point(13, 80), point(14, 80)]) > DRIFT);
        assert_eq!(p_of_last(&[point(1, 80)]), None);
        assert_eq!(p_of_last(&[point(0, 0), point(1, 80)]), None);
    }
}
