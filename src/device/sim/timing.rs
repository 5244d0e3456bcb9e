//! The timing pass: when each block starts and ends.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque, binary_heap::PeekMut},
};

use rand::distr::Distribution;
use rand_distr::StandardNormal;
use rand_pcg::Pcg64Mcg;

use super::{Stats, cost::CostModel, order::Order, plan::Plan};
use crate::device::Block;

/// The schedule of one launch, and the space in which it is worked out.
#[derive(Default)]
pub(crate) struct Timing {
    cost: CostModel,
    /// Blocks of all ops, op by op.
    pub(crate) blocks: Vec<Block>,
    /// For each op, its first block; one more entry ends the last op.
    pub(crate) first_block: Vec<u32>,
    /// Start of each block, ns.
    pub(crate) start: Vec<u64>,
    /// End of each block, ns.
    pub(crate) end: Vec<u64>,
    /// Start of each op's first block, ns.
    pub(crate) op_start: Vec<u64>,
    /// End of each op's last block, ns.
    pub(crate) op_end: Vec<u64>,
    duration: Vec<u64>,
    waiting: Vec<u32>,
    left: Vec<u32>,
    queue: VecDeque<(u32, u32)>,
    running: BinaryHeap<Reverse<Running>>,
    ready: BinaryHeap<Reverse<(u64, u32)>>,
    eligible: Vec<u32>,
    activity: Vec<(u64, bool, u32)>,
    active: Vec<u32>,
}

/// A block that holds a slot: its end, then itself, then its op, in one number that compares fast.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Running(u128);

impl Running {
    fn new(end: u64, block: u32, op: u32) -> Self {
        Self(u128::from(end) << 64 | u128::from(block) << 32 | u128::from(op))
    }

    fn end(self) -> u64 {
        (self.0 >> 64) as u64
    }

    fn op(self) -> u32 {
        self.0 as u32
    }
}

impl Timing {
    pub(crate) fn new(cost: CostModel) -> Self {
        Self { cost, ..Self::default() }
    }

    pub(crate) fn blocks_of(&self, op: u32) -> std::ops::Range<usize> {
        self.first_block[op as usize] as usize..self.first_block[op as usize + 1] as usize
    }

