//! How often the search is wrong and what it spends, on simulated bugs, against delta debugging with majority votes.
//!
//! `cargo bench --bench bisect` prints the tables of docs/BISECT.md.

mod ddmin;

use std::{
    collections::BTreeMap,
    io::{Write, stdout},
};

use rand::{Rng, RngExt, seq::index::sample};
use rand_distr::{Distribution, StandardNormal};
use rand_pcg::Pcg64Mcg;
use toolstorm::{
    bisect::{Ending, Outcome, Plan, Probe, Search, Trial, run},
    error::Result,
    seed::Seed,
    stats::{Counts, interval},
};

const BUGS: u64 = 200;
const CONFIDENCE: f64 = 0.95;
const SESSIONS_PER_PROBE: u64 = 24;
const MAX_SESSIONS: u64 = 40_000;

/// Spread of the rate from one configuration to the next (of its logarithm).
const JITTER: f64 = 0.3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Single,
    Pair,
    Triple,
    /// A single culprit, and another toggle whose bad value makes it five times rarer.
    Damped,
    /// A single culprit that a second toggle hides unless a third one is bad too.
    Masked,
    /// Either of two toggles suffices.
    Either,
}

impl Kind {
    const ALL: [Self; 6] = [Self::Single, Self::Pair, Self::Triple, Self::Damped, Self::Masked, Self::Either];

    fn of(index: u64) -> Self {
        // As often as bugs are like that: half of them single.
        [Self::Single, Self::Pair, Self::Single, Self::Damped, Self::Single, Self::Triple, Self::Single, Self::Masked]
            [index as usize % 8]
            .or_either(index)
    }

    fn or_either(self, index: u64) -> Self {
        if index % 16 == 14 { Self::Either } else { self }
    }
}

/// A simulated bug.
struct Bug {
    kind: Kind,
    toggles: usize,
    rate: f64,
    parts: Vec<usize>,
    seed: Seed,
    draws: Pcg64Mcg,
    /// Times that somebody waited for probes, alone or side by side.
    waits: u64,
}

impl Bug {
    fn draw(index: u64) -> Self {
        let seed = Seed(20).index(index);
        let mut rng = seed.fork("bug").rng();
        let toggles = [6, 8, 12, 20][rng.random_range(0..4)];
        let parts = sample(&mut rng, toggles, 3).into_vec();
        let rate = 0.01 * 50_f64.powf(rng.random::<f64>());
        Self { kind: Kind::of(index), toggles, rate, parts, seed, draws: seed.fork("draws").rng(), waits: 0 }
    }

    fn rate(&self, bad: &[usize]) -> f64 {
        let has = |part: usize| bad.contains(&self.parts[part]);
        let (met, share) = match self.kind {
            Kind::Single => (has(0), 1.0),
            Kind::Pair => (has(0) && has(1), 1.0),
            Kind::Triple => (has(0) && has(1) && has(2), 1.0),
            Kind::Damped => (has(0), if has(1) { 0.2 } else { 1.0 }),
            Kind::Masked => (has(0) && (!has(1) || has(2)), 1.0),
            Kind::Either => (has(0) || has(1), 1.0),
        };
        if met { (self.rate * share * self.jitter(bad)).min(0.98) } else { 0.0 }
    }

    /// The factor of this configuration, the same whenever it is probed.
    fn jitter(&self, bad: &[usize]) -> f64 {
        let draw: f64 = StandardNormal.sample(&mut self.seed.fork(&format!("{bad:?}")).rng());
        (JITTER * draw).exp()
    }

    fn is_right(&self, culprit: &[usize]) -> bool {
        let sorted = |parts: &[usize]| {
            let mut parts = parts.to_vec();
            parts.sort_unstable();
            parts
        };
        match self.kind {
            Kind::Single | Kind::Damped | Kind::Masked => culprit == [self.parts[0]],
            Kind::Pair => culprit == sorted(&self.parts[..2]),
            Kind::Triple => culprit == sorted(&self.parts),
            Kind::Either => culprit == [self.parts[0]] || culprit == [self.parts[1]],
        }
    }
}

impl Trial for Bug {
    fn run(&mut self, probe: &Probe) -> Result<Outcome> {
        let rate = self.rate(&probe.bad);
        Ok(Outcome::Judged(Counts::new(successes(rate, probe.sessions, &mut self.draws), probe.sessions)))
    }

    fn run_all(&mut self, probes: &[Probe]) -> Result<Vec<Outcome>> {
        self.waits += 1;
        probes.iter().map(|probe| self.run(probe)).collect()
    }
}

