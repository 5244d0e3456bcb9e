//! Which lifetime of its address a pointer means: host time through marks, and the newest lifetime alive then.
//!
//! A captured graph freezes addresses, and one address has many lifetimes. Marks count graph nodes and allocator events
//! at the same moment; so a node belongs to the stretch of the trace between two marks, and a pointer among its
//! parameters means the lifetime of its address that is alive there: the newest, where the stretch holds two.

use std::{collections::BTreeMap, ops::Range};

/// A lifetime on the axis of allocator events.
#[derive(Debug, Clone)]
pub(super) struct Span {
    /// Its bytes.
    pub bytes: Range<u64>,
    /// Alive from after this many events …
    pub from: u32,
    /// … until this many; the number of events plus one while it lives on.
    pub until: u32,
}

/// A moment at which nodes and allocator events were both counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark {
    /// Nodes of the graph so far.
    pub nodes: u32,
    /// Allocator events so far.
    pub events: u32,
}

/// What became of the pointers.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tally {
    /// Pointers for which two lifetimes were alive in the stretch; the newer was taken.
    pub ambiguous: usize,
    /// Plain parameters into memory of the capture that nobody owned in the stretch: a use after free.
    pub dangling: usize,
}

/// Attributes pointers node by node, in host order.
pub(super) struct Attribution<'a> {
    spans: &'a [Span],
    marks: &'a [Mark],
    events: u32,
    next: usize,
    newest: BTreeMap<u64, (u64, u32)>,
    /// Until when the youngest predecessor in each lifetime's bytes was alive.
    shadowed: Vec<u32>,
    /// What became of the pointers so far.
    pub tally: Tally,
}

impl<'a> Attribution<'a> {
    /// `spans` sorted by `from`, `marks` by nodes then events.
    pub(super) fn new(spans: &'a [Span], marks: &'a [Mark], events: u32) -> Self {
        Self {
            spans,
            marks,
            events,
            next: 0,
            newest: BTreeMap::new(),
            shadowed: vec![0; spans.len()],
            tally: Tally::default(),
        }
    }

    /// The stretch of events in which `node` was enqueued.
    pub(super) fn stretch(&self, node: u32) -> Range<u32> {
        let after = self.marks.partition_point(|m| m.nodes <= node);
        let low = self.marks[..after].last().map_or(0, |m| m.events);
        let high = self.marks.get(after).map_or(self.events, |m| m.events);
        low..high
    }

    /// The lifetime that `pointer` means as a parameter of `node`; call with nodes in ascending order. What was free is
    /// the last owner's where the pointer is `firm`, and left-over bytes where it is not.
    pub(super) fn lifetime(&mut self, node: u32, pointer: u64, firm: bool) -> Option<u32> {
        let stretch = self.stretch(node);
        self.advance(stretch.end);
        let (_, &(end, newest)) = self.newest.range(..=pointer).next_back()?;
        if pointer >= end {
            return None;
        }
        if self.spans[newest as usize].until <= stretch.start {
            self.tally.dangling += usize::from(firm);
            return firm.then_some(newest);
        }
        self.tally.ambiguous += usize::from(self.shadowed[newest as usize] > stretch.start);
        Some(newest)
    }

    fn advance(&mut self, until: u32) {
        while let Some(span) = self.spans.get(self.next).filter(|s| s.from <= until) {
            self.paint(span.bytes.clone(), self.next as u32);
            self.next += 1;
        }
    }

    fn paint(&mut self, bytes: Range<u64>, lifetime: u32) {
        if bytes.is_empty() {
            return;
        }
        let first = self.newest.range(..=bytes.start).next_back().map_or(bytes.start, |(&s, _)| s);
        let overlapped: Vec<(u64, (u64, u32))> = self
            .newest
            .range(first..bytes.end)
            .filter(|(_, (end, _))| *end > bytes.start)
            .map(|(&start, &value)| (start, value))
            .collect();
        for (start, (end, old)) in overlapped {
            self.newest.remove(&start);
            let shadow = &mut self.shadowed[lifetime as usize];
            *shadow = (*shadow).max(self.spans[old as usize].until);
            if start < bytes.start {
                self.newest.insert(start, (bytes.start, old));
            }
            if end > bytes.end {
                self.newest.insert(bytes.end, (end, old));
            }
        }
        self.newest.insert(bytes.start, (bytes.end, lifetime));
    }
}
