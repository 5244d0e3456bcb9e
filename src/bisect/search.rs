//! The search: both ends first, then the most telling probes, then the answer against its complement.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Answer, Ending, MOST_TOGGLES, Outcome, Plan, Probe, Subset,
    choose::choose,
    posterior::{Posterior, bayes_factor},
};
use crate::stats::{Counts, exact, power};

/// Share of all sessions that may go into showing that the bad end fails.
const BAD_END_SHARE: u64 = 3;

/// The background rate of clean configurations before anything is seen: `EVENTS` of `TRIALS`.
const BACKGROUND_EVENTS: f64 = 0.05;
const BACKGROUND_TRIALS: f64 = 50.0;

/// Explanations whose best rival is this unlikely are worth confirming; the confirmation itself adds to it.
const CONFIRM_FROM: f64 = 0.5;

/// What to do next.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Run these, side by side if there are several, and record their outcomes. One can be enough: after each record the
    /// next step is worth asking for again.
    Probe(Vec<Probe>),
    /// Nothing more: this is the answer.
    Done(Answer),
}

/// A search in progress. Pure: [`Search::step`] depends on the plan and the recorded outcomes alone.
#[derive(Debug, Clone)]
pub struct Search {
    plan: Plan,
    /// What the search tells apart: single toggles, or groups of them while there are too many.
    groups: Vec<Vec<usize>>,
    posterior: Option<Posterior>,
    barred: BTreeSet<Subset>,
    /// Configurations that failed to start once, and [`Probe::known`] of the probe that did.
    suspects: BTreeMap<Subset, u64>,
    good: Counts,
    bad: Counts,
    sessions: u64,
    probes: u64,
    /// The probability that the groups chosen so far hold the culprit.
    certainty: f64,
    /// Toggles that a search over groups has excluded.
    excluded: Vec<usize>,
    end_skipped: bool,
}

impl Search {
    /// A search that has spent nothing yet.
    pub fn new(plan: Plan) -> Self {
        let groups = split(&(0..plan.toggles).collect::<Vec<_>>());
        Self {
            plan,
            groups,
            posterior: None,
            barred: BTreeSet::new(),
            suspects: BTreeMap::new(),
            good: Counts::default(),
            bad: Counts::default(),
            sessions: 0,
            probes: 0,
            certainty: 1.0,
            excluded: Vec::new(),
            end_skipped: false,
        }
    }

    /// Sessions spent so far.
    pub fn sessions(&self) -> u64 {
        self.sessions
    }

    /// The likeliest answer so far and its probability; `None` before both ends are verified.
    pub fn leader(&self) -> Option<(Vec<usize>, f64)> {
        let (set, probability) = self.posterior.as_ref()?.answers().into_iter().next()?;
        Some((self.members(set), probability * self.certainty))
    }

    /// Takes in what a probe showed.
    pub fn record(&mut self, probe: &Probe, outcome: &Outcome) {
        self.probes += 1;
        let set = self.subset(&probe.bad);
        // A neighbour's outcome may have led into other groups since the probe was chosen; these cannot express it.
        let outdated = self.members(set) != probe.bad;
        if let Outcome::Judged(counts) = outcome {
            self.sessions += counts.trials;
        }
        let counts = match outcome {
            _ if outdated => return,
            Outcome::Judged(counts) if counts.trials > 0 => *counts,
            Outcome::Judged(_) | Outcome::Skipped(_) => return self.skip(set, probe.known),
        };
        match &mut self.posterior {
            Some(posterior) => posterior.update(set, counts),
            None if set.is_empty() => self.good = self.good + counts,
            None => self.bad = self.bad + counts,
        }
        if self.posterior.is_none() && self.bad_end_fails() && self.good.trials >= self.good_end_sessions() {
            self.posterior = Some(self.seeded(self.bad));
        }
        self.descend();
    }

    /// What to do next.
    pub fn step(&self) -> Step {
        if self.end_skipped {
            return self.done(Ending::EndSkipped);
        }
        let Some(posterior) = &self.posterior else { return self.verify_ends() };
        if self.good_end_fails() {
            return self.done(Ending::GoodIsCorrupt);
        }
        let (leader, probability) = posterior.answers()[0];
        if probability >= self.wanted() {
            let missing = self.confirmation(posterior, leader);
            return if missing.is_empty() { self.done(Ending::Found) } else { self.affordable(missing) };
        }
        let seed = self.plan.seed.fork("probe").index(self.probes);
        let choices = choose(posterior, self.plan.sessions_per_probe, self.plan.jobs, &self.barred, seed);
        self.affordable(choices.into_iter().map(|choice| self.probe(choice.bad, choice.sessions)).collect())
    }

