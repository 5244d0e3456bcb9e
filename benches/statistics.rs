//! Coverage of the intervals and size of the tests by simulation, against what they promise.
//!
//! `cargo bench --bench statistics` prints the tables of docs/STATISTICS.md. 10^5 draws a figure; a simulated figure
//! is good to about ±0.1 points.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{Write as _, stdout},
};

use rand::{Rng, RngExt};
use rand_distr::{Beta, Binomial, Distribution};
use toolstorm::{
    seed::Seed,
    stats::{
        Counts, Interval,
        cluster::{Clustering, bootstrap},
        exact, interval,
        sequential::{Decision, Sprt, Test, always_valid_upper},
    },
};

const DRAWS: usize = 100_000;
const CONFIDENCE: f64 = 0.95;

fn main() {
    let mut text = String::new();
    one_arm(&mut text);
    two_arms(&mut text);
    tests(&mut text);
    sequential(&mut text);
    always_valid(&mut text);
    clustered(&mut text);
    let _ = stdout().write_all(text.as_bytes());
}

fn share(part: usize, whole: usize) -> String {
    format!("{:.1} %", part as f64 / whole as f64 * 100.0)
}

fn binomial(trials: u64, rate: f64, rng: &mut impl Rng) -> u64 {
    Binomial::new(trials, rate).map_or(0, |binomial| binomial.sample(rng))
}

fn one_arm(text: &mut String) {
    let _ = writeln!(text, "Coverage at a nominal 95 %:\n");
    let _ = writeln!(text, "| sessions | rate | Clopper–Pearson | one-sided bound | Wilson |\n|--:|--:|--:|--:|--:|");
    for trials in [20, 80, 299, 1000] {
        for rate in [0.005, 0.01, 0.05, 0.15, 0.5] {
            let mut rng = Seed(1).fork("one arm").index(trials).rng();
            let mut seen: BTreeMap<u64, usize> = BTreeMap::new();
            for _ in 0..DRAWS {
                *seen.entry(binomial(trials, rate, &mut rng)).or_default() += 1;
            }
            let covered = |inside: &dyn Fn(Counts) -> bool| {
                let inside = seen.iter().filter(|&(&events, _)| inside(Counts::new(events, trials)));
                share(inside.map(|(_, times)| times).sum(), DRAWS)
            };
            let exact = covered(&|counts| interval::clopper_pearson(counts, CONFIDENCE).contains(rate));
            let upper = covered(&|counts| interval::upper_bound(counts, CONFIDENCE) >= rate);
            let wilson = covered(&|counts| interval::wilson(counts, CONFIDENCE).contains(rate));
            let _ = writeln!(text, "| {trials} | {:.1} % | {exact} | {upper} | {wilson} |", rate * 100.0);
        }
    }
}

/// Calls `f` with the outcomes of two arms and how often each came.
fn pairs(trials: u64, rates: [f64; 2], name: &str, mut f: impl FnMut(Counts, Counts, usize)) {
    let mut rng = Seed(1).fork(name).index(trials).rng();
    let mut seen: BTreeMap<(u64, u64), usize> = BTreeMap::new();
    for _ in 0..DRAWS {
        let pair = (binomial(trials, rates[0], &mut rng), binomial(trials, rates[1], &mut rng));
        *seen.entry(pair).or_default() += 1;
    }
    for ((a, b), times) in seen {
        f(Counts::new(a, trials), Counts::new(b, trials), times);
    }
}

fn two_arms(text: &mut String) {
    let _ = writeln!(text, "\nCoverage of the difference at a nominal 95 %:\n");
    let _ = writeln!(text, "| sessions | rates | Newcombe |\n|--:|--:|--:|");
    for trials in [40, 80, 400] {
        for rates in [[0.15, 0.0], [0.15, 0.08], [0.02, 0.02], [0.5, 0.4]] {
            let mut covered = 0;
            pairs(trials, rates, "difference", |a, b, times| {
                let Interval { lower, upper } = interval::newcombe(a, b, CONFIDENCE);
                covered += if (lower..=upper).contains(&(rates[0] - rates[1])) { times } else { 0 };
            });
            let covered = share(covered, DRAWS);
            let _ =
                writeln!(text, "| {trials} | {:.0} % and {:.0} % | {covered} |", rates[0] * 100.0, rates[1] * 100.0);
        }
    }
}

fn tests(text: &mut String) {
    let _ = writeln!(text, "\nRejections at a nominal 5 %; with equal rates this is the size, else the power:\n");
    let _ = writeln!(text, "| sessions | rates | Fisher | Boschloo |\n|--:|--:|--:|--:|");
    for trials in [40, 80] {
        for rates in [[0.02, 0.02], [0.15, 0.15], [0.5, 0.5], [0.15, 0.0], [0.15, 0.03]] {
            let (mut fisher, mut boschloo) = (0, 0);
            pairs(trials, rates, "tests", |a, b, times| {
                fisher += if exact::fisher(a, b) <= 0.05 { times } else { 0 };
                boschloo += if exact::boschloo(a, b) <= 0.05 { times } else { 0 };
            });
            let (fisher, boschloo) = (share(fisher, DRAWS), share(boschloo, DRAWS));
            let rates = format!("{:.0} % and {:.0} %", rates[0] * 100.0, rates[1] * 100.0);
            let _ = writeln!(text, "| {trials} | {rates} | {fisher} | {boschloo} |");
        }
    }
}

