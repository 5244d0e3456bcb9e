//! Finds every unordered pair of operations that touch the same bytes.
//!
//! Nodes are visited in topological order and leave what they touch on the shelves of a tree over the address space,
//! one list per chain, newest first. A new operation looks at the lists of the other chains on the shelves its bytes
//! meet and walks each only as far as its vector clock does not reach: everything older on that chain is ordered before
//! it. So the cost is that of the touches plus that of what is found, not of all pairs that share an address.

use std::{collections::BTreeMap, ops::Range};

use super::{Access, Capture, Hazard, Kind, Likelihood, Order, Touch, overlap::Overlap};
use crate::error::{Error, Result};

/// Hazards listed at most; the rest is counted as [`Analysis::omitted`].
const LISTED: usize = 100_000;
const NONE: u32 = u32::MAX;

/// What the analysis of one capture found.
#[derive(Debug, Clone)]
pub struct Analysis {
    /// The order it rests on.
    pub order: Order,
    /// Every hazard, by first and second operation.
    pub hazards: Vec<Hazard>,
    /// Unordered conflicting pairs that share nothing but bytes known to be harmless.
    pub benign: u64,
    /// Conflicting pairs beyond the limit of the list.
    pub omitted: u64,
    /// Unordered uses of one tensor, pair by pair, of which nobody knows whether one writes.
    pub unjudged: u64,
}

/// Analyses one capture.
pub fn analyse(capture: &Capture) -> Result<Analysis> {
    check(capture)?;
    let streams: Vec<Option<u32>> = capture.nodes.iter().map(|n| n.stream).collect();
    let order = Order::new(&streams, &capture.edges)?;
    let mut finder = Finder::new(capture, &order);
    for &node in order.topological() {
        finder.visit(node);
    }
    let Finder { found, benign, omitted, unjudged, .. } = finder;
    Ok(Analysis { hazards: found.into_values().collect(), order, benign, omitted, unjudged })
}

fn check(capture: &Capture) -> Result<()> {
    for touch in &capture.touches {
        if touch.node as usize >= capture.nodes.len() || touch.lifetime as usize >= capture.lifetimes.len() {
            return Err(Error::usage(format!(
                "touch of lifetime {} by node {} names something that the capture does not have",
                touch.lifetime, touch.node
            )));
        }
    }
    if !capture.touches.is_sorted_by_key(|t| t.node) {
        return Err(Error::usage("the touches of a capture must be sorted by node"));
    }
    Ok(())
}

struct Finder<'a> {
    capture: &'a Capture,
    order: &'a Order,
    tree: Tree,
    starts: Vec<u32>,
    seen: Vec<u32>,
    found: BTreeMap<(u32, u32, u32, u32), Hazard>,
    candidates: Vec<u32>,
    benign: u64,
    omitted: u64,
    unjudged: u64,
}

impl<'a> Finder<'a> {
    fn new(capture: &'a Capture, order: &'a Order) -> Self {
        let mut starts = vec![0_u32; capture.nodes.len() + 1];
        for touch in &capture.touches {
            starts[touch.node as usize + 1] += 1;
        }
        for node in 0..capture.nodes.len() {
            starts[node + 1] += starts[node];
        }
        Self {
            capture,
            order,
            tree: Tree::new(&capture.touches),
            starts,
            seen: vec![NONE; capture.touches.len()],
            found: BTreeMap::new(),
            candidates: Vec::new(),
            benign: 0,
            omitted: 0,
            unjudged: 0,
        }
    }

    fn visit(&mut self, node: u32) {
        let mine = self.starts[node as usize]..self.starts[node as usize + 1];
        for index in mine.clone() {
            self.meet(index);
        }
        let chain = self.order.chain(node);
        for index in mine {
            let touch = &self.capture.touches[index as usize];
            self.tree.put(touch, index, chain);
        }
    }

