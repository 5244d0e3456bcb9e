//! The machine form, `toolstorm-hazards/1`; `docs/schemas/hazards.schema.json` is its schema.

use serde::Serialize;

use crate::hazard::{
    Capture, Frame, Graph, Group, Hazard, Lifetime, Report, Site,
    bite::Bite,
    cause::{Cause, missing_edge},
    fix::Fix,
};

/// The version of this form.
pub const SCHEMA: &str = "toolstorm-hazards/1";

/// A whole report.
#[derive(Debug, Serialize)]
pub struct Document {
    schema: &'static str,
    groups: Vec<GroupForm>,
    graphs: Vec<GraphForm>,
    missing: u64,
    warnings: Vec<String>,
    replay: Vec<ClobberForm>,
    tensors: Vec<String>,
    hazards: u64,
}

/// An arm of a matrix or a process of a program.
#[derive(Debug, Serialize)]
struct GroupForm {
    name: String,
    graphs: usize,
    hazards: u64,
    tensors: Vec<String>,
    bites: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct GraphForm {
    name: String,
    group: Option<String>,
    nodes: usize,
    edges: usize,
    lifetimes: usize,
    chains: u32,
    benign: u64,
    omitted: u64,
    unjudged: u64,
    warnings: Vec<String>,
    causes: Vec<CauseForm>,
    hazards: Vec<HazardForm>,
}

#[derive(Debug, Serialize)]
struct CauseForm {
    tensor: String,
    why: String,
    hazards: usize,
    fixes: Vec<FixForm>,
}

#[derive(Debug, Serialize)]
struct FixForm {
    remedy: &'static str,
    what: String,
    verified: bool,
    removed: usize,
    left: usize,
    added: usize,
    extra_bytes: u64,
    waits: usize,
}

#[derive(Debug, Serialize)]
struct HazardForm {
    kind: &'static str,
    likely: Option<&'static str>,
    likelihood: &'static str,
    cause: usize,
    first: Operation,
    second: Operation,
    first_tensor: Tensor,
    second_tensor: Tensor,
    bytes: [u64; 2],
    shared_bytes: u64,
    slack_us: Option<f64>,
    bites: Option<&'static str>,
    why: String,
}

#[derive(Debug, Serialize)]
struct Operation {
    node: u32,
    kernel: String,
    layer: Option<u32>,
    stream: Option<String>,
    chain: u32,
    position: u32,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    bytes: [u64; 2],
    stream: Option<String>,
    allocated: Place,
    freed: Option<Place>,
}

#[derive(Debug, Serialize)]
struct Place {
    node: u32,
    frames: Vec<FrameForm>,
}

#[derive(Debug, Serialize)]
struct FrameForm {
    function: String,
    file: Option<String>,
    line: u32,
}

#[derive(Debug, Serialize)]
struct ClobberForm {
    graph: String,
    by: Option<String>,
    tensor: String,
    bytes: [u64; 2],
    why: String,
}

/// The report as a document to serialise.
pub fn document(report: &Report) -> Document {
    let name = |graph: usize| report.graphs.get(graph).map_or_else(String::new, Graph::full_name);
    Document {
        schema: SCHEMA,
        groups: report.groups().iter().map(group).collect(),
        missing: report.missing,
        warnings: report.warnings.clone(),
        graphs: report.graphs.iter().map(graph).collect(),
        replay: report
            .clobbers
            .iter()
            .map(|c| ClobberForm {
                graph: name(c.graph),
                by: c.by.map(name),
                tensor: c.tensor.clone(),
                bytes: [c.bytes.start, c.bytes.end],
                why: c.why.clone(),
            })
            .collect(),
        tensors: owned(report.tensors()),
        hazards: report.hazards(),
    }
}

fn owned(names: Vec<&str>) -> Vec<String> {
    names.into_iter().map(str::to_owned).collect()
}

fn group(group: &Group) -> GroupForm {
    GroupForm {
        name: group.name.to_owned(),
        graphs: group.graphs.len(),
        hazards: group.hazards(),
        tensors: owned(group.tensors()),
        bites: group.bite().map(Bite::label),
    }
}

fn graph(graph: &Graph) -> GraphForm {
    let Graph { capture, analysis, causes, .. } = graph;
    let mut cause_of = vec![0; analysis.hazards.len()];
    for (index, cause) in causes.iter().enumerate() {
        for &hazard in &cause.hazards {
            cause_of[hazard] = index;
        }
    }
    GraphForm {
        name: capture.name.clone(),
        group: (!capture.group.is_empty()).then(|| capture.group.clone()),
        nodes: capture.nodes.len(),
        edges: capture.edges.len(),
        lifetimes: capture.lifetimes.len(),
        chains: analysis.order.chains(),
        benign: analysis.benign,
        omitted: analysis.omitted,
        unjudged: analysis.unjudged,
        warnings: capture.warnings.clone(),
        causes: causes.iter().map(cause).collect(),
        hazards: analysis.hazards.iter().zip(cause_of).map(|(h, cause)| hazard(graph, h, cause)).collect(),
    }
}

fn cause(cause: &Cause) -> CauseForm {
    let fix = |fix: &Fix| FixForm {
        remedy: fix.remedy.label(),
        what: fix.what.clone(),
        verified: fix.verified(),
        removed: fix.removed,
        left: fix.left,
        added: fix.added,
        extra_bytes: fix.extra_bytes,
        waits: fix.waits,
    };
    CauseForm {
        tensor: cause.tensor.clone(),
        why: cause.why.clone(),
        hazards: cause.hazards.len(),
        fixes: cause.fixes.iter().map(fix).collect(),
    }
}

fn hazard(graph: &Graph, hazard: &Hazard, cause: usize) -> HazardForm {
    let capture = &graph.capture;
    let estimate = graph.schedule.as_ref().map(|s| s.estimate(hazard));
    HazardForm {
        kind: hazard.kind.label(),
        likely: hazard.likely.map(super::super::Kind::label),
        likelihood: hazard.likelihood.label(),
        cause,
        first: operation(graph, hazard.first),
        second: operation(graph, hazard.second),
        first_tensor: tensor(capture, hazard.first_lifetime),
        second_tensor: tensor(capture, hazard.second_lifetime),
        bytes: [hazard.bytes.start, hazard.bytes.end],
        shared_bytes: hazard.shared,
        slack_us: estimate.map(|e| (e.slack_us * 1000.0).round() / 1000.0),
        bites: estimate.map(|e| e.bite.label()),
        why: missing_edge(capture, hazard),
    }
}

fn operation(graph: &Graph, node: u32) -> Operation {
    let known = &graph.capture.nodes[node as usize];
    Operation {
        node,
        kernel: known.kernel.clone(),
        layer: known.layer,
        stream: stream(&graph.capture, known.stream),
        chain: graph.analysis.order.chain(node),
        position: graph.analysis.order.position(node),
    }
}

fn stream(capture: &Capture, stream: Option<u32>) -> Option<String> {
    capture.streams.get(stream? as usize).cloned()
}

fn tensor(capture: &Capture, lifetime: u32) -> Tensor {
    let Lifetime { name, bytes, stream: owner, allocated, freed, .. } = &capture.lifetimes[lifetime as usize];
    Tensor {
        name: name.clone(),
        bytes: [bytes.start, bytes.end],
        stream: stream(capture, *owner),
        allocated: place(allocated),
        freed: freed.as_ref().map(place),
    }
}

fn place(site: &Site) -> Place {
    let frame = |Frame { function, file, line }: &Frame| FrameForm {
        function: function.clone(),
        file: file.clone(),
        line: *line,
    };
    Place { node: site.node, frames: site.frames.iter().map(frame).collect() }
}
