//! Several graphs in one pool, and the order in which they are replayed.
//!
//! Graphs that share a private pool recycle each other's bytes. That is sound while they are replayed in the order of
//! their capture and each one's outputs are read before the next replay. This walks a given replay order, remembers
//! under which lifetime each byte was written last, and names whatever is then read under another one.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use super::{Access, Capture, Lifetime};
use crate::error::{Error, Result};

/// When the host reads a graph's outputs (what it still holds when the capture ends).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Outputs {
    /// Before the next replay.
    #[default]
    AtOnce,
    /// Only after the next replay.
    AfterNext,
}

/// Bytes that no longer mean what a reader takes them for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clobber {
    /// The graph whose data is lost, by index into the captures.
    pub graph: usize,
    /// The graph that overwrote it; none where its memory was freed instead, or was not yet written.
    pub by: Option<usize>,
    /// The tensor that the reader means.
    pub tensor: String,
    /// The bytes.
    pub bytes: Range<u64>,
    /// What happens, in one sentence.
    pub why: String,
}

/// Walks `order` (indices into `captures`, which are in the order of their capture).
pub fn replay(captures: &[Capture], order: &[usize], outputs: Outputs) -> Result<Vec<Clobber>> {
    if let Some(&bad) = order.iter().find(|&&g| g >= captures.len()) {
        return Err(Error::usage(format!(
            "the replay order names graph {bad}, but only {} were given",
            captures.len()
        )));
    }
    let produced = captures.iter().flat_map(|c| c.lifetimes.iter().filter(|l| l.inside).map(|l| (&*c.group, l.key)));
    let mut pool = Pool { captures, produced: produced.collect(), owners: Owners::default(), found: Vec::new() };
    for (step, &graph) in order.iter().enumerate() {
        pool.read_foreign(graph);
        pool.write(graph);
        if outputs == Outputs::AfterNext && step > 0 {
            pool.read_outputs(order[step - 1], graph);
        }
    }
    pool.read_freed();
    Ok(pool.found)
}

struct Pool<'a> {
    captures: &'a [Capture],
    /// What some capture allocated itself, by group and key.
    produced: BTreeSet<(&'a str, u64)>,
    owners: Owners,
    found: Vec<Clobber>,
}

