//! Hazards that one mistake explains, and the missing edge in words.

use std::collections::BTreeMap;

use super::{Access, Analysis, Capture, Hazard, Kind, Lifetime, Node, Site, fix::Fix};

/// One mistake of the program: a tensor dropped too early, or two operations nobody ordered.
#[derive(Debug, Clone)]
pub struct Cause {
    /// What went wrong, in one sentence, told with the cause's gravest hazard.
    pub why: String,
    /// The tensor whose bytes are in question.
    pub tensor: String,
    /// True when the tensor's bytes were recycled too early; false when two uses of one tensor are unordered.
    pub recycled: bool,
    /// Its hazards, as indices into [`Analysis::hazards`]; the first is the one to read.
    pub hazards: Vec<usize>,
    /// What would remove them, cheapest first, each applied to the graph and analysed again.
    pub fixes: Vec<Fix>,
}

/// Groups hazards by the mistake behind them, most likely first.
pub fn causes(capture: &Capture, analysis: &Analysis) -> Vec<Cause> {
    let mut groups: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (index, hazard) in analysis.hazards.iter().enumerate() {
        groups.entry(signature(capture, hazard)).or_default().push(index);
    }
    let mut found: Vec<Cause> = groups.into_values().map(|hazards| cause(capture, analysis, hazards)).collect();
    found.sort_by_key(|c| {
        let head = &analysis.hazards[c.hazards[0]];
        (head.likelihood, head.first, head.second)
    });
    found
}

fn cause(capture: &Capture, analysis: &Analysis, mut hazards: Vec<usize>) -> Cause {
    hazards.sort_by_key(|&i| {
        let hazard = &analysis.hazards[i];
        (hazard.likelihood, hazard.first, hazard.second)
    });
    let head = &analysis.hazards[hazards[0]];
    let tensor = capture.lifetimes[head.first_lifetime as usize].name.clone();
    Cause { why: missing_edge(capture, head), tensor, recycled: head.recycled(), hazards, fixes: Vec::new() }
}

/// Equal for hazards of one mistake: the layers of a model repeat it, the bytes differ.
fn signature(capture: &Capture, hazard: &Hazard) -> String {
    let tensor = &capture.lifetimes[hazard.first_lifetime as usize];
    if hazard.recycled() {
        return format!("{}\n{}", tensor.name, tensor.freed.as_ref().map_or_else(String::new, place));
    }
    let [first, second] = [hazard.first, hazard.second].map(|n| &capture.nodes[n as usize].kernel);
    format!("{}\n{first}\n{second}", tensor.name)
}

/// The missing edge in one sentence.
pub fn missing_edge(capture: &Capture, hazard: &Hazard) -> String {
    let [first, second] = [hazard.first, hazard.second].map(|n| operation(capture, n));
    let tensor = &capture.lifetimes[hazard.first_lifetime as usize];
    let kind = hazard.likely.unwrap_or(hazard.kind);
    if hazard.recycled() {
        let [early, late] = hazard.accesses.map(verb);
        return format!(
            "{second} may {late} bytes that {first} still {}: `{}` was dropped{} before {}",
            third_person(early),
            tensor.name,
            tensor.freed.as_ref().map(place).filter(|p| !p.is_empty()).map_or_else(String::new, |p| format!(" at {p}")),
            before_what(capture, tensor)
        );
    }
    let name = &tensor.name;
    match kind {
        Kind::War => format!("{second} may overwrite `{name}` while {first} still reads it: no event orders them"),
        Kind::Raw => format!("{second} may read `{name}` before {first} has written it: no event orders them"),
        Kind::Waw => format!("{first} and {second} both write `{name}`: no event decides whose bytes stay"),
        Kind::Touch => format!("{first} and {second} both touch `{name}`: no event orders them"),
    }
}

fn verb(access: Access) -> &'static str {
    match access {
        Access::Read => "read",
        Access::Write => "write",
        Access::Unknown => "touch",
    }
}

fn third_person(verb: &str) -> String {
    format!("{verb}{}", if verb.ends_with("ch") { "es" } else { "s" })
}

fn before_what(capture: &Capture, tensor: &Lifetime) -> String {
    match tensor.stream.and_then(|s| capture.streams.get(s as usize)) {
        Some(owner) => format!("{owner} joined the stream that uses it"),
        None => "the streams joined".to_owned(),
    }
}

/// A node as a sentence names it: kernel, layer, stream.
pub fn operation(capture: &Capture, node: u32) -> String {
    let Node { kernel, layer, stream, .. } = &capture.nodes[node as usize];
    let layer = layer.map_or_else(String::new, |layer| format!(" (layer {layer})"));
    match stream.and_then(|s| capture.streams.get(s as usize)) {
        Some(stream) => format!("`{kernel}`{layer} on {stream}"),
        None => format!("`{kernel}`{layer} (node {node})"),
    }
}

/// A place in the user's program: the innermost frame, or where in the capture it was.
pub fn place(site: &Site) -> String {
    match site.frames.first() {
        Some(frame) => match &frame.file {
            Some(file) => {
                let file = file.rsplit('/').next().unwrap_or(file);
                format!("{file}:{} in {}", frame.line, frame.function)
            }
            None => format!("{}:{}", frame.function, frame.line),
        },
        None => String::new(),
    }
}
