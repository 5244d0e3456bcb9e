//! From the engine's own device trace to [`Capture`]s: exact regions, declared accesses, named streams.

use std::ops::Range;

use super::{Access, Benign, Capture, Lifetime, Node, Site, Touch};
use crate::device::{CapturedGraph, LifetimeId, Op, Operand, trace};

/// The neutral form of one captured graph; conflicts inside `benign` are harmless by design.
pub fn capture(graph: &CapturedGraph, benign: &[Benign]) -> Capture {
    let mut benign = benign.to_vec();
    benign.sort_by_key(|b| b.bytes.start);
    let end = graph.ops.len() as u32;
    Capture {
        name: graph.name.clone(),
        streams: graph.streams.iter().map(|s| s.clone().into_owned()).collect(),
        nodes: graph.ops.iter().map(|(op, stream)| node(op, stream.0)).collect(),
        edges: graph.edges.clone(),
        lifetimes: graph.lifetimes.iter().map(|l| lifetime(l, end)).collect(),
        touches: touches(graph),
        benign,
        ..Capture::default()
    }
}

fn node(op: &Op, stream: u32) -> Node {
    Node {
        kernel: op.kernel.name().to_owned(),
        layer: op.layer.map(u32::from),
        stream: Some(stream),
        duration_us: None,
    }
}

fn lifetime(known: &trace::Lifetime, end: u32) -> Lifetime {
    let site = |node: u32| Site { node: node.min(end), frames: Vec::new() };
    Lifetime {
        name: known.name.clone().into_owned(),
        key: u64::from(known.id.0),
        bytes: bytes(known),
        stream: Some(known.stream.0),
        allocated: site(known.allocated_at.unwrap_or(0)),
        freed: known.freed_at.map(site),
        inside: known.allocated_at.is_some(),
        untraced: false,
    }
}

fn bytes(known: &trace::Lifetime) -> Range<u64> {
    known.address..known.address + known.bytes
}

fn touches(graph: &CapturedGraph) -> Vec<Touch> {
    let mut touches = Vec::new();
    for (node, (op, _)) in graph.ops.iter().enumerate() {
        let mut add = |operand: &Operand, access| {
            let Some(lifetime) = index(graph, operand.lifetime) else { return };
            touches.push(Touch { node: node as u32, lifetime, region: operand.region, access, sure: true, firm: true });
        };
        op.reads.iter().for_each(|operand| add(operand, Access::Read));
        op.writes.iter().for_each(|operand| add(operand, Access::Write));
    }
    touches
}

fn index(graph: &CapturedGraph, id: LifetimeId) -> Option<u32> {
    graph.lifetimes.binary_search_by_key(&id, |l| l.id).ok().map(|at| at as u32)
}
