//! What a run will take, and what it can show.

use serde::Serialize;

use crate::{
    error::{Error, Result},
    report::summary::Summary,
    run,
    stats::{Counts, interval, power, sequential::Sprt},
};

/// Name and version of the plan's machine form.
pub const SCHEMA: &str = "toolstorm-plan/1";

/// Rates of the table: a race that shows at once, one that shows in a night, one that ships.
const RATES: [f64; 3] = [0.15, 0.01, 0.001];

/// Probability of seeing what is there.
const POWER: f64 = 0.95;

/// Bytes of a token where nobody has counted.
const BYTES_A_TOKEN: f64 = 4.0;

/// What a run will take.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Estimate {
    /// [`SCHEMA`].
    pub schema: &'static str,
    /// The matrix's name.
    pub name: String,
    /// Server launches.
    pub launches: u64,
    /// The arms.
    pub arms: Vec<Cell>,
    /// Sessions of all arms.
    pub sessions: u64,
    /// Requests of all arms.
    pub requests: u64,
    /// Prompt bytes of all arms; a resent history counts each time.
    pub prompt_bytes: u64,
    /// Bytes of the dictated answers.
    pub answer_bytes: u64,
    /// Output tokens: by the past run's ratio, else at four bytes a token.
    pub output_tokens: u64,
    /// Expected wall time from a past run; null without one.
    pub wall_s: Option<f64>,
    /// What bugs of some rates need.
    pub power: Vec<Need>,
}

/// One arm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cell {
    /// Its name.
    pub name: String,
    /// Launches of its server.
    pub launches: u32,
    /// Sessions over all launches.
    pub sessions: u64,
    /// Sessions in flight at once.
    pub concurrency: u32,
    /// Requests over all launches.
    pub requests: u64,
    /// The bound that a clean arm will show.
    pub bound_if_clean: f64,
    /// Expected wall time from a past run; null where it did not run this arm.
    pub wall_s: Option<f64>,
}

/// What a bug of one rate needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Need {
    /// Share of sessions that the bug corrupts.
    pub rate: f64,
    /// Sessions that show it at least once with probability 95 %.
    pub sessions_to_see: u64,
    /// Clean sessions that bound the rate below it.
    pub sessions_to_exclude: u64,
    /// Sessions in each of two arms to tell it from none, by Fisher's test with power 95 %.
    pub sessions_to_compare: u64,
    /// Expected sessions of a sequential test that decides between this rate and a tenth of it: when it is the tenth, and
    /// when it is this rate.
    pub sequential: [f64; 2],
    /// The probability that an arm of this plan shows it.
    pub seen_by_this_plan: f64,
}

/// Sessions, requests and bytes of one launch of an arm.
#[derive(Debug, Clone, Copy, Default)]
struct Work {
    requests: u64,
    prompt_bytes: u64,
    answer_bytes: u64,
}

/// Makes every session of `plan` and counts; times come from a `past` run of the same arms.
pub fn estimate(plan: &run::Plan, past: Option<&Summary>) -> Result<Estimate> {
    if plan.load.duration.is_some() {
        return Err(Error::usage("a plan by --duration has no number of sessions").hint("give --sessions instead"));
    }
    let confidence = plan.gate.confidence;
    let mut total = Work::default();
    let mut arms = Vec::new();
    for arm in &plan.arms {
        let numbers = plan.sessions(arm);
        let work = work(plan, &numbers)?;
        let launches = u64::from(arm.repetitions);
        total.requests += work.requests * launches;
        total.prompt_bytes += work.prompt_bytes * launches;
        total.answer_bytes += work.answer_bytes * launches;
        let sessions = numbers.len() as u64 * launches;
        arms.push(Cell {
            name: arm.name.clone(),
            launches: arm.repetitions,
            sessions,
            concurrency: arm.concurrency,
            requests: work.requests * launches,
            bound_if_clean: interval::upper_bound(Counts::new(0, sessions), confidence),
            wall_s: past.and_then(|past| time_of(past, &arm.name, sessions)),
        });
    }
    let most = arms.iter().map(|arm| arm.sessions).max().unwrap_or(0);
    let times: Option<Vec<f64>> = arms.iter().map(|arm| arm.wall_s).collect();
    Ok(Estimate {
        schema: SCHEMA,
        name: plan.name.clone(),
        launches: arms.iter().map(|arm| u64::from(arm.launches)).sum(),
        sessions: arms.iter().map(|arm| arm.sessions).sum(),
        requests: total.requests,
        prompt_bytes: total.prompt_bytes,
        answer_bytes: total.answer_bytes,
        output_tokens: (total.answer_bytes as f64 / BYTES_A_TOKEN).round() as u64,
        wall_s: times.map(|times| times.iter().sum()),
        power: RATES.iter().filter_map(|&rate| need(rate, confidence, most)).collect(),
        arms,
    })
}

