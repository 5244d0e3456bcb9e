//! The data pass: the arithmetic, in virtual time order.

use std::ops::Range;

use super::{
    Kernels, Memory, Touch, View, Writes,
    journal::{Journal, Moment},
    memory::{Overlay, STAMP_BYTES, Scratch, meets},
    plan::{Plan, Race},
    race::RaceHit,
    timing::Timing,
    watch::{Access, Watch},
};
use crate::device::SparseWeight;

/// A block's reads are taken in this many slices: the first at its start, the last at its end.
pub(crate) const SLICES: u64 = 4;

/// Stands for all blocks of an op that executes whole.
const WHOLE: u32 = u32::MAX;
/// The phase in which a block commits, after its last slice.
const COMMIT: u32 = SLICES as u32;

/// What the data pass works on.
pub(crate) struct Machine<'a> {
    pub(crate) kernels: &'a dyn Kernels,
    pub(crate) memory: &'a mut Memory,
    pub(crate) weights: &'a [SparseWeight],
    pub(crate) plan: &'a Plan,
    pub(crate) timing: &'a Timing,
}

/// The space in which launches are executed.
#[derive(Default)]
pub(crate) struct Data {
    full: bool,
    events: Vec<Event>,
    /// How each op executes.
    modes: Vec<Mode>,
    /// How many ops shared bytes with an op running at the same time.
    overlapping: u64,
    /// For each op that is sliced, bytes that an op at the same time may write.
    hot: Vec<Vec<Range<u64>>>,
    overlays: Vec<Overlay>,
    idle: Vec<u32>,
    /// For each block, its overlay.
    overlay_of: Vec<u32>,
    scratch: Scratch,
    /// For each op in [`Mode::Staged`], what its blocks write.
    staged: Vec<Scratch>,
    targets: Vec<Range<u64>>,
    watch: Watch,
    journal: Journal,
    /// For each [`STAMP_BYTES`] of memory, how many ranges that blocks under way may yet need the past of lie there.
    needed: Vec<u32>,
}

/// How an op executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Shares no bytes with an op that runs at the same time: at once, at its end.
    Whole,
    /// Nobody writes meanwhile what it reads: its blocks commit one by one, in one of the next two ways.
    Steady,
    /// All its blocks were computed when the first one ended.
    Staged,
    /// Some of its blocks write the same bytes: each is computed when it ends.
    Apart,
    /// As [`Mode::Steady`] if its first block finds nothing to log about what the op reads, or else [`Mode::Sliced`].
    Quiet,
    /// Block by block, reads in slices.
    Sliced,
}

/// Something that happens to memory. The order of fields is the order of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    time: u64,
    op: u32,
    block: u32,
    phase: u32,
}

impl Data {
    /// `full`: every op block by block, whatever overlaps.
    pub(crate) fn new(full: bool) -> Self {
        Self { full, ..Self::default() }
    }

    /// Executes one launch and logs its race hits. Returns how many ops were executed block by block because of an
    /// overlap.
    pub(crate) fn run(&mut self, machine: &mut Machine<'_>, launch: u64, hits: &mut Vec<RaceHit>) -> u64 {
        self.watch.begin(machine.plan, machine.timing);
        self.journal.clear();
        self.find_overlaps(machine.plan, machine.timing);
        self.list_events(machine.plan, machine.timing);
        self.overlay_of.clear();
        self.overlay_of.resize(machine.timing.blocks.len(), 0);
        self.needed.resize(machine.memory.len().div_ceil(STAMP_BYTES) as usize, 0);
        let events = std::mem::take(&mut self.events);
        for event in &events {
            match (event.block, event.phase) {
                (WHOLE, _) => self.execute_whole(machine, event),
                (_, COMMIT) => self.commit(machine, event),
                (_, 0) => self.begin_block(machine, event),
                _ => self.read_slice(machine, event),
            }
        }
        self.watch.finish(machine.plan, launch, hits);
        self.events = events;
        self.overlapping
    }

    /// Finds the ops that share bytes with an op running at the same time.
    fn find_overlaps(&mut self, plan: &Plan, timing: &Timing) {
        self.modes.clear();
        self.modes.resize(plan.len(), if self.full { Mode::Sliced } else { Mode::Whole });
        self.overlapping = 0;
        self.hot.resize_with(plan.len().max(self.hot.len()), Vec::new);
        self.hot.iter_mut().for_each(Vec::clear);
        for race in plan.races.iter().filter(|race| overlap(race, timing)) {
            for (op, other) in [(race.first, race.second), (race.second, race.first)] {
                self.modes[op as usize] = Mode::Sliced;
                self.overlapping += u64::from(self.hot[op as usize].is_empty());
                let writes = plan.ops[other as usize].writes.iter().map(|operand| operand.region.span());
                self.hot[op as usize].extend(writes);
            }
        }
        self.staged.resize_with(plan.len().max(self.staged.len()), Scratch::default);
        for op in (0..plan.len()).filter(|_| !self.full) {
            let reads = || plan.ops[op].reads.iter().map(|operand| operand.region.span());
            let hot = |span: Range<u64>| self.hot[op].iter().any(|hot| meets(hot, &span));
            if self.modes[op] == Mode::Sliced && !reads().any(hot) {
                let watched = self.watch.tracks(op as u32) && reads().any(|span| self.watch.touches(&span));
                self.modes[op] = if watched { Mode::Quiet } else { Mode::Steady };
            }
        }
    }

