//! Continuous batching as two pure functions of the state: who is admitted, and what one step runs.
//!
//! The policy, since the composition of batches decides which buckets are visited:
//!
//! 1. *Admission* is first come, first served (under lockstep: by session), at the start of a step. The first that
//!    finds no place in the batch or too few pages waits, and everybody behind it as well: nobody starves. Pages for
//!    the prompt and the longest answer are leased at once, so a running sequence never waits for pages.
//! 2. *Decode goes first*: every sequence whose prompt is prefilled decodes one token, in the order of admission.
//! 3. *Then one prefill chunk*: at most so many prompt tokens as a chunk has are prefilled, the oldest sequence first;
//!    what one leaves of the chunk goes to the next. The last token of a prompt is not prefilled: it is decoded, in
//!    the step after.

use std::ops::Range;

/// What bounds a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that run at a time.
    pub max_batch: usize,
    /// Prompt tokens that one step prefills.
    pub prefill_chunk: u32,
}

/// How far a running sequence's prompt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Tokens whose entries are in the cache.
    pub prefilled: u32,
    /// Tokens to prefill: all of the prompt but the last.
    pub target: u32,
}

/// A part of a sequence's prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Index of the running sequence.
    pub sequence: usize,
    /// Positions to prefill.
    pub range: Range<u32>,
}

/// One step's work.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Step {
    /// Indices of the running sequences that decode a token.
    pub decode: Vec<usize>,
    /// The prefill chunk, by sequence.
    pub prefill: Vec<Chunk>,
}

/// How many of those who wait are admitted: `costs` are the pages that each takes, in order, `spare` those to be had.
pub fn admissible(costs: impl IntoIterator<Item = u32>, running: usize, spare: u32, limits: &Limits) -> usize {
    let places = limits.max_batch.saturating_sub(running);
    let mut spare = spare;
    costs
        .into_iter()
        .take(places)
        .take_while(|cost| {
            let fits = *cost <= spare;
            spare = spare.saturating_sub(*cost);
            fits
        })
        .count()
}

/// What the next step runs.
pub fn plan(running: &[Progress], limits: &Limits) -> Step {
    let mut step = Step::default();
    let mut budget = limits.prefill_chunk;
    for (sequence, progress) in running.iter().enumerate() {
        let left = progress.target - progress.prefilled;
        let tokens = left.min(budget);
        if left == 0 {
            step.decode.push(sequence);
        } else if tokens > 0 {
            step.prefill.push(Chunk { sequence, range: progress.prefilled..progress.prefilled + tokens });
            budget -= tokens;
        }
    }
    step
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::seed::Seed;

    const LIMITS: Limits = Limits { max_batch: 4, prefill_chunk: 100 };

    #[test]
    fn admission_keeps_the_order_and_stops_at_the_first_that_must_wait() {
        assert_eq!(admissible([1, 1, 1], 0, 10, &LIMITS), 3);
        assert_eq!(admissible([5, 6, 1], 0, 10, &LIMITS), 1, "the third does not overtake the second");
        assert_eq!(admissible([1, 1, 1], 3, 10, &LIMITS), 1);
        assert_eq!(admissible([1], 4, 10, &LIMITS), 0);
    }

    #[test]
    fn decode_goes_first_and_a_chunk_is_shared() {
        let running = [
            Progress { prefilled: 50, target: 50 },
            Progress { prefilled: 20, target: 90 },
            Progress { prefilled: 0, target: 500 },
            Progress { prefilled: 0, target: 10 },
        ];
        let step = plan(&running, &LIMITS);
        assert_eq!(step.decode, [0]);
        assert_eq!(step.prefill, [Chunk { sequence: 1, range: 20..90 }, Chunk { sequence: 2, range: 0..30 }]);
    }

    #[test]
    fn every_sequence_gets_through_and_no_step_exceeds_its_limits() {
        let mut rng = Seed(3).rng();
        let mut waiting: Vec<(u32, u32)> =
            (0..200).map(|_| (rng.random_range(1..2000), rng.random_range(1..50))).collect();
        waiting.reverse();
        let (mut running, mut full, mut steps) = (Vec::<(Progress, u32)>::new(), 0, 0);
        while !(waiting.is_empty() && running.is_empty()) {
            let costs = waiting.iter().rev().map(|(prompt, _)| prompt / 256 + 1);
            let held: u32 = running.iter().map(|(p, _)| p.target / 256 + 1).sum();
            for _ in 0..admissible(costs, running.len(), 20 - held, &LIMITS) {
                let (prompt, answer) = waiting.pop().unwrap();
                running.push((Progress { prefilled: 0, target: prompt }, answer));
            }
            let progress: Vec<_> = running.iter().map(|(p, _)| *p).collect();
            let step = plan(&progress, &LIMITS);
            let prefilled: u32 = step.prefill.iter().map(|c| c.range.len() as u32).sum();
            assert!(running.len() <= LIMITS.max_batch && prefilled <= LIMITS.prefill_chunk);
            assert!(prefilled > 0 || !step.decode.is_empty(), "a step does something");
            full += u32::from(prefilled == LIMITS.prefill_chunk);
            for chunk in &step.prefill {
                running[chunk.sequence].0.prefilled = chunk.range.end;
            }
            for sequence in &step.decode {
                running[*sequence].1 -= 1;
            }
            running.retain(|(_, answer)| *answer > 0);
            steps += 1;
        }
        assert!(full > 100, "{full} of {steps} steps prefilled a full chunk");
    }
}
