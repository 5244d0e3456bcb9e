//! What a run will take, and what it can show.

use serde::Serialize;

use crate::{
    error::{Error, Result},
    report::summary::Summary,
    run,
    scenario::TargetKind,
    stats::{Counts, interval, power, sequential::Sprt},
};

/// Name and version of the plan's machine form.
pub const SCHEMA: &str = "toolstorm-plan/1";

/// Rates of the table: a race that shows at once, one that shows in a night, one that ships.
const RATES: [f64; 3] = [0.15, 0.01, 0.001];

/// Probability of seeing what is there, unless another is wanted.
pub const POWER: f64 = 0.95;

/// Bytes of a token: the built-in model reads bytes, of other models nobody has counted.
fn bytes_a_token(plan: &run::Plan) -> f64 {
    if plan.target.kind == TargetKind::Builtin { 1.0 } else { 4.0 }
}

/// What an estimate is made from beside the plan.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    /// A run of the same arms, for times.
    pub past: Option<&'a Summary>,
    /// Launches side by side.
    pub jobs: usize,
    /// Rates to tell about, beside the usual ones.
    pub rates: &'a [f64],
    /// Probability of seeing what is there.
    pub power: f64,
}

impl Default for Question<'_> {
    fn default() -> Self {
        Self { past: None, jobs: 1, rates: &[], power: POWER }
    }
}

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
    /// Prompt tokens: a byte each for the built-in model, else at four bytes a token.
    pub prompt_tokens: u64,
    /// Output tokens, counted alike.
    pub output_tokens: u64,
    /// Launches side by side.
    pub jobs: usize,
    /// Expected wall time from a past run or a probe; null without one.
    pub wall_s: Option<f64>,
    /// The largest bound that the gate lets pass, and the clean sessions an arm needs for it.
    pub max_upper: f64,
    /// See `max_upper`; null where the gate asks for no bound.
    pub sessions_for_max_upper: Option<u64>,
    /// Probability with which `power` sees what is there.
    pub power_level: f64,
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
    /// Expected wall time from a past run or a probe; null where it did not run this arm.
    pub wall_s: Option<f64>,
}

/// What a bug of one rate needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Need {
    /// Share of sessions that the bug corrupts.
    pub rate: f64,
    /// Sessions that show it at least once with the wanted probability.
    pub sessions_to_see: u64,
    /// Clean sessions that bound the rate below it.
    pub sessions_to_exclude: u64,
    /// Sessions in each of two arms to tell it from none, by Fisher's test with the wanted power.
    pub sessions_to_compare: u64,
    /// Expected sessions of a sequential test that decides between this rate and a tenth of it: when it is the tenth, and
    /// when it is this rate.
    pub sequential: [f64; 2],
    /// The probability that an arm of this plan shows it.
    pub seen_by_this_plan: f64,
    /// Expected wall time of `sessions_to_see` sessions of the slowest arm; null where no time is known.
    pub wall_s_to_see: Option<f64>,
}

/// Sessions, requests and bytes of one launch of an arm.
#[derive(Debug, Clone, Copy, Default)]
struct Work {
    requests: u64,
    prompt_bytes: u64,
    answer_bytes: u64,
}

/// Makes every session of `plan` and counts; times come from a past run of the same arms.
pub fn estimate(plan: &run::Plan, question: Question<'_>) -> Result<Estimate> {
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
            wall_s: question.past.and_then(|past| time_of(past, &arm.name, sessions)),
        });
    }
    let most = arms.iter().map(|arm| arm.sessions).max().unwrap_or(0);
    let slowest = arms.iter().filter_map(|arm| Some(arm.wall_s? / arm.sessions.max(1) as f64)).reduce(f64::max);
    let mut rates = [&RATES[..], question.rates].concat();
    rates.sort_by(|a, b| b.total_cmp(a));
    rates.dedup();
    let need = |rate: f64| {
        let need = need(rate, confidence, question.power, most, slowest);
        need.ok_or_else(|| {
            Error::usage(format!("a bug in {rate} of the sessions is none")).hint("a rate lies between 0 and 1")
        })
    };
    Ok(Estimate {
        schema: SCHEMA,
        name: plan.name.clone(),
        launches: arms.iter().map(|arm| u64::from(arm.launches)).sum(),
        sessions: arms.iter().map(|arm| arm.sessions).sum(),
        requests: total.requests,
        prompt_bytes: total.prompt_bytes,
        answer_bytes: total.answer_bytes,
        prompt_tokens: (total.prompt_bytes as f64 / bytes_a_token(plan)).round() as u64,
        output_tokens: (total.answer_bytes as f64 / bytes_a_token(plan)).round() as u64,
        jobs: question.jobs,
        wall_s: wall_s(&arms, question.jobs),
        max_upper: plan.gate.max_upper,
        sessions_for_max_upper: power::sessions_for_bound(plan.gate.max_upper, 0, confidence),
        power_level: question.power,
        power: rates.into_iter().map(need).collect::<Result<_>>()?,
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
            let forms = plan.scenario.parity.requests();
            work.requests += forms + u64::from(round.cancel_after.is_some());
            work.prompt_bytes += history * forms;
            work.answer_bytes += answer as u64 * forms;
            history += (answer + round.results.iter().map(String::len).sum::<usize>()) as u64;
        }
    }
    Ok(work)
}

