//! What would remove a hazard: each fix is applied to the graph and the graph analysed again.

use std::collections::{BTreeMap, BTreeSet};

use super::{Analysis, Capture, Lifetime, analyse, cause::Cause};
use crate::error::Result;

/// Blocks of the allocator start at multiples of this.
const ALIGNMENT: u64 = 512;
/// Memory that nobody has is looked for below this address.
const ADDRESSES: u64 = 1 << 60;

/// A way to remove a hazard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remedy {
    /// Keep a reference to the tensor until its stream has joined those that use it.
    HoldUntilJoin,
    /// Allocate the tensor once, before the capture, and keep it.
    PersistentBuffer,
    /// Tell the allocator who else uses the block: it then waits for the end of the capture before reusing it.
    RecordStream,
    /// Record an event after the first operation and wait for it before the second.
    Event,
}

impl Remedy {
    /// Every remedy.
    pub const ALL: [Self; 4] = [Self::HoldUntilJoin, Self::PersistentBuffer, Self::RecordStream, Self::Event];

    /// The identifier in machine-readable reports.
    pub fn label(self) -> &'static str {
        match self {
            Self::HoldUntilJoin => "hold-until-join",
            Self::PersistentBuffer => "persistent-buffer",
            Self::RecordStream => "record-stream",
            Self::Event => "event",
        }
    }
}

/// A remedy that was applied to the graph, and what the analysis said then.
#[derive(Debug, Clone)]
pub struct Fix {
    /// Which one.
    pub remedy: Remedy,
    /// What to do, in words.
    pub what: String,
    /// How many of the cause's hazards are gone.
    pub removed: usize,
    /// How many of them remain.
    pub left: usize,
    /// Hazards that were not there before.
    pub added: usize,
    /// Device memory it costs.
    pub extra_bytes: u64,
    /// Event waits it adds.
    pub waits: usize,
}

impl Fix {
    /// True when the graph, so changed, has none of the cause's hazards and no new one.
    pub fn verified(&self) -> bool {
        self.left == 0 && self.added == 0
    }
}

/// Applies every applicable remedy to the graph and analyses it again; cheapest first.
pub fn fixes(capture: &Capture, analysis: &Analysis, cause: &Cause) -> Result<Vec<Fix>> {
    let mut found = Vec::new();
    for remedy in Remedy::ALL {
        if let Some(changed) = apply(capture, analysis, cause, remedy) {
            found.push(verify(analysis, cause, remedy, &changed, capture)?);
        }
    }
    found.sort_by_key(|f| (!f.verified(), f.waits, f.extra_bytes, f.remedy));
    Ok(found)
}

/// The graph as it would be with the remedy, and its price.
#[derive(Debug)]
pub struct Changed {
    /// The graph.
    pub capture: Capture,
    extra_bytes: u64,
    waits: usize,
    /// Lifetimes that were given other bytes.
    moved: usize,
}

fn verify(analysis: &Analysis, cause: &Cause, remedy: Remedy, changed: &Changed, capture: &Capture) -> Result<Fix> {
    let again = analyse(&changed.capture)?;
    let remaining: BTreeSet<_> = again.hazards.iter().map(|h| capture.identity(h)).collect();
    let before: BTreeSet<_> = analysis.hazards.iter().map(|h| capture.identity(h)).collect();
    let left = cause.hazards.iter().filter(|&&i| remaining.contains(&capture.identity(&analysis.hazards[i]))).count();
    Ok(Fix {
        remedy,
        what: describe(capture, analysis, cause, remedy, changed.moved),
        removed: cause.hazards.len() - left,
        left,
        added: remaining.difference(&before).count(),
        extra_bytes: changed.extra_bytes,
        waits: changed.waits,
    })
}

fn describe(capture: &Capture, analysis: &Analysis, cause: &Cause, remedy: Remedy, moved: usize) -> String {
    let head = &analysis.hazards[cause.hazards[0]];
    let [first, second] = [head.first, head.second].map(|n| &capture.nodes[n as usize].kernel);
    let user = match capture.nodes[head.first as usize].stream.and_then(|s| capture.streams.get(s as usize)) {
        Some(stream) => format!("the {stream} stream"),
        None => "the stream that uses it".to_owned(),
    };
    let tensor = &cause.tensor;
    match remedy {
        Remedy::HoldUntilJoin => format!("keep the reference to `{tensor}` until the join"),
        Remedy::PersistentBuffer if moved > 1 => {
            format!("allocate `{tensor}` before the capture, one for each of its {moved} allocations")
        }
        Remedy::PersistentBuffer => format!("allocate `{tensor}` once, before the capture"),
        Remedy::RecordStream => format!("call record_stream on `{tensor}` for {user}"),
        Remedy::Event => format!("record an event after `{first}` and wait for it before `{second}`"),
    }
}