fn sequential(text: &mut String) {
    let _ = writeln!(text, "\nSequential probability ratio test, alpha = beta = 5 %:\n");
    let _ =
        writeln!(text, "| p0 | p1 | true rate | says high | says low | mean sessions | by Wald | 95th percentile |");
    let _ = writeln!(text, "|--:|--:|--:|--:|--:|--:|--:|--:|");
    for (p0, p1) in [(0.01, 0.15), (0.01, 0.05), (0.001, 0.01)] {
        let Some(sprt) = Sprt::new(p0, p1, 0.05, 0.05) else { continue };
        let expected = sprt.expected_trials();
        for (rate, wald) in [(p0, expected.0), (p1, expected.1)] {
            let mut rng = Seed(1).fork("sprt").rng();
            let mut stops: Vec<u64> = Vec::with_capacity(DRAWS);
            let (mut high, mut low) = (0, 0);
            for _ in 0..DRAWS {
                let (decision, trials) = walk(Test::Sprt(sprt), rate, &mut rng);
                match decision {
                    Decision::High => high += 1,
                    Decision::Low => low += 1,
                }
                stops.push(trials);
            }
            stops.sort_unstable();
            let mean = stops.iter().sum::<u64>() as f64 / DRAWS as f64;
            let late = stops[DRAWS * 95 / 100];
            let (high, low) = (share(high, DRAWS), share(low, DRAWS));
            let rates = format!("{:.1} % | {:.1} % | {:.1} %", p0 * 100.0, p1 * 100.0, rate * 100.0);
            let _ = writeln!(text, "| {rates} | {high} | {low} | {mean:.0} | {wald:.0} | {late} |");
        }
    }
}

fn walk(test: Test, rate: f64, rng: &mut impl Rng) -> (Decision, u64) {
    let mut counts = Counts::default();
    loop {
        counts = counts + Counts::new(u64::from(rng.random_bool(rate)), 1);
        if let Some(decision) = test.decide(counts) {
            return (decision, counts.trials);
        }
    }
}

/// How often the bound falls below the rate at any of a thousand looks.
fn always_valid(text: &mut String) {
    const LOOKS: u64 = 1000;
    let _ = writeln!(text, "\nAlways-valid bound, looked at after every one of {LOOKS} sessions, nominal error 5 %:\n");
    let _ = writeln!(text, "| true rate | ever below it | peeking at the fixed bound |\n|--:|--:|--:|");
    for rate in [0.01, 0.05, 0.15] {
        let mut rng = Seed(1).fork("always valid").rng();
        let mut broken: BTreeMap<(u64, u64), [bool; 2]> = BTreeMap::new();
        let mut ever = [0; 2];
        for _ in 0..DRAWS {
            let (mut events, mut hit) = (0, [false; 2]);
            for trials in 1..=LOOKS {
                events += u64::from(rng.random_bool(rate));
                // Only few events make a bound low.
                if events as f64 > rate * trials as f64 {
                    continue;
                }
                let below = *broken.entry((events, trials)).or_insert_with(|| {
                    let counts = Counts::new(events, trials);
                    let bounds = [always_valid_upper(counts, CONFIDENCE), interval::upper_bound(counts, CONFIDENCE)];
                    bounds.map(|bound| bound < rate)
                });
                hit = [hit[0] || below[0], hit[1] || below[1]];
            }
            ever = [ever[0] + usize::from(hit[0]), ever[1] + usize::from(hit[1])];
        }
        let _ = writeln!(text, "| {:.0} % | {} | {} |", rate * 100.0, share(ever[0], DRAWS), share(ever[1], DRAWS));
    }
}

/// Sessions of one launch share a rate that varies from launch to launch.
fn clustered(text: &mut String) {
    const RUNS: usize = 2000;
    let _ = writeln!(text, "\nCorrelated observations, rate 15 %, coverage at a nominal 95 %, {RUNS} runs:\n");
    let _ = writeln!(text, "| clusters | of | correlation | estimated | Clopper–Pearson | Korn–Graubard | bootstrap |");
    let _ = writeln!(text, "|--:|--:|--:|--:|--:|--:|--:|");
    for (clusters, size, rho) in [(4, 80, 0.05), (20, 20, 0.1), (80, 5, 0.0), (80, 5, 0.3)] {
        let mut rng = Seed(1).fork("clusters").rng();
        let (mut naive, mut aware, mut boot, mut sum) = (0, 0, 0, 0.0);
        for _ in 0..RUNS {
            let sample: Vec<Counts> = (0..clusters).map(|_| cluster(size, 0.15, rho, &mut rng)).collect();
            let clustering = Clustering::of(&sample);
            sum += clustering.correlation.unwrap_or_default();
            naive += usize::from(interval::clopper_pearson(clustering.total, CONFIDENCE).contains(0.15));
            aware += usize::from(clustering.interval(CONFIDENCE).contains(0.15));
            boot += usize::from(bootstrap(&sample, CONFIDENCE, &mut rng).is_some_and(|i| i.contains(0.15)));
        }
        let shares = [naive, aware, boot].map(|part| share(part, RUNS)).join(" | ");
        let _ = writeln!(text, "| {clusters} | {size} | {rho:.2} | {:.2} | {shares} |", sum / RUNS as f64);
    }
}

/// A cluster whose members correlate by `rho`: a beta-binomial draw.
fn cluster(size: u64, rate: f64, rho: f64, rng: &mut impl Rng) -> Counts {
    let own = if rho > 0.0 {
        let total = 1.0 / rho - 1.0;
        Beta::new(rate * total, (1.0 - rate) * total).map_or(rate, |beta| beta.sample(rng))
    } else {
        rate
    };
    Counts::new(binomial(size, own, rng), size)
}