    fn verify_ends(&self) -> Step {
        let smallest = self.plan.sessions_per_probe;
        let full = Subset::full(self.groups.len());
        if !self.bad_end_fails() {
            let allowance = self.plan.max_sessions / BAD_END_SHARE;
            let rest = allowance.saturating_sub(self.bad.trials);
            if rest == 0 {
                return self.done(Ending::BadIsClean);
            }
            let sessions = self.bad.trials.max(smallest).min(rest.max(smallest));
            let mut probes = vec![self.probe(full, sessions)];
            if self.good.trials == 0 {
                probes.push(self.probe(Subset::default(), smallest));
            }
            return self.affordable(probes);
        }
        if self.good_end_fails() {
            return self.done(Ending::GoodIsCorrupt);
        }
        let missing = self.good_end_sessions().saturating_sub(self.good.trials).max(smallest);
        self.affordable(vec![self.probe(Subset::default(), missing)])
    }

    /// Whether the bad end failed too often for the background.
    fn bad_end_fails(&self) -> bool {
        self.bad.events > 0
            && bayes_factor(background(Counts::default()), self.bad) >= 1.0 / (1.0 - self.plan.confidence)
    }

    /// Sessions in which the good end, were it as bad as the bad one, would have shown a failure.
    fn good_end_sessions(&self) -> u64 {
        let rate = self.bad.rate().unwrap_or(1.0);
        power::sessions_to_see(rate, self.plan.confidence).unwrap_or(1).max(self.plan.sessions_per_probe)
    }

    /// Whether the good end fails, and not clearly less than the bad one.
    fn good_end_fails(&self) -> bool {
        self.good.events > 0 && exact::fisher(self.good, self.bad) > 1.0 - self.plan.confidence
    }

    /// The probability that this search over groups must reach, so that all of them together keep the plan's.
    fn wanted(&self) -> f64 {
        let mut rounds = 1.0;
        let mut largest = self.groups.iter().map(Vec::len).max().unwrap_or(1);
        while largest > 1 {
            // Up to three groups are split again over all places.
            largest = (3 * largest).div_ceil(MOST_TOGGLES);
            rounds += 1.0;
        }
        (self.plan.confidence / self.certainty).powf(1.0 / rounds).min(1.0 - 1e-6)
    }

    /// The probes that are missing before `leader` counts as confirmed.
    fn confirmation(&self, posterior: &Posterior, leader: Subset) -> Vec<Probe> {
        let full = Subset::full(self.groups.len());
        let alone = posterior.seen(leader);
        let complement = full.without(leader);
        let against = posterior.seen(complement);
        let mut probes = Vec::new();
        if alone.events == 0 && !self.barred.contains(&leader) {
            probes.push(self.probe(leader, alone.trials.max(self.plan.sessions_per_probe)));
        }
        // A second cause would show in the complement, about as often as the first one does alone.
        let rate = alone.rate().filter(|&rate| rate > 0.0).unwrap_or_else(|| posterior.rate());
        let needed = power::sessions_to_see(rate.min(0.999), self.plan.confidence).unwrap_or(1);
        let missing = needed.saturating_sub(against.trials);
        let settled = missing == 0 || against.events > 0 || complement.is_empty() || self.barred.contains(&complement);
        if !settled {
            probes.push(self.probe(complement, missing.max(self.plan.sessions_per_probe)));
        }
        probes
    }