    fn meet(&mut self, index: u32) {
        let touch = &self.capture.touches[index as usize];
        let (capture, order) = (self.capture, self.order);
        let chain = order.chain(touch.node);
        let mut candidates = std::mem::take(&mut self.candidates);
        let span = touch.region.span();
        self.tree.lists(&span, |list, tree| {
            if list.chain == chain || (touch.access == Access::Read && !list.writes) {
                return;
            }
            let known = order.clock(touch.node, list.chain);
            let mut entry = list.newest;
            while entry != NONE {
                let Entry { touch: other, older } = tree.entries[entry as usize];
                if order.position(capture.touches[other as usize].node) <= known {
                    break;
                }
                if std::mem::replace(&mut self.seen[other as usize], index) != index {
                    candidates.push(other);
                }
                entry = older;
            }
        });
        for other in candidates.drain(..) {
            self.weigh(&capture.touches[other as usize], touch);
        }
        self.candidates = candidates;
    }

    fn weigh(&mut self, a: &Touch, b: &Touch) {
        let (first, second) = if (a.node, a.lifetime) <= (b.node, b.lifetime) { (a, b) } else { (b, a) };
        let Some((kind, likely, likelihood)) = judge(first, second) else {
            self.unjudged += u64::from(Kind::of(first.access, second.access).is_some());
            return;
        };
        let overlap = Overlap::of(&first.region, &second.region, &self.capture.benign);
        if overlap.shared == 0 {
            self.benign += u64::from(overlap.benign > 0);
            return;
        }
        let hazard = Hazard {
            kind,
            likely,
            accesses: [first.access, second.access],
            first: first.node,
            second: second.node,
            first_lifetime: first.lifetime,
            second_lifetime: second.lifetime,
            bytes: overlap.bytes,
            shared: overlap.shared,
            likelihood,
        };
        let identity = self.capture.identity(&hazard);
        if let Some(known) = self.found.get_mut(&identity) {
            merge(known, &hazard);
        } else if self.found.len() < LISTED {
            self.found.insert(identity, hazard);
        } else {
            self.omitted += 1;
        }
    }
}

/// What two unordered touches of the same bytes are to each other; none where they do no harm.
fn judge(first: &Touch, second: &Touch) -> Option<(Kind, Option<Kind>, Likelihood)> {
    let kind = Kind::of(first.access, second.access)?;
    if first.sure && second.sure && kind != Kind::Touch {
        return Some((kind, None, Likelihood::Certain));
    }
    let writes = |t: &Touch| t.access == Access::Write;
    let reads = |t: &Touch| t.access == Access::Read;
    if first.lifetime == second.lifetime {
        // Two kernels given one tensor mostly both read it: only a writer makes that a conflict, and an inferred one
        // only where both addresses are beyond doubt.
        let certain_writer = [first, second].into_iter().any(|t| writes(t) && t.sure);
        let inferred_writer = (writes(first) || writes(second)) && first.firm && second.firm;
        let likelihood = if certain_writer { Likelihood::Likely } else { Likelihood::Possible };
        return (certain_writer || inferred_writer).then_some((Kind::Touch, likely(kind), likelihood));
    }
    let likelihood = match (writes(first) || writes(second), reads(first) || reads(second)) {
        (true, _) => Likelihood::Likely,
        (false, false) => Likelihood::Possible,
        (false, true) => Likelihood::Unlikely,
    };
    Some((Kind::Touch, likely(kind), likelihood))
}

fn likely(kind: Kind) -> Option<Kind> {
    (kind != Kind::Touch).then_some(kind)
}

/// Several operands of one pair of operations are one hazard, of the gravest kind among them.
fn merge(known: &mut Hazard, more: &Hazard) {
    if gravest(known.kind, more.kind) != known.kind || known.likely < more.likely {
        known.accesses = more.accesses;
    }
    known.kind = gravest(known.kind, more.kind);
    known.likely = known.likely.max(more.likely);
    known.likelihood = known.likelihood.min(more.likelihood);
    known.bytes = known.bytes.start.min(more.bytes.start)..known.bytes.end.max(more.bytes.end);
    known.shared = known.shared.max(more.shared);
}

fn gravest(a: Kind, b: Kind) -> Kind {
    match (a, b) {
        (Kind::Touch, other) | (other, Kind::Touch) => other,
        (a, b) => a.max(b),
    }
}