fn successes(rate: f64, trials: u64, rng: &mut impl Rng) -> u64 {
    (0..trials).filter(|_| rng.random_bool(rate)).count() as u64
}

/// How one method fared.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    right: u64,
    wrong: u64,
    undecided: u64,
    sessions: u64,
}

impl Record {
    fn note(&mut self, right: Option<bool>, sessions: u64) {
        match right {
            Some(true) => self.right += 1,
            Some(false) => self.wrong += 1,
            None => self.undecided += 1,
        }
        self.sessions += sessions;
    }

    fn cells(self) -> String {
        let all = self.right + self.wrong + self.undecided;
        let Self { right, wrong, undecided, sessions } = self;
        format!("{right} | {wrong} | {undecided} | {}", sessions / all.max(1))
    }
}

fn search(bug: &mut Bug, jobs: usize, seed: Seed) -> (Option<bool>, u64) {
    let plan = Plan {
        toggles: bug.toggles,
        confidence: CONFIDENCE,
        max_sessions: MAX_SESSIONS,
        sessions_per_probe: SESSIONS_PER_PROBE,
        jobs,
        seed,
    };
    let Ok(answer) = run(&mut Search::new(plan), bug, |_, _, _| Ok(())) else { return (None, 0) };
    let decided = answer.ending == Ending::Found;
    (decided.then(|| bug.is_right(&answer.culprit)), answer.sessions)
}

fn band(rate: f64) -> &'static str {
    match rate {
        rate if rate < 0.03 => "1–3 %",
        rate if rate < 0.1 => "3–10 %",
        _ => "10–50 %",
    }
}

fn main() {
    let mut by_kind: BTreeMap<Kind, [Record; 2]> = BTreeMap::new();
    let mut by_band: BTreeMap<&str, [Record; 2]> = BTreeMap::new();
    let mut total = [Record::default(); 2];
    let mut paired = Record::default();
    let mut waits = [0; 2];
    for index in 0..BUGS {
        let mut bug = Bug::draw(index);
        let (right, spent) = search(&mut bug, 1, Seed(index));
        let mut beside = Bug::draw(index);
        let (beside_right, beside_spent) = search(&mut beside, 2, Seed(index));
        paired.note(beside_right, beside_spent);
        waits = [waits[0] + bug.waits, waits[1] + beside.waits];
        let mut again = Bug::draw(index);
        let (rival, rival_spent) = ddmin::ddmin(bug.toggles, &mut again, SESSIONS_PER_PROBE, MAX_SESSIONS);
        let rival = rival.map(|mut set| {
            set.sort_unstable();
            bug.is_right(&set)
        });
        for records in [by_kind.entry(bug.kind).or_default(), by_band.entry(band(bug.rate)).or_default(), &mut total] {
            records[0].note(right, spent);
            records[1].note(rival, rival_spent);
        }
    }
    print(&by_kind, &by_band, total);
    let [one, two] = waits.map(|waits| waits as f64 / BUGS as f64);
    let line = format!(
        "\ntwo probes side by side: {} (right, wrong, undecided, sessions); waits for probes {two:.1} against {one:.1}\n",
        paired.cells()
    );
    let _ = stdout().write_all(line.as_bytes());
}

fn print(by_kind: &BTreeMap<Kind, [Record; 2]>, by_band: &BTreeMap<&str, [Record; 2]>, total: [Record; 2]) {
    let mut text =
        String::from("| bugs | right | wrong | undecided | sessions | ddmin right | wrong | undecided | sessions |\n");
    text.push_str("|---|--:|--:|--:|--:|--:|--:|--:|--:|\n");
    let mut row = |name: &str, [ours, rival]: [Record; 2]| {
        text.push_str(&format!("| {name} | {} | {} |\n", ours.cells(), rival.cells()));
    };
    for kind in Kind::ALL {
        if let Some(&records) = by_kind.get(&kind) {
            row(&format!("{kind:?}").to_lowercase(), records);
        }
    }
    for (name, &records) in by_band {
        row(name, records);
    }
    row("all", total);
    let answered = Counts::new(total[0].wrong, total[0].right + total[0].wrong);
    let upper = interval::upper_bound(answered, 0.95) * 100.0;
    text.push_str(&format!(
        "\nwrong {} of {} answers, at most {upper:.1} % at 95 %\n",
        answered.events, answered.trials
    ));
    let _ = stdout().write_all(text.as_bytes());
}