    /// Forgets the last launch's grid; [`Timing::end_grid`] then ends each op's, in order.
    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
        self.first_block.clear();
        self.first_block.push(0);
    }

    /// Ends the grid of the next op: its blocks have been appended to `self.blocks`.
    pub(crate) fn end_grid(&mut self) {
        self.first_block.push(self.blocks.len() as u32);
    }

    /// Works out the schedule.
    pub(crate) fn run(&mut self, plan: &Plan, order: &mut dyn Order, rng: &mut Pcg64Mcg) {
        self.draw_durations(plan, rng);
        self.waiting.clone_from(&plan.indegree);
        self.left.clear();
        self.left.extend(self.first_block.windows(2).map(|pair| pair[1] - pair[0]));
        for times in [&mut self.start, &mut self.end] {
            times.clear();
            times.resize(self.blocks.len(), 0);
        }
        for times in [&mut self.op_start, &mut self.op_end] {
            times.clear();
            times.resize(plan.len(), u64::MAX);
        }
        self.eligible.clear();
        self.eligible.extend((0..plan.len() as u32).filter(|&op| plan.indegree[op as usize] == 0));
        if order.serial() { self.run_serially(plan, order) } else { self.run_machine(plan, order) }
    }

    fn draw_durations(&mut self, plan: &Plan, rng: &mut Pcg64Mcg) {
        self.duration.clear();
        for (op, rate) in plan.rates.iter().enumerate() {
            for block in &self.blocks[self.first_block[op] as usize..self.first_block[op + 1] as usize] {
                let normal: f64 = StandardNormal.sample(rng);
                let jitter = (normal * self.cost.jitter_sigma).exp();
                self.duration.push((rate.duration_ns(block) * jitter).max(1.0) as u64);
            }
        }
    }

    fn run_machine(&mut self, plan: &Plan, order: &mut dyn Order) {
        self.queue.clear();
        for at in 0..self.eligible.len() {
            let op = self.eligible[at];
            self.make_ready(plan, order, op, 0);
        }
        let mut now = 0;
        loop {
            self.fill_slots(now);
            let ready_at = self.ready.peek().map_or(u64::MAX, |entry| entry.0.0);
            let ended = self.running.peek().map(|entry| entry.0).filter(|running| running.end() <= ready_at);
            if let Some(running) = ended {
                let op = running.op();
                now = running.end();
                self.end_block(now);
                self.left[op as usize] -= 1;
                if self.left[op as usize] == 0 {
                    self.finish(plan, order, op, now);
                }
            } else if let Some(Reverse((time, op))) = self.ready.pop() {
                now = time;
                if self.left[op as usize] == 0 {
                    self.op_start[op as usize] = now;
                    self.finish(plan, order, op, now);
                } else {
                    self.queue.push_back((op, self.first_block[op as usize]));
                }
            } else {
                return;
            }
        }
    }

    /// Ends the running block that ends first; the next waiting one takes its slot.
    fn end_block(&mut self, now: u64) {
        let Some(mut top) = self.running.peek_mut() else { return };
        if let Some((op, block)) = next_block(&mut self.queue, &self.first_block) {
            let end = begin_block(&mut self.start, &mut self.end, &self.duration, block, now);
            self.op_start[op as usize] = self.op_start[op as usize].min(now);
            *top = Reverse(Running::new(end, block, op));
        } else {
            PeekMut::pop(top);
        }
    }

    fn fill_slots(&mut self, now: u64) {
        while self.running.len() < self.cost.slots {
            let Some((op, block)) = next_block(&mut self.queue, &self.first_block) else { return };
            let end = begin_block(&mut self.start, &mut self.end, &self.duration, block, now);
            let first = &mut self.op_start[op as usize];
            *first = (*first).min(now);
            self.running.push(Reverse(Running::new(end, block, op)));
        }
    }

    fn finish(&mut self, plan: &Plan, order: &mut dyn Order, op: u32, now: u64) {
        self.op_end[op as usize] = now;
        for &later in plan.successors(op) {
            self.waiting[later as usize] -= 1;
            if self.waiting[later as usize] == 0 {
                self.make_ready(plan, order, later, now + self.cost.node_latency_ns);
            }
        }
    }

    fn make_ready(&mut self, plan: &Plan, order: &mut dyn Order, op: u32, edges_met: u64) {
        let ready = edges_met.max(plan.launched_at[op as usize]) + order.hold_ns(op);
        self.ready.push(Reverse((ready, op)));
    }

    /// One op at a time, each on the whole machine.
    fn run_serially(&mut self, plan: &Plan, order: &mut dyn Order) {
        let mut now = 0;
        while !self.eligible.is_empty() {
            let op = self.eligible.remove(order.pick(&self.eligible));
            now = (now + self.cost.node_latency_ns).max(plan.launched_at[op as usize]);
            self.op_start[op as usize] = now;
            self.queue.clear();
            if self.left[op as usize] > 0 {
                self.queue.push_back((op, self.first_block[op as usize]));
            }
            self.fill_slots(now);
            while let Some(Reverse(running)) = self.running.pop() {
                now = running.end();
                self.fill_slots(now);
            }
            self.op_end[op as usize] = now;
            for &later in plan.successors(op) {
                self.waiting[later as usize] -= 1;
                if self.waiting[later as usize] == 0 {
                    let place = self.eligible.partition_point(|&other| other < later);
                    self.eligible.insert(place, later);
                }
            }
        }
    }

    /// Adds this launch to the totals.
    pub(crate) fn count(&mut self, plan: &Plan, stats: &mut Stats) {
        stats.launches += 1;
        stats.blocks += self.blocks.len() as u64;
        stats.total_ns += self.op_end.iter().copied().max().unwrap_or(0);
        self.activity.clear();
        self.active.clear();
        let streams = plan.streams.iter().map(|stream| stream.0 + 1).max().unwrap_or(0);
        self.active.resize(streams as usize, 0);
        for (op, stream) in plan.streams.iter().enumerate().filter(|(op, _)| self.op_start[*op] < self.op_end[*op]) {
            self.activity.push((self.op_start[op], true, stream.0));
            self.activity.push((self.op_end[op], false, stream.0));
        }
        self.activity.sort_unstable();
        let (mut since, mut streams) = (0, 0);
        for &(time, begins, stream) in &self.activity {
            stats.busy_ns += if streams > 0 { time - since } else { 0 };
            stats.overlap_ns += if streams > 1 { time - since } else { 0 };
            since = time;
            let running = &mut self.active[stream as usize];
            if begins {
                streams += u32::from(*running == 0);
                *running += 1;
            } else {
                *running = running.saturating_sub(1);
                streams = self.active.iter().filter(|&&running| running > 0).count() as u32;
            }
        }
    }

    /// A number that two launches share only if every op started and ended at the same times.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut hash = 0x9E37_79B9_7F4A_7C15_u64;
        for time in self.op_start.iter().chain(&self.op_end) {
            hash = (hash ^ time).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            hash ^= hash >> 29;
        }
        hash
    }
}

/// The next block of the op that has been ready longest.
fn next_block(queue: &mut VecDeque<(u32, u32)>, first_block: &[u32]) -> Option<(u32, u32)> {
    let front = queue.front_mut()?;
    let (op, block) = *front;
    front.1 += 1;
    if front.1 == first_block[op as usize + 1] {
        queue.pop_front();
    }
    Some((op, block))
}

fn begin_block(start: &mut [u64], end: &mut [u64], duration: &[u64], block: u32, now: u64) -> u64 {
    let block = block as usize;
    start[block] = now;
    end[block] = now + duration[block];
    end[block]
}