/// The time of an arm for as many sessions, at the rate at which its sessions ended in the past run. Starting servers
/// is not in it.
fn time_of(past: &Summary, name: &str, sessions: u64) -> Option<f64> {
    let rate = past.arm(name)?.latency.get("achieved_rate").copied().filter(|&rate| rate > 0.0)?;
    Some(sessions as f64 / rate)
}

/// Of launches side by side, the longest one lasts at least as long as all of them shared out evenly.
fn wall_s(arms: &[Cell], jobs: usize) -> Option<f64> {
    let times: Vec<f64> = arms.iter().map(|arm| arm.wall_s).collect::<Option<_>>()?;
    let longest = arms.iter().zip(&times).map(|(arm, time)| time / f64::from(arm.launches.max(1))).fold(0.0, f64::max);
    Some((times.iter().sum::<f64>() / jobs.max(1) as f64).max(longest))
}

fn need(rate: f64, confidence: f64, wanted: f64, sessions: u64, seconds_each: Option<f64>) -> Option<Need> {
    let sprt = Sprt::new(rate / 10.0, rate, 1.0 - confidence, 1.0 - wanted)?;
    let sessions_to_see = power::sessions_to_see(rate, wanted)?;
    let (low, high) = sprt.expected_trials();
    Some(Need {
        rate,
        sessions_to_see,
        sessions_to_exclude: power::sessions_for_bound(rate, 0, confidence)?,
        sessions_to_compare: power::sessions_to_compare(rate, 0.0, 1.0 - confidence, wanted)?,
        sequential: [low, high],
        seen_by_this_plan: 1.0 - (1.0 - rate).powf(sessions as f64),
        wall_s_to_see: seconds_each.map(|seconds| seconds * sessions_to_see as f64),
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
        let estimate =
            estimate(&plan(&Overrides { sessions: Some(10), ..Overrides::default() }), Question::default()).unwrap();
        assert_eq!((estimate.arms.len(), estimate.sessions, estimate.launches), (2, 20, 2));
        assert!((60..=80).contains(&estimate.requests), "3 or 4 rounds a session: {}", estimate.requests);
        assert_eq!(estimate.requests, estimate.arms.iter().map(|arm| arm.requests).sum::<u64>());
        assert!(estimate.prompt_bytes > 20 * 1500 && estimate.answer_bytes > 20 * 2 * 60);
        assert_eq!(estimate.wall_s, None);
    }

    #[test]
    fn wanted_bounds_rates_and_power_are_answered() {
        let overrides = Overrides { sessions: Some(80), max_upper: Some(0.01), ..Overrides::default() };
        let question = Question { rates: &[0.05, 0.01], power: 0.8, ..Question::default() };
        let found = estimate(&plan(&overrides), question).unwrap();
        assert_eq!(found.sessions_for_max_upper, Some(299));
        assert_eq!(found.power.iter().map(|need| need.rate).collect::<Vec<_>>(), [0.15, 0.05, 0.01, 0.001]);
        assert_eq!(found.power[1].sessions_to_see, 32);
        let none = estimate(&plan(&overrides), Question { rates: &[1.5], ..Question::default() });
        assert!(none.unwrap_err().cure().is_some());
    }

    #[test]
    fn launches_side_by_side_take_as_long_as_the_longest_or_as_their_share() {
        let cell = |launches, wall_s| Cell {
            name: String::new(),
            launches,
            sessions: 80,
            concurrency: 64,
            requests: 400,
            bound_if_clean: 0.04,
            wall_s,
        };
        assert_eq!(wall_s(&[cell(1, Some(30.0)), cell(1, Some(10.0))], 1), Some(40.0));
        assert_eq!(wall_s(&[cell(1, Some(30.0)), cell(1, Some(10.0))], 2), Some(30.0));
        assert_eq!(wall_s(&[cell(3, Some(30.0)), cell(1, Some(10.0))], 2), Some(20.0));
        assert_eq!(wall_s(&[cell(1, Some(30.0)), cell(1, None)], 2), None);
    }

    #[test]
    fn the_table_has_the_published_numbers() {
        let estimate =
            estimate(&plan(&Overrides { sessions: Some(80), ..Overrides::default() }), Question::default()).unwrap();
        let column = |f: fn(&Need) -> u64| estimate.power.iter().map(f).collect::<Vec<_>>();
        assert_eq!(column(|need| need.sessions_to_see), [19, 299, 2995]);
        assert_eq!(column(|need| need.sessions_to_exclude), [19, 299, 2995]);
        assert!((estimate.arms[0].bound_if_clean - 0.0368).abs() < 1e-4);
        assert!(estimate.power[0].seen_by_this_plan > 0.999 && estimate.power[2].seen_by_this_plan < 0.1);
    }
}