    fn list_events(&mut self, plan: &Plan, timing: &Timing) {
        self.events.clear();
        for op in 0..plan.len() as u32 {
            let blocks = timing.blocks_of(op);
            let mode = self.modes[op as usize];
            if mode == Mode::Whole {
                if !blocks.is_empty() {
                    self.events.push(Event { time: timing.op_end[op as usize], op, block: WHOLE, phase: COMMIT });
                }
                continue;
            }
            for block in blocks {
                let (start, end) = (timing.start[block], timing.end[block]);
                let block = block as u32;
                let listed = match mode {
                    Mode::Steady => 0,
                    _ if self.full => SLICES,
                    _ => 1,
                };
                for slice in 0..listed {
                    self.events.push(Event { time: slice_time(start, end, slice), op, block, phase: slice as u32 });
                }
                self.events.push(Event { time: end, op, block, phase: COMMIT });
            }
        }
        self.events.sort_unstable();
    }

    fn execute_whole(&mut self, machine: &mut Machine<'_>, event: &Event) {
        let blocks = &machine.timing.blocks[machine.timing.blocks_of(event.op)];
        let op = &machine.plan.ops[event.op as usize];
        let tracks = self.watch.tracks(event.op);
        if tracks && !self.watch.is_clean(machine.plan, event.op) {
            for (block, &end) in blocks.iter().zip(&machine.timing.end[machine.timing.blocks_of(event.op)]) {
                let access = Access { op: event.op, row: block.index, at_ns: end };
                let memory = &*machine.memory;
                machine.kernels.accesses(op, block, memory, &mut |touch, range| {
                    if touch != Touch::Write {
                        self.watch.read(machine.plan, access, range.start, memory.bytes(range.clone()));
                    }
                });
            }
        }
        if machine.plan.in_place[event.op as usize] && !tracks {
            let (view, mut out) = machine.memory.split(op, machine.weights);
            machine.kernels.compute(op, blocks, &view, &mut out);
            return;
        }
        let view = View::new(op, machine.memory, machine.weights);
        machine.kernels.compute(op, blocks, &view, &mut Writes::new(op, &mut self.scratch));
        self.write_back(machine, event, 0);
    }

    /// The first slice of a block's reads.
    fn begin_block(&mut self, machine: &mut Machine<'_>, event: &Event) {
        let Event { time, op, block, .. } = *event;
        if self.modes[op as usize] == Mode::Quiet {
            // What it reads stays as it is until its last block has ended, and so does who wrote it.
            let clean = self.watch.is_clean(machine.plan, op);
            self.modes[op as usize] = if clean { Mode::Steady } else { Mode::Sliced };
        }
        if self.modes[op as usize] != Mode::Sliced {
            return;
        }
        let access = Access { op, row: machine.timing.blocks[block as usize].index, at_ns: time };
        let at = self.idle.pop().unwrap_or_else(|| {
            self.overlays.push(Overlay::default());
            self.overlays.len() as u32 - 1
        });
        self.overlay_of[block as usize] = at;
        let overlay = &mut self.overlays[at as usize];
        let (full, hot) = (self.full, &self.hot[op as usize]);
        let (watch, memory) = (&mut self.watch, &*machine.memory);
        overlay.begin(full, self.journal.len(), memory);
        let tracks = watch.tracks(op);
        machine.kernels.accesses(
            &machine.plan.ops[op as usize],
            &machine.timing.blocks[block as usize],
            memory,
            &mut |touch, range| {
                if touch == Touch::Write || range.is_empty() {
                    return;
                }
                let watched = tracks && watch.touches(&range);
                let hot = watched || hot.iter().any(|hot| meets(hot, &range));
                match touch {
                    Touch::Index if full || hot => {
                        if watched {
                            watch.read(machine.plan, access, range.start, memory.bytes(range.clone()));
                        }
                        overlay.add_read(memory, range);
                    }
                    Touch::Read if full => overlay.add(range),
                    Touch::Read => overlay.note(range, hot),
                    _ => {}
                }
            },
        );
        if full {
            self.read_slice(machine, event);
        } else {
            overlay.noted().for_each(|range| stamped(&mut self.needed, range).for_each(|count| *count += 1));
        }
    }

    /// One slice of a block, when it is due: what [`Overlay::settle`] must agree with.
    fn read_slice(&mut self, machine: &mut Machine<'_>, event: &Event) {
        let Event { time, op, block, phase } = *event;
        let access = Access { op, row: machine.timing.blocks[block as usize].index, at_ns: time };
        let overlay = &mut self.overlays[self.overlay_of[block as usize] as usize];
        let (watch, memory) = (&mut self.watch, &*machine.memory);
        let tracks = watch.tracks(op);
        overlay.read(memory, u64::from(phase), SLICES, |range| {
            if tracks {
                watch.read(machine.plan, access, range.start, memory.bytes(range));
            }
        });
    }

