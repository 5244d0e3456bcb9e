//! The rival: delta debugging with majority votes.

use toolstorm::bisect::{Outcome, Probe, Trial};

/// Votes behind every answer of the oracle; a vote is one probe, and bad when any of its sessions was corrupted.
const VOTES: usize = 3;

/// Asks by majority whether a set is bad, and counts what that costs.
struct Jury<'a, T> {
    trial: &'a mut T,
    sessions_per_vote: u64,
    spent: u64,
    limit: u64,
}

impl<T: Trial> Jury<'_, T> {
    fn is_bad(&mut self, set: &[usize]) -> bool {
        let bad = (0..VOTES).filter(|_| self.vote(set)).count();
        bad > VOTES / 2
    }

    fn vote(&mut self, set: &[usize]) -> bool {
        self.spent += self.sessions_per_vote;
        let probe = Probe { bad: set.to_vec(), sessions: self.sessions_per_vote, known: 0 };
        matches!(self.trial.run(&probe), Ok(Outcome::Judged(counts)) if counts.events > 0)
    }
}

/// A set that the votes call bad and from which no single toggle can be taken (`ddmin` of Zeller and Hildebrandt, 2002,
/// IEEE Transactions on Software Engineering 28:183), and the sessions spent. `None` when the bad end was voted good, the
/// good end bad, or the sessions ran out.
pub(crate) fn ddmin<T: Trial>(
    toggles: usize,
    trial: &mut T,
    sessions_per_vote: u64,
    limit: u64,
) -> (Option<Vec<usize>>, u64) {
    let mut jury = Jury { trial, sessions_per_vote, spent: 0, limit };
    let mut set: Vec<usize> = (0..toggles).collect();
    if !jury.is_bad(&set) || jury.is_bad(&[]) {
        return (None, jury.spent);
    }
    let mut parts = 2;
    while set.len() >= 2 {
        if jury.spent >= jury.limit {
            return (None, jury.spent);
        }
        match reduce(&set, parts, &mut jury) {
            Some((smaller, next)) => (set, parts) = (smaller, next),
            None if parts >= set.len() => break,
            None => parts = (2 * parts).min(set.len()),
        }
    }
    (Some(set), jury.spent)
}

fn reduce<T: Trial>(set: &[usize], parts: usize, jury: &mut Jury<'_, T>) -> Option<(Vec<usize>, usize)> {
    let chunks: Vec<&[usize]> = set.chunks(set.len().div_ceil(parts)).collect();
    if let Some(chunk) = chunks.iter().find(|chunk| jury.is_bad(chunk)) {
        return Some((chunk.to_vec(), 2));
    }
    if chunks.len() <= 2 {
        return None;
    }
    let rest = |chunk: &[usize]| set.iter().copied().filter(|toggle| !chunk.contains(toggle)).collect::<Vec<_>>();
    let complement = chunks.iter().map(|chunk| rest(chunk)).find(|rest| jury.is_bad(rest))?;
    Some((complement, (parts - 1).max(2)))
}