impl Pool<'_> {
    /// What `graph` reads of earlier replays must still be there.
    fn read_foreign(&mut self, graph: usize) {
        let capture = &self.captures[graph];
        for wanted in first_read(capture).map(|l| &capture.lifetimes[l as usize]).filter(|l| foreign(l)) {
            let lost = self.owners.over(&wanted.bytes).find(|(_, o)| o.key != wanted.key).map(|(b, o)| (b, o.graph));
            let name = &capture.name;
            if let Some((bytes, by)) = lost {
                let why = format!(
                    "`{name}` reads `{}`, whose bytes `{}` has written over in this replay order",
                    wanted.name, self.captures[by].name
                );
                self.add(Clobber { graph, by: Some(by), tensor: wanted.name.clone(), bytes, why });
            } else if self.produced.contains(&(&*capture.group, wanted.key))
                && self.owners.over(&wanted.bytes).next().is_none()
            {
                let why = format!("`{name}` reads `{}` before the graph that writes it was replayed", wanted.name);
                self.add(Clobber { graph, by: None, tensor: wanted.name.clone(), bytes: wanted.bytes.clone(), why });
            }
        }
    }

    fn write(&mut self, graph: usize) {
        let capture = &self.captures[graph];
        let written = capture.touches.iter().filter(|t| t.access != Access::Read);
        for lifetime in written.map(|t| &capture.lifetimes[t.lifetime as usize]).filter(|l| !l.untraced) {
            self.owners.paint(lifetime.bytes.clone(), Owner { key: lifetime.key, graph });
        }
    }

    /// The outputs of the replay before must have survived that of `graph`.
    fn read_outputs(&mut self, before: usize, graph: usize) {
        if before == graph {
            return;
        }
        let capture = &self.captures[before];
        for output in capture.lifetimes.iter().filter(|l| l.inside && l.freed.is_none()) {
            let lost = self.owners.over(&output.bytes).find(|(_, o)| o.key != output.key).map(|(b, _)| b);
            if let Some(bytes) = lost {
                let why = format!(
                    "`{}` of `{}` is read after `{}` was replayed, which writes over its bytes",
                    output.name, capture.name, self.captures[graph].name
                );
                self.add(Clobber { graph: before, by: Some(graph), tensor: output.name.clone(), bytes, why });
            }
        }
    }

    /// Buffers from outside that were freed while the graph was captured, or before a later capture. What an earlier
    /// graph leaves in the pool may be freed while it is captured: the pool keeps the bytes, and an order tells the rest.
    fn read_freed(&mut self) {
        for (graph, capture) in self.captures.iter().enumerate() {
            let used: BTreeSet<u32> = capture.touches.iter().map(|t| t.lifetime).collect();
            let later = || self.captures[graph + 1..].iter().filter(|later| later.group == capture.group);
            for buffer in used.into_iter().map(|l| &capture.lifetimes[l as usize]).filter(|l| foreign(l)) {
                let gone = |later: &&Capture| later.alive.as_ref().is_some_and(|alive| !alive.contains(&buffer.key));
                let itself = buffer.freed.is_some() && !self.produced.contains(&(&*capture.group, buffer.key));
                let when = match later().find(gone) {
                    _ if itself => "while it was captured".to_owned(),
                    Some(later) => format!("before `{}` was captured", later.name),
                    None => continue,
                };
                let why = format!(
                    "`{}` still uses `{}`, which was freed {when}: anybody may own its bytes now",
                    capture.name, buffer.name
                );
                self.add(Clobber { graph, by: None, tensor: buffer.name.clone(), bytes: buffer.bytes.clone(), why });
            }
        }
    }

    fn add(&mut self, clobber: Clobber) {
        let same = |c: &Clobber| (c.graph, c.by, &c.tensor) == (clobber.graph, clobber.by, &clobber.tensor);
        if !self.found.iter().any(same) {
            self.found.push(clobber);
        }
    }
}

/// True for memory that the graph did not allocate and of which an allocator tells.
fn foreign(lifetime: &Lifetime) -> bool {
    !lifetime.inside && !lifetime.untraced
}

/// Lifetimes whose first touch is no certain write: they are read as somebody left them.
fn first_read(capture: &Capture) -> impl Iterator<Item = u32> {
    let mut first: BTreeMap<u32, (u32, bool)> = BTreeMap::new();
    for touch in &capture.touches {
        let writes = touch.access == Access::Write && touch.sure;
        let known = first.entry(touch.lifetime).or_insert((touch.node, writes));
        // Of several operands of one operation, a read decides.
        if known.0 == touch.node {
            known.1 &= writes;
        }
    }
    first.into_iter().filter(|&(_, (_, writes))| !writes).map(|(lifetime, _)| lifetime)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Owner {
    key: u64,
    graph: usize,
}

/// Disjoint ranges of bytes and who wrote each last.
#[derive(Default)]
struct Owners(BTreeMap<u64, (u64, Owner)>);

impl Owners {
    fn over(&self, bytes: &Range<u64>) -> impl Iterator<Item = (Range<u64>, Owner)> {
        let (start, end) = (bytes.start, bytes.end);
        let from = self.0.range(..=start).next_back().filter(|(_, (e, _))| *e > start).map_or(start, |(&s, _)| s);
        self.0.range(from..end.max(from)).map(move |(&s, &(e, owner))| (s.max(start)..e.min(end), owner))
    }

    fn paint(&mut self, bytes: Range<u64>, owner: Owner) {
        if bytes.is_empty() {
            return;
        }
        let overlapped: Vec<(u64, (u64, Owner))> = self
            .over(&bytes)
            .map(|(piece, _)| piece.start)
            .filter_map(|start| self.0.range(..=start).next_back().map(|(&s, &v)| (s, v)))
            .collect();
        for (start, (end, old)) in overlapped {
            self.0.remove(&start);
            if start < bytes.start {
                self.0.insert(start, (bytes.start, old));
            }
            if end > bytes.end {
                self.0.insert(bytes.end, (end, old));
            }
        }
        self.0.insert(bytes.start, (bytes.end, owner));
    }
}