    /// As many of `probes` as run side by side and leave the budget whole. A lone probe that is large enough is split
    /// into launches: launches differ, so two halves also say more than one whole. What failed to start is tried whole.
    fn affordable(&self, mut probes: Vec<Probe>) -> Step {
        probes.truncate(self.plan.jobs.max(1));
        let left = self.plan.max_sessions.saturating_sub(self.sessions);
        while probes.iter().map(|probe| probe.sessions).sum::<u64>() > left {
            probes.pop();
        }
        let smallest = self.plan.sessions_per_probe;
        if let [whole] = probes.as_slice()
            && !self.suspects.contains_key(&self.subset(&whole.bad))
        {
            let parts = (whole.sessions / smallest).clamp(1, self.plan.jobs.max(1) as u64);
            let part = |index| Probe { sessions: (whole.sessions + index) / parts, ..whole.clone() };
            probes = (0..parts).map(part).collect();
        }
        if probes.is_empty() { self.done(Ending::Undecided) } else { Step::Probe(probes) }
    }

    /// A machine may be busy once; what fails to start in two steps is not asked a third time.
    fn skip(&mut self, set: Subset, known: u64) {
        if *self.suspects.entry(set).or_insert(known) == known {
            return;
        }
        if self.posterior.is_none() {
            self.end_skipped = true;
        }
        self.barred.insert(set);
    }

    /// A confirmed answer made of groups starts the search again inside them.
    fn descend(&mut self) {
        let Some(posterior) = &self.posterior else { return };
        let (leader, probability) = posterior.answers()[0];
        let grouped = leader.members().any(|index| self.groups[index].len() > 1);
        if !grouped || probability < self.wanted() || !self.confirmation(posterior, leader).is_empty() {
            return;
        }
        let seen = posterior.seen(leader);
        let (inside, outside): (Vec<usize>, Vec<usize>) = (0..self.groups.len()).partition(|&index| leader.has(index));
        self.certainty *= probability;
        self.excluded.extend(outside.iter().flat_map(|&index| self.groups[index].iter().copied()));
        self.groups = split(&inside.iter().flat_map(|&index| self.groups[index].iter().copied()).collect::<Vec<_>>());
        self.barred.clear();
        self.suspects.clear();
        self.posterior = Some(self.seeded(seen));
    }

    fn seeded(&self, bad: Counts) -> Posterior {
        let mut posterior = Posterior::new(self.groups.len(), background(self.good));
        posterior.update(Subset::full(self.groups.len()), bad);
        posterior
    }

    fn done(&self, ending: Ending) -> Step {
        let mut answer = Answer {
            ending,
            culprit: Vec::new(),
            posterior: 0.0,
            alternatives: Vec::new(),
            inclusion: vec![0.0; self.plan.toggles],
            irrelevant: self.excluded.clone(),
            sessions: self.sessions,
            alone: Counts::default(),
            complement: Counts::default(),
            good: self.good,
            bad: self.bad,
        };
        if let Some(posterior) = &self.posterior {
            self.describe(posterior, &mut answer);
        }
        Step::Done(answer)
    }

    fn describe(&self, posterior: &Posterior, answer: &mut Answer) {
        let answers = posterior.answers();
        let (leader, probability) = answers[0];
        answer.culprit = self.members(leader);
        answer.posterior = probability * self.certainty;
        let rivals = answers.iter().skip(1).filter(|(_, probability)| *probability >= CONFIRM_FROM);
        answer.alternatives = rivals.map(|&(set, _)| self.members(set)).collect();
        answer.alone = posterior.seen(leader);
        answer.complement = posterior.seen(Subset::full(self.groups.len()).without(leader));
        for (group, probability) in self.groups.iter().zip(posterior.inclusion()) {
            for &toggle in group {
                answer.inclusion[toggle] = probability;
            }
            if probability <= 1.0 - self.plan.confidence {
                answer.irrelevant.extend(group);
            }
        }
        answer.irrelevant.sort_unstable();
    }

    fn probe(&self, set: Subset, sessions: u64) -> Probe {
        Probe { bad: self.members(set), sessions, known: self.probes }
    }

    fn members(&self, set: Subset) -> Vec<usize> {
        let mut members: Vec<usize> = set.members().flat_map(|index| self.groups[index].iter().copied()).collect();
        members.sort_unstable();
        members
    }

    fn subset(&self, toggles: &[usize]) -> Subset {
        let holds = |group: &Vec<usize>| group.iter().all(|toggle| toggles.contains(toggle));
        let places = self.groups.iter().enumerate().filter(|(_, group)| holds(group));
        places.fold(Subset::default(), |set, (index, _)| set.flip(index))
    }
}