/// Address ranges as a binary tree; each shelf has lists of what covers it whole and of what lies beneath it.
struct Tree {
    coordinates: Vec<u64>,
    leaves: usize,
    shelves: Vec<Shelf>,
    lists: Vec<List>,
    entries: Vec<Entry>,
}

/// The first list of touches that cover a shelf whole, and of those that meet only part of it.
#[derive(Clone, Copy)]
struct Shelf {
    whole: u32,
    beneath: u32,
}

#[derive(Clone, Copy)]
struct List {
    chain: u32,
    writes: bool,
    newest: u32,
    next: u32,
}

#[derive(Clone, Copy)]
struct Entry {
    touch: u32,
    older: u32,
}

impl Tree {
    fn new(touches: &[Touch]) -> Self {
        let mut coordinates: Vec<u64> =
            touches.iter().map(|t| t.region.span()).flat_map(|span| [span.start, span.end]).collect();
        coordinates.sort_unstable();
        coordinates.dedup();
        let leaves = coordinates.len().max(2).next_power_of_two();
        let shelves = vec![Shelf { whole: NONE, beneath: NONE }; leaves * 2];
        Self { coordinates, leaves, shelves, lists: Vec::new(), entries: Vec::new() }
    }

    /// The shelves from the root down to those that `span` covers whole, each with whether it does.
    fn shelves_of(&self, span: &Range<u64>) -> impl Iterator<Item = (usize, bool)> + use<> {
        let leaf = |byte| self.coordinates.partition_point(|&c| c < byte);
        let wanted = leaf(span.start)..leaf(span.end);
        let mut stack = vec![(1, 0, self.leaves)];
        std::iter::from_fn(move || {
            while let Some((shelf, low, high)) = stack.pop() {
                if wanted.end <= low || high <= wanted.start {
                    continue;
                }
                let whole = wanted.start <= low && high <= wanted.end;
                if !whole {
                    let middle = usize::midpoint(low, high);
                    stack.push((shelf * 2, low, middle));
                    stack.push((shelf * 2 + 1, middle, high));
                }
                return Some((shelf, whole));
            }
            None
        })
    }

    /// Visits every list that can hold a touch meeting `span`.
    fn lists(&self, span: &Range<u64>, mut visit: impl FnMut(&List, &Self)) {
        for (shelf, whole) in self.shelves_of(span) {
            let Shelf { whole: covering, beneath } = self.shelves[shelf];
            for mut list in [Some(covering), whole.then_some(beneath)].into_iter().flatten() {
                while list != NONE {
                    let known = &self.lists[list as usize];
                    visit(known, self);
                    list = known.next;
                }
            }
        }
    }

    fn put(&mut self, touch: &Touch, index: u32, chain: u32) {
        let writes = touch.access != Access::Read;
        for (shelf, whole) in self.shelves_of(&touch.region.span()) {
            let Shelf { whole: covering, beneath } = &mut self.shelves[shelf];
            let first = if whole { covering } else { beneath };
            push(first, &mut self.lists, &mut self.entries, (chain, writes), index);
        }
    }
}