/// Counts one launch. Later requests resend what came before.
fn work(plan: &run::Plan, numbers: &[u64]) -> Result<Work> {
    let mut work = Work::default();
    for &number in numbers {
        let session = plan.scenario.session(plan.workload_seed(), number)?;
        let tools: usize = session.tools.iter().map(|tool| tool.to_string().len()).sum();
        let mut history = (session.system.len() + tools) as u64;
        for round in &session.rounds {
            let answer: usize = round.calls.iter().map(|call| call.text.len()).sum();
            history += round.user.len() as u64;
            work.requests += 1 + u64::from(round.cancel_after.is_some());
            work.prompt_bytes += history;
            work.answer_bytes += answer as u64;
            history += (answer + round.results.iter().map(String::len).sum::<usize>()) as u64;
        }
    }
    Ok(work)
}

/// The past run's time of an arm, for as many sessions: every arm's share of the wall time goes by its sessions.
fn time_of(past: &Summary, name: &str, sessions: u64) -> Option<f64> {
    let arm = past.arm(name)?;
    let all: u64 = past.arms.iter().map(|arm| arm.sessions_started).sum();
    (arm.sessions_started > 0 && past.wall_s > 0.0).then(|| past.wall_s / all as f64 * sessions as f64)
}

fn need(rate: f64, confidence: f64, sessions: u64) -> Option<Need> {
    let sprt = Sprt::new(rate / 10.0, rate, 1.0 - confidence, 1.0 - POWER)?;
    let (low, high) = sprt.expected_trials();
    Some(Need {
        rate,
        sessions_to_see: power::sessions_to_see(rate, POWER)?,
        sessions_to_exclude: power::sessions_for_bound(rate, 0, confidence)?,
        sessions_to_compare: power::sessions_to_compare(rate, 0.0, 1.0 - confidence, POWER)?,
        sequential: [low, high],
        seen_by_this_plan: 1.0 - (1.0 - rate).powf(sessions as f64),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        run::{Overrides, resolve},
        scenario::file,
    };

    fn plan(overrides: &Overrides) -> run::Plan {
        let (matrix, scenario) = file::matrix("quick").unwrap();
        resolve(matrix, scenario, overrides).unwrap()
    }

    #[test]
    fn every_session_is_counted_once_for_every_launch() {
        let estimate = estimate(&plan(&Overrides { sessions: Some(10), ..Overrides::default() }), None).unwrap();
        assert_eq!((estimate.arms.len(), estimate.sessions, estimate.launches), (2, 20, 2));
        assert!((60..=80).contains(&estimate.requests), "3 or 4 rounds a session: {}", estimate.requests);
        assert_eq!(estimate.requests, estimate.arms.iter().map(|arm| arm.requests).sum::<u64>());
        assert!(estimate.prompt_bytes > 20 * 1500 && estimate.answer_bytes > 20 * 2 * 60);
        assert_eq!(estimate.wall_s, None);
    }

    #[test]
    fn the_table_has_the_published_numbers() {
        let estimate = estimate(&plan(&Overrides { sessions: Some(80), ..Overrides::default() }), None).unwrap();
        let column = |f: fn(&Need) -> u64| estimate.power.iter().map(f).collect::<Vec<_>>();
        assert_eq!(column(|need| need.sessions_to_see), [19, 299, 2995]);
        assert_eq!(column(|need| need.sessions_to_exclude), [19, 299, 2995]);
        assert!((estimate.arms[0].bound_if_clean - 0.0368).abs() < 1e-4);
        assert!(estimate.power[0].seen_by_this_plan > 0.999 && estimate.power[2].seen_by_this_plan < 0.1);
    }
}