/// The background rate, from what the good end showed.
fn background(good: Counts) -> f64 {
    (good.events as f64 + BACKGROUND_EVENTS) / (good.trials as f64 + BACKGROUND_TRIALS)
}

/// At most [`MOST_TOGGLES`] groups of about equal size.
fn split(toggles: &[usize]) -> Vec<Vec<usize>> {
    let places = toggles.len().min(MOST_TOGGLES);
    let mut groups = vec![Vec::new(); places];
    for (position, &toggle) in toggles.iter().enumerate() {
        groups[position * places / toggles.len()].push(toggle);
    }
    groups
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::{
        bisect::{Trial, run},
        error::Result,
        seed::Seed,
    };

    /// A server whose rate is a function of its toggles.
    struct Simulated<F>(F, rand_pcg::Pcg64Mcg);

    impl<F: Fn(&[usize]) -> f64> Trial for Simulated<F> {
        fn run(&mut self, probe: &Probe) -> Result<Outcome> {
            let rate = (self.0)(&probe.bad);
            if rate < 0.0 {
                return Ok(Outcome::Skipped("did not start".into()));
            }
            let events = (0..probe.sessions).filter(|_| self.1.random_bool(rate)).count() as u64;
            Ok(Outcome::Judged(Counts::new(events, probe.sessions)))
        }
    }

    fn plan(toggles: usize, max_sessions: u64) -> Plan {
        Plan { toggles, confidence: 0.95, max_sessions, sessions_per_probe: 24, jobs: 1, seed: Seed(3) }
    }

    fn find(toggles: usize, rate: impl Fn(&[usize]) -> f64) -> Answer {
        let mut search = Search::new(plan(toggles, 6000));
        run(&mut search, &mut Simulated(rate, Seed(7).rng()), |_, _, _| Ok(())).unwrap()
    }

    fn all(bad: &[usize], of: &[usize]) -> bool {
        of.iter().all(|toggle| bad.contains(toggle))
    }

    #[test]
    fn a_single_culprit_is_found_and_the_rest_is_irrelevant() {
        let answer = find(8, |bad| if all(bad, &[5]) { 0.15 } else { 0.0 });
        assert_eq!((answer.ending, answer.culprit.as_slice()), (Ending::Found, &[5][..]));
        assert!(answer.posterior >= 0.95 && answer.alone.events > 0 && answer.complement.events == 0);
        assert_eq!(answer.irrelevant, [0, 1, 2, 3, 4, 6, 7]);
    }

    #[test]
    fn an_interaction_is_found() {
        let answer = find(8, |bad| if all(bad, &[1, 6]) { 0.2 } else { 0.0 });
        assert_eq!((answer.ending, answer.culprit.as_slice()), (Ending::Found, &[1, 6][..]));
    }

    #[test]
    fn two_sufficient_causes_are_both_named() {
        let answer = find(6, |bad| if bad.contains(&1) || bad.contains(&4) { 0.3 } else { 0.0 });
        assert_eq!(answer.ending, Ending::Found);
        let mut both = answer.alternatives.clone();
        both.push(answer.culprit);
        both.sort();
        assert_eq!(both, [[1], [4]]);
    }

    #[test]
    fn a_failed_launch_is_no_evidence() {
        let rate = |bad: &[usize]| match () {
            () if bad.len() % 3 == 2 => -1.0,
            () if all(bad, &[2]) => 0.25,
            () => 0.0,
        };
        let answer = find(7, rate);
        assert_eq!((answer.ending, answer.culprit.as_slice()), (Ending::Found, &[2][..]));
    }

    #[test]
    fn many_toggles_are_searched_in_groups() {
        let answer = find(130, |bad| if all(bad, &[11, 97]) { 0.3 } else { 0.0 });
        assert_eq!((answer.ending, answer.culprit.as_slice()), (Ending::Found, &[11, 97][..]));
        assert!(answer.posterior >= 0.95);
        assert_eq!(answer.irrelevant.len(), 128);
    }

    #[test]
    fn ends_that_do_not_differ_are_no_search() {
        assert_eq!(find(8, |_| 0.0).ending, Ending::BadIsClean);
        assert_eq!(find(8, |_| 0.2).ending, Ending::GoodIsCorrupt);
        assert_eq!(find(8, |_| -1.0).ending, Ending::EndSkipped);
    }

    #[test]
    fn probes_side_by_side_find_the_same() {
        let rate = |bad: &[usize]| if all(bad, &[1, 6]) { 0.2 } else { 0.0 };
        let mut search = Search::new(Plan { jobs: 2, ..plan(8, 6000) });
        let Step::Probe(ends) = search.step() else { panic!("no probe") };
        assert_eq!(ends.iter().map(|probe| probe.bad.len()).collect::<Vec<_>>(), [8, 0]);
        let mut rounds = 0;
        let mut trial = Simulated(rate, Seed(7).rng());
        let answer = loop {
            match search.step() {
                Step::Done(answer) => break answer,
                Step::Probe(probes) => {
                    assert!((1..=2).contains(&probes.len()));
                    rounds += 1;
                    for (probe, outcome) in probes.iter().zip(trial.run_all(&probes).unwrap()) {
                        search.record(probe, &outcome);
                    }
                }
            }
        };
        assert_eq!((answer.ending, answer.culprit.as_slice()), (Ending::Found, &[1, 6][..]));
        assert!(rounds < search.probes, "{rounds} steps for {} probes", search.probes);
    }

    #[test]
    fn a_lone_large_probe_is_split_into_launches() {
        let search = Search::new(Plan { jobs: 2, ..plan(8, 6000) });
        let sizes = |sessions| match search.affordable(vec![Probe { bad: vec![0], sessions, known: 0 }]) {
            Step::Probe(probes) => probes.iter().map(|probe| probe.sessions).collect::<Vec<_>>(),
            Step::Done(_) => Vec::new(),
        };
        assert_eq!([sizes(24), sizes(47), sizes(49), sizes(96)], [vec![24], vec![47], vec![24, 25], vec![48, 48]]);
        assert_eq!(sizes(7000), Vec::<u64>::new());
    }

    #[test]
    fn halves_of_one_probe_that_do_not_start_count_once() {
        let mut search = Search::new(Plan { jobs: 2, ..plan(8, 6000) });
        let set = search.subset(&[0]);
        let halves = search.affordable(vec![search.probe(set, 48)]);
        let Step::Probe(halves) = halves else { panic!("no probe") };
        assert_eq!(halves.len(), 2);
        let skipped = Outcome::Skipped("did not start".into());
        for half in &halves {
            search.record(half, &skipped);
        }
        assert!(search.barred.is_empty());
        let whole = search.probe(set, 48);
        assert_eq!(search.affordable(vec![whole.clone()]), Step::Probe(vec![whole.clone()]));
        search.record(&whole, &skipped);
        assert!(search.barred.contains(&set));
    }

    #[test]
    fn a_probe_of_groups_that_are_gone_only_costs() {
        let mut search = Search::new(plan(40, 6000));
        let set = Subset::one(0).flip(3);
        let (probe, inside) = (search.probe(set, 24), search.probe(Subset::one(0), 24));
        search.excluded = search.groups.split_off(3).concat();
        search.groups = split(&search.groups.concat());
        let before = (search.bad, search.suspects.clone());
        search.record(&probe, &Outcome::Judged(Counts::new(24, 24)));
        search.record(&probe, &Outcome::Skipped("did not start".into()));
        assert_eq!((search.bad, search.suspects.clone(), search.sessions), (before.0, before.1, 24));
        search.record(&inside, &Outcome::Judged(Counts::new(1, 24)));
        assert_eq!((search.bad, search.sessions), (Counts::new(1, 24), 48));
    }

    #[test]
    fn a_search_resumes_where_its_outcomes_end() {
        let rate = |bad: &[usize]| if all(bad, &[3]) { 0.15 } else { 0.0 };
        let mut log = Vec::new();
        let mut search = Search::new(plan(6, 3000));
        let answer = run(&mut search, &mut Simulated(rate, Seed(1).rng()), |_, probe, outcome| {
            log.push((probe.clone(), outcome.clone()));
            Ok(())
        });
        assert!(log.len() > 3);
        let mut again = Search::new(plan(6, 3000));
        for (probe, outcome) in &log {
            assert_eq!(again.step(), Step::Probe(vec![probe.clone()]));
            again.record(probe, outcome);
        }
        assert_eq!(again.step(), Step::Done(answer.unwrap()));
    }
}