/// The graph with `remedy` applied to every lifetime of the cause; none where it does not apply.
pub fn apply(capture: &Capture, analysis: &Analysis, cause: &Cause, remedy: Remedy) -> Option<Changed> {
    if remedy == Remedy::Event {
        return Some(with_events(capture, analysis, cause));
    }
    let recycled: BTreeSet<u32> = cause
        .hazards
        .iter()
        .map(|&i| &analysis.hazards[i])
        .filter(|h| h.recycled())
        .map(|h| h.first_lifetime)
        .collect();
    if recycled.is_empty() {
        return None;
    }
    let sizes = || recycled.iter().map(|&l| size(capture, l));
    let sum = || sizes().fold(0, u64::saturating_add);
    match remedy {
        Remedy::HoldUntilJoin => {
            let joins = joins(capture, analysis, &recycled)?;
            let moved = recycled.iter().zip(joins).flat_map(|(&l, join)| reusers(capture, l, join)).collect();
            relocate(capture, &moved, sizes().max()?)
        }
        Remedy::RecordStream => {
            let moved = recycled.iter().flat_map(|&l| reusers(capture, l, u32::MAX)).collect();
            relocate(capture, &moved, sum())
        }
        // Each of the lifetimes has memory of its own: one buffer for all would need their order as well.
        _ => relocate(capture, &recycled, sum()),
    }
}

fn size(capture: &Capture, lifetime: u32) -> u64 {
    let bytes = &capture.lifetimes[lifetime as usize].bytes;
    (bytes.end - bytes.start).next_multiple_of(ALIGNMENT)
}

/// For each lifetime the first operation, in host order, that is ordered after every use of it and comes after its drop.
fn joins(capture: &Capture, analysis: &Analysis, lifetimes: &BTreeSet<u32>) -> Option<Vec<u32>> {
    let mut uses: BTreeMap<u32, Vec<u32>> = lifetimes.iter().map(|&l| (l, Vec::new())).collect();
    for touch in &capture.touches {
        if let Some(nodes) = uses.get_mut(&touch.lifetime) {
            nodes.push(touch.node);
        }
    }
    let join = |(lifetime, uses): (u32, Vec<u32>)| {
        let Lifetime { freed, stream: owner, .. } = &capture.lifetimes[lifetime as usize];
        (freed.as_ref()?.node..capture.nodes.len() as u32).find(|&node| {
            let same_stream = owner.is_none() || capture.nodes[node as usize].stream == *owner;
            same_stream && uses.iter().all(|&used| analysis.order.before(used, node))
        })
    };
    uses.into_iter().map(join).collect()
}

/// Lifetimes that were given bytes of `lifetime` after its drop and no later than at node `until`.
fn reusers(capture: &Capture, lifetime: u32, until: u32) -> Vec<u32> {
    let bytes = &capture.lifetimes[lifetime as usize].bytes;
    (lifetime + 1..capture.lifetimes.len() as u32)
        .filter(|&later| {
            let other = &capture.lifetimes[later as usize];
            other.allocated.node <= until && other.bytes.start < bytes.end && bytes.start < other.bytes.end
        })
        .collect()
}

/// The same graph, for `extra_bytes` more, with the given lifetimes in memory that nobody else has; none where there is
/// no room for them.
fn relocate(capture: &Capture, moved: &BTreeSet<u32>, extra_bytes: u64) -> Option<Changed> {
    let mut changed = capture.clone();
    let mut fresh = capture.lifetimes.iter().map(|l| l.bytes.end).max().unwrap_or(0).next_multiple_of(ALIGNMENT);
    let mut shift = BTreeMap::new();
    for &lifetime in moved {
        let bytes = &mut changed.lifetimes[lifetime as usize].bytes;
        let length = bytes.end - bytes.start;
        shift.insert(lifetime, (bytes.start, fresh));
        *bytes = fresh..fresh + length;
        fresh = (fresh + length).next_multiple_of(ALIGNMENT);
        if fresh > ADDRESSES {
            return None;
        }
    }
    for touch in &mut changed.touches {
        if let Some(&(from, to)) = shift.get(&touch.lifetime) {
            touch.region.base = to + touch.region.base.saturating_sub(from);
        }
    }
    Some(Changed { capture: changed, extra_bytes, waits: 0, moved: moved.len() })
}

/// One event per pair of chains and lifetimes: from the last early operation to the first late one.
fn with_events(capture: &Capture, analysis: &Analysis, cause: &Cause) -> Changed {
    let mut groups: BTreeMap<_, Vec<(u32, u32)>> = BTreeMap::new();
    for hazard in cause.hazards.iter().map(|&i| &analysis.hazards[i]) {
        let chains = (analysis.order.chain(hazard.first), analysis.order.chain(hazard.second));
        groups
            .entry((chains, hazard.first_lifetime, hazard.second_lifetime))
            .or_default()
            .push((hazard.first, hazard.second));
    }
    let mut edges = BTreeSet::new();
    for pairs in groups.into_values() {
        let from = pairs.iter().map(|p| p.0).max();
        let to = pairs.iter().map(|p| p.1).min();
        match (from, to) {
            (Some(from), Some(to)) if from < to => {
                edges.insert((from, to));
            }
            _ => edges.extend(pairs),
        }
    }
    let mut changed = capture.clone();
    changed.edges.extend(&edges);
    Changed { capture: changed, extra_bytes: 0, waits: edges.len(), moved: 0 }
}
