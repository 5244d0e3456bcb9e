//! Truth against judgement: recall, false positives, the confusion matrix.

use std::collections::BTreeMap;

use serde::Serialize;

use super::Truth;

/// What the harness called a response.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Outcome {
    /// Verdict.
    pub verdict: String,
    /// Class.
    pub class: String,
}

/// The tally of a self-check.
#[derive(Debug, Clone, Default)]
pub struct Score {
    cells: BTreeMap<(Truth, Outcome), u64>,
}

/// One cell of the confusion matrix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cell {
    /// The true class.
    pub truth: &'static str,
    /// The class given.
    pub judged: String,
    /// How often.
    pub count: u64,
    /// Whether verdict and class are right.
    pub right: bool,
}

impl Score {
    /// Counts one response.
    pub fn add(&mut self, truth: Truth, judged: Outcome) {
        *self.cells.entry((truth, judged)).or_default() += 1;
    }

    /// Adds another tally.
    pub fn merge(&mut self, other: Self) {
        for (cell, count) in other.cells {
            *self.cells.entry(cell).or_default() += count;
        }
    }

    fn count(&self, keep: impl Fn(&Truth, &Outcome) -> bool) -> u64 {
        self.cells.iter().filter(|((truth, judged), _)| keep(truth, judged)).map(|(_, count)| count).sum()
    }

    /// Responses in all.
    pub fn responses(&self) -> u64 {
        self.count(|_, _| true)
    }

    /// Responses with a fault, of whatever kind.
    pub fn faulty(&self) -> u64 {
        self.count(|truth, _| truth.verdict != "valid")
    }

    /// Share of faulty responses that got their verdict and class; `None` where none was faulty.
    pub fn recall(&self) -> Option<f64> {
        let found = self.count(|truth, judged| truth.verdict != "valid" && is_right(*truth, judged));
        let faulty = self.faulty();
        (faulty > 0).then(|| found as f64 / faulty as f64)
    }

    /// Valid responses that were called anything else, and answers called corrupted that were not.
    pub fn false_positives(&self) -> u64 {
        self.count(|truth, judged| {
            (truth.verdict == "valid" && !is_right(*truth, judged))
                || (truth.verdict != "corrupted" && judged.verdict == "corrupted")
        })
    }

    /// Whether every response got its verdict and class, and some were faulty.
    pub fn is_perfect(&self) -> bool {
        self.faulty() > 0 && self.count(|truth, judged| !is_right(*truth, judged)) == 0
    }

    /// Every pair of true and given class that occurred.
    pub fn confusion(&self) -> Vec<Cell> {
        let cell = |((truth, judged), count): (&(Truth, Outcome), &u64)| Cell {
            truth: truth.class,
            judged: judged.class.clone(),
            count: *count,
            right: is_right(*truth, judged),
        };
        self.cells.iter().map(cell).collect()
    }
}

fn is_right(truth: Truth, judged: &Outcome) -> bool {
    truth.verdict == judged.verdict && truth.class == judged.class
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_of_both_kinds_are_counted() {
        let ok = Truth { verdict: "valid", class: "ok" };
        let lost = Truth { verdict: "corrupted", class: "args_lost" };
        let outcome = |verdict: &str, class: &str| Outcome { verdict: verdict.to_owned(), class: class.to_owned() };
        let mut score = Score::default();
        assert_eq!(score.recall(), None);
        score.add(ok, outcome("valid", "ok"));
        score.add(lost, outcome("corrupted", "args_lost"));
        assert!(score.is_perfect());
        score.add(lost, outcome("valid", "ok"));
        assert_eq!(score.recall(), Some(0.5));
        score.add(ok, outcome("corrupted", "args_lost"));
        assert_eq!(score.false_positives(), 1);
        assert!(!score.is_perfect());
        assert_eq!(score.confusion().len(), 4);
    }
}