/// Puts a touch at the head of its chain's list, one of those that begin at `first`.
fn push(first: &mut u32, lists: &mut Vec<List>, entries: &mut Vec<Entry>, (chain, writes): (u32, bool), touch: u32) {
    let mut at = *first;
    while at != NONE {
        let list = &lists[at as usize];
        if (list.chain, list.writes) == (chain, writes) {
            break;
        }
        at = list.next;
    }
    if at == NONE {
        at = lists.len() as u32;
        lists.push(List { chain, writes, newest: NONE, next: *first });
        *first = at;
    }
    let list = &mut lists[at as usize];
    entries.push(Entry { touch, older: list.newest });
    list.newest = entries.len() as u32 - 1;
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::{
        device::Region,
        hazard::{Benign, Lifetime, Node},
        seed::Seed,
    };

    /// Random streams, event waits, lifetimes over few addresses and strided touches of them.
    fn random(case: u64) -> Capture {
        let mut rng = Seed(case).fork("hazards").rng();
        let nodes = rng.random_range(2..40_u32);
        let streams: Vec<u32> = (0..nodes).map(|_| rng.random_range(0..4)).collect();
        let mut edges = Vec::new();
        for b in 1..nodes {
            edges.extend((0..b).rev().find(|&a| streams[a as usize] == streams[b as usize]).map(|a| (a, b)));
            if rng.random_bool(0.3) {
                edges.push((rng.random_range(0..b), b));
            }
        }
        let lifetimes: Vec<Lifetime> = (0..12)
            .map(|key| {
                let start = rng.random_range(0..96);
                Lifetime { key, bytes: start..start + rng.random_range(1..64), ..Lifetime::default() }
            })
            .collect();
        let mut touches = Vec::new();
        for node in 0..nodes {
            for _ in 0..rng.random_range(0..3) {
                let lifetime = rng.random_range(0..lifetimes.len() as u32);
                let bytes = &lifetimes[lifetime as usize].bytes;
                let len = rng.random_range(0..=(bytes.end - bytes.start).min(9));
                let row_stride = len + rng.random_range(0..9);
                let base = rng.random_range(bytes.start..bytes.end);
                let rows = (bytes.end - base).saturating_sub(len).checked_div(row_stride).unwrap_or(1);
                let access = [Access::Read, Access::Write, Access::Unknown][rng.random_range(0..3)];
                let region = Region { base, row_stride, len, rows };
                touches.push(Touch { node, lifetime, region, access, sure: access != Access::Unknown, firm: true });
            }
        }
        Capture {
            nodes: streams
                .iter()
                .map(|&s| Node { stream: case.is_multiple_of(2).then_some(s), ..Node::default() })
                .collect(),
            edges,
            lifetimes,
            touches,
            benign: vec![Benign { bytes: 20..24, reason: "page 0".to_owned() }],
            ..Capture::default()
        }
    }

    /// Every pair of touches, every pair of bytes, reachability by search: slow, and obviously right.
    fn brute_force(capture: &Capture) -> std::collections::BTreeSet<(u32, u32, u32, u32)> {
        let reaches = |from: u32, to: u32| {
            let (mut stack, mut seen) = (vec![from], vec![false; capture.nodes.len()]);
            while let Some(node) = stack.pop() {
                if node == to {
                    return true;
                }
                if !std::mem::replace(&mut seen[node as usize], true) {
                    stack.extend(capture.edges.iter().filter(|e| e.0 == node).map(|e| e.1));
                }
            }
            false
        };
        let bytes = |t: &Touch| -> Vec<u64> { (0..t.region.rows).flat_map(|r| t.region.row(r)).collect() };
        let mut found = std::collections::BTreeSet::new();
        for a in &capture.touches {
            for b in capture.touches.iter().filter(|b| b.node > a.node) {
                let same = a.lifetime == b.lifetime;
                let writes = a.access == Access::Write || b.access == Access::Write;
                let reads = a.access == Access::Read && b.access == Access::Read;
                if if same { !writes } else { reads } {
                    continue;
                }
                let shared = bytes(a).iter().any(|x| bytes(b).contains(x) && !(20..24).contains(x));
                if shared && !reaches(a.node, b.node) && !reaches(b.node, a.node) {
                    found.insert((a.node, b.node, a.lifetime, b.lifetime));
                }
            }
        }
        found
    }

    #[test]
    fn agrees_with_brute_force_on_random_graphs() {
        let (mut hazards, mut clean) = (0, 0);
        for case in 0..300 {
            let capture = random(case);
            let analysis = analyse(&capture).expect("a well-formed capture");
            let found: std::collections::BTreeSet<_> = analysis.hazards.iter().map(Hazard::key).collect();
            assert_eq!(found, brute_force(&capture), "case {case}");
            hazards += found.len();
            clean += usize::from(found.is_empty());
        }
        assert!(hazards > 1000 && clean > 20, "{hazards} hazards, {clean} clean graphs: too few to mean anything");
    }
}