    fn commit(&mut self, machine: &mut Machine<'_>, event: &Event) {
        let Event { time, op, block, .. } = *event;
        if self.modes[op as usize] != Mode::Sliced {
            self.commit_steady(machine, event);
            return;
        }
        let overlay = self.overlay_of[block as usize];
        let blocks = &machine.timing.blocks[block as usize..=block as usize];
        if !self.full {
            let (start, end) = (machine.timing.start[block as usize], machine.timing.end[block as usize]);
            let slices: [Moment; SLICES as usize] =
                std::array::from_fn(|slice| (slice_time(start, end, slice as u64), op, block));
            let (watch, memory, journal) = (&mut self.watch, &*machine.memory, &self.journal);
            let tracks = watch.tracks(op);
            let noted = self.overlays[overlay as usize].noted();
            noted.for_each(|range| stamped(&mut self.needed, range).for_each(|count| *count -= 1));
            let access = Access { op, row: blocks[0].index, at_ns: time };
            self.overlays[overlay as usize].settle(memory, journal, &slices, |from, bytes, position| match position {
                _ if !tracks => {}
                None => watch.read(machine.plan, access, from, bytes),
                Some(position) => {
                    watch.read_before(machine.plan, access, (from, bytes), (journal, memory, position));
                }
            });
        }
        let op = &machine.plan.ops[op as usize];
        let view = View::through(op, machine.memory, machine.weights, &self.overlays[overlay as usize]);
        machine.kernels.compute(op, blocks, &view, &mut Writes::new(op, &mut self.scratch));
        self.write_back(machine, event, blocks[0].index);
        self.idle.push(overlay);
    }

    fn commit_steady(&mut self, machine: &mut Machine<'_>, event: &Event) {
        let op = &machine.plan.ops[event.op as usize];
        let block = &machine.timing.blocks[event.block as usize];
        let mode = &mut self.modes[event.op as usize];
        let staged = &mut self.staged[event.op as usize];
        if *mode == Mode::Steady {
            let blocks = &machine.timing.blocks[machine.timing.blocks_of(event.op)];
            let view = View::new(op, machine.memory, machine.weights);
            machine.kernels.compute(op, blocks, &view, &mut Writes::new(op, staged));
            *mode = if staged.sort() { Mode::Staged } else { Mode::Apart };
        }
        if *mode == Mode::Apart {
            let view = View::new(op, machine.memory, machine.weights);
            machine.kernels.compute(op, std::slice::from_ref(block), &view, &mut Writes::new(op, &mut self.scratch));
            self.write_back(machine, event, block.index);
            return;
        }
        let staged = std::mem::take(staged);
        let mut targets = std::mem::take(&mut self.targets);
        targets.clear();
        machine.kernels.accesses(op, block, machine.memory, &mut |touch, range| {
            if touch == Touch::Write {
                targets.push(range);
            }
        });
        for range in &targets {
            self.put(machine.memory, event, block.index, range, staged.find(range));
        }
        self.targets = targets;
        self.staged[event.op as usize] = staged;
    }

    fn write_back(&mut self, machine: &mut Machine<'_>, event: &Event, row: u32) {
        let scratch = std::mem::take(&mut self.scratch);
        for (range, bytes) in scratch.iter() {
            self.put(machine.memory, event, row, range, bytes);
        }
        self.scratch = scratch;
    }

    /// Writes `bytes` to `range`, keeping what somebody may still need of what was there.
    fn put(&mut self, memory: &mut Memory, event: &Event, row: u32, range: &Range<u64>, bytes: &[u8]) {
        let old = memory.bytes(range.clone());
        if stamped(&mut self.needed, range).any(|count| *count > 0) {
            let moment = (event.time, event.op, event.block);
            self.journal.record(moment, range.clone(), old, self.watch.tags(), self.watch.places(range));
        }
        if self.watch.tracks(event.op) {
            let access = Access { op: event.op, row, at_ns: event.time };
            self.watch.write(access, range.start, old, bytes);
        }
        memory.write(range.start, bytes);
    }
}

/// The counts of the parts of memory that `range` meets.
fn stamped<'a>(counts: &'a mut [u32], range: &Range<u64>) -> impl Iterator<Item = &'a mut u32> + use<'a> {
    counts[(range.start / STAMP_BYTES) as usize..range.end.div_ceil(STAMP_BYTES) as usize].iter_mut()
}

/// When slice `slice` of a block is due: the first at its start, the last at its end.
fn slice_time(start: u64, end: u64, slice: u64) -> u64 {
    start + (end - start) * slice / (SLICES - 1)
}

/// True where both ops of a race ran at the same time, ends included.
fn overlap(race: &Race, timing: &Timing) -> bool {
    let (first, second) = (race.first as usize, race.second as usize);
    timing.op_start[first] <= timing.op_end[second] && timing.op_start[second] <= timing.op_end[first]
}
