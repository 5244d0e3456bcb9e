//! From PyTorch capture files (`toolstorm-capture/1`) to [`Capture`]s.
//!
//! The exporter beside this file ([`EXPORTER`]) writes them: graph nodes with their raw parameter bytes, edges, the
//! allocator's trace, and marks that tie the two together. Pointers sit anywhere in the parameter bytes, 8-byte
//! aligned; each that falls into a lifetime alive at its node's moment is a touch of that lifetime.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::{
    Access, Capture, Frame, Lifetime, Node, Site, Touch,
    attribute::{Attribution, Mark, Span},
    mangle::{const_parameters, short_name},
};
use crate::{
    device::Region,
    error::{Error, Result},
};

/// The Python module that writes capture files; needs torch and cuda-bindings only.
pub const EXPORTER: &str = include_str!("torch_capture.py");
/// The Python module that wraps every capture of a process that never heard of us.
pub const SITECUSTOMIZE: &str = include_str!("sitecustomize.py");

const FORMAT: &str = "toolstorm-capture/1";
/// Without marks a pointer means every lifetime of its address: beyond this many touches that means nothing any more.
const UNMARKED_LIMIT: usize = 4_000_000;

/// A capture file, as written.
#[derive(Debug, Deserialize)]
struct File {
    format: String,
    #[serde(default)]
    name: Option<String>,
    /// What the process is called among those of its program.
    #[serde(default)]
    process: Option<String>,
    nodes: Vec<RawNode>,
    edges: Vec<(u32, u32)>,
    #[serde(default)]
    marks: Vec<RawMark>,
    #[serde(default)]
    stacks: Vec<Vec<RawFrame>>,
    #[serde(default)]
    allocations: Vec<Event>,
    /// Blocks alive when the capture began.
    #[serde(default)]
    live: Option<Vec<Event>>,
    #[serde(default)]
    warnings: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct RawNode {
    kind: String,
    #[serde(default)]
    name: Option<String>,
    /// The demangled name with parameter types, where the exporter could tell.
    #[serde(default)]
    signature: Option<String>,
    #[serde(default)]
    params: Vec<String>,
    /// Bytes of one row of a copy or memset.
    #[serde(default)]
    bytes: Option<u64>,
    #[serde(default)]
    rows: Option<u64>,
    /// Row strides of a copy's source and destination; of a memset's destination.
    #[serde(default)]
    pitch: Vec<u64>,
    /// What a child graph holds.
    #[serde(default)]
    nodes: Vec<RawNode>,
    #[serde(default)]
    edges: Vec<(u32, u32)>,
}

/// `[nodes, allocations, frees]`, and an index into `stacks`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum RawMark {
    Plain(i64, u32, u32),
    Stacked(i64, u32, u32, Option<u32>),
}

#[derive(Debug, Deserialize)]
struct Event {
    #[serde(default)]
    action: String,
    addr: u64,
    size: u64,
    #[serde(default, rename = "where")]
    frames: Vec<RawFrame>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum RawFrame {
    /// `function:line`.
    Text(String),
    Full {
        function: String,
        file: String,
        line: u32,
    },
}

const HOW: &str = "write captures with the helper that `toolstorm hazards exporter` prints";

/// Reads one capture; `name` is what reports call it unless the file says so itself.
pub fn read(text: &str, name: &str) -> Result<Capture> {
    Pool::default().read(text, name)
}

/// Reads captures of one pool, in the order in which they were captured.
#[derive(Debug, Default)]
pub struct Pool {
    /// Identity, by address and size, of what was alive when the capture before ended.
    keys: BTreeMap<(u64, u64), u64>,
    next: u64,
}

impl Pool {
    /// Reads the next capture of the pool.
    pub fn read(&mut self, text: &str, name: &str) -> Result<Capture> {
        let file: File = serde_json::from_str(text)
            .map_err(|e| Error::usage(format!("{name}: not a capture file: {e}")).hint(HOW))?;
        if file.format != FORMAT {
            let message = format!("{name}: format `{}` is not `{FORMAT}`", file.format);
            return Err(Error::usage(message).hint(HOW));
        }
        self.capture(&file, name).map_err(|e| e.within(name))
    }

    fn capture(&mut self, file: &File, name: &str) -> Result<Capture> {
        let mut capture = Capture {
            name: file.name.clone().unwrap_or_else(|| name.to_owned()),
            group: file.process.clone().unwrap_or_default(),
            warnings: file.warnings.clone(),
            ..Capture::default()
        };
        let flat = Flat::of(file)?;
        let axis = Axis::of(file, &flat, &mut capture.warnings)?;
        let pointers = flat.nodes.iter().map(|(_, node)| pointers(node)).collect::<Result<Vec<_>>>()?;
        capture.nodes = flat.nodes.iter().map(|(_, node)| Node { kernel: label(node), ..Node::default() }).collect();
        capture.lifetimes = self.identify(&axis);
        if file.live.is_some() {
            capture.alive = Some(capture.lifetimes.iter().filter(|l| !l.inside).map(|l| l.key).collect());
        }
        if axis.marks.is_empty() && !axis.spans.is_empty() {
            capture.warnings.push(UNMARKED.to_owned());
            attribute_to_all(&mut capture, &axis, &pointers)?;
        } else {
            attribute(&mut capture, &axis, &flat, &pointers);
        }
        capture.edges = flat.edges;
        first_touch_writes(&mut capture);
        name_lifetimes(&mut capture);
        Ok(capture)
    }

    /// The capture's lifetimes, those that earlier captures left alive under their old identity.
    fn identify(&mut self, axis: &Axis) -> Vec<Lifetime> {
        let mut keys = BTreeMap::new();
        let mut lifetimes = Vec::with_capacity(axis.spans.len());
        for ((span, born), died) in axis.spans.iter().zip(&axis.births).zip(&axis.deaths) {
            let place = (span.bytes.start, span.bytes.end - span.bytes.start);
            let inside = span.from > 0;
            let known = self.keys.get(&place).copied().filter(|_| !inside);
            let key = known.unwrap_or_else(|| {
                self.next += 1;
                self.next
            });
            if died.is_none() {
                keys.insert(place, key);
            }
            lifetimes.push(Lifetime {
                key,
                bytes: span.bytes.clone(),
                allocated: born.clone(),
                freed: died.clone(),
                inside,
                ..Lifetime::default()
            });
        }
        self.keys = keys;
        lifetimes
    }
}

const UNMARKED: &str = "the capture has no marks, so a pointer means every lifetime of its address: expect false \
                        hazards, and export again with marks to be rid of them";

/// The graph with child graphs inlined; each node with the index of its top-level node.
struct Flat<'a> {
    nodes: Vec<(u32, &'a RawNode)>,
    edges: Vec<(u32, u32)>,
    /// The first inlined node of every top-level node, and the number of nodes at the end.
    starts: Vec<u32>,
}

impl<'a> Flat<'a> {
    fn of(file: &'a File) -> Result<Self> {
        let mut flat = Self { nodes: Vec::new(), edges: Vec::new(), starts: Vec::new() };
        flat.inline(&file.nodes, &file.edges, None)?;
        flat.starts.push(flat.nodes.len() as u32);
        Ok(flat)
    }

    /// Inlines one graph and returns its first and its last nodes.
    fn inline(&mut self, nodes: &'a [RawNode], edges: &[(u32, u32)], top: Option<u32>) -> Result<(Vec<u32>, Vec<u32>)> {
        let mut ends = Vec::with_capacity(nodes.len());
        for (index, node) in nodes.iter().enumerate() {
            let at = self.nodes.len() as u32;
            if top.is_none() {
                self.starts.push(at);
            }
            let top = top.unwrap_or(index as u32);
            if node.nodes.is_empty() {
                self.nodes.push((top, node));
                ends.push((vec![at], vec![at]));
            } else {
                ends.push(self.inline(&node.nodes, &node.edges, Some(top))?);
            }
        }
        let (mut has_before, mut has_after) = (vec![false; nodes.len()], vec![false; nodes.len()]);
        for &(a, b) in edges {
            let (Some(from), Some(to)) = (ends.get(a as usize), ends.get(b as usize)) else {
                let message = format!("edge [{a}, {b}] names a node beyond the {} of its graph", nodes.len());
                return Err(Error::usage(message));
            };
            (has_after[a as usize], has_before[b as usize]) = (true, true);
            self.edges.extend(from.1.iter().flat_map(|&f| to.0.iter().map(move |&t| (f, t))));
        }
        let firsts = ends.iter().zip(&has_before).filter(|(_, before)| !**before).flat_map(|(e, _)| e.0.clone());
        let lasts = ends.iter().zip(&has_after).filter(|(_, after)| !**after).flat_map(|(e, _)| e.1.clone());
        Ok((firsts.collect(), lasts.collect()))
    }
}

/// Host time: allocator events, the lifetimes they bound, and the marks that tie them to nodes.
struct Axis {
    events: u32,
    spans: Vec<Span>,
    births: Vec<Site>,
    deaths: Vec<Option<Site>>,
    marks: Vec<Mark>,
}

impl Axis {
    fn of(file: &File, flat: &Flat, warnings: &mut Vec<String>) -> Result<Self> {
        let trace: Vec<&Event> =
            file.allocations.iter().filter(|e| matches!(e.action.as_str(), "alloc" | "free_requested")).collect();
        let marks = Marks::of(file, &trace, warnings);
        let mut axis = Self {
            events: trace.len() as u32,
            spans: Vec::new(),
            births: Vec::new(),
            deaths: Vec::new(),
            marks: marks.marks.iter().map(|m| m.0).collect(),
        };
        let mut alive: BTreeMap<u64, usize> = BTreeMap::new();
        for block in file.live.iter().flatten() {
            axis.birth(block, 0, Site { node: 0, frames: user_frames(&block.frames) }, &mut alive)?;
        }
        for (at, event) in trace.iter().enumerate() {
            let site = marks.site(at as u32, event, file, flat);
            if event.action == "alloc" {
                axis.birth(event, at as u32 + 1, site, &mut alive)?;
            } else if let Some(lifetime) = alive.remove(&event.addr) {
                axis.spans[lifetime].until = at as u32 + 1;
                axis.deaths[lifetime] = Some(site);
            }
        }
        Ok(axis)
    }

    fn birth(&mut self, block: &Event, from: u32, site: Site, alive: &mut BTreeMap<u64, usize>) -> Result<()> {
        let end = block.addr.checked_add(block.size).ok_or_else(|| {
            Error::usage(format!(
                "allocation of {} bytes at {:#x} ends beyond the address space",
                block.size, block.addr
            ))
        })?;
        alive.insert(block.addr, self.spans.len());
        self.spans.push(Span { bytes: block.addr..end, from, until: u32::MAX });
        self.births.push(site);
        self.deaths.push(None);
        Ok(())
    }
}

/// Marks whose counts the trace confirms, each with the user's stack at that moment.
struct Marks {
    marks: Vec<(Mark, Option<u32>)>,
}

impl Marks {
    fn of(file: &File, trace: &[&Event], warnings: &mut Vec<String>) -> Self {
        let mut known = BTreeMap::from([((0, 0), 0_u32)]);
        let (mut allocations, mut frees) = (0_u32, 0_u32);
        for (at, event) in trace.iter().enumerate() {
            if event.action == "alloc" {
                allocations += 1;
            } else {
                frees += 1;
            }
            known.insert((allocations, frees), at as u32 + 1);
        }
        let mut marks = Vec::with_capacity(file.marks.len());
        let mut strangers = 0;
        for mark in &file.marks {
            let (nodes, allocations, frees, stack) = match *mark {
                RawMark::Plain(n, a, f) => (n, a, f, None),
                RawMark::Stacked(n, a, f, stack) => (n, a, f, stack),
            };
            match (u32::try_from(nodes), known.get(&(allocations, frees))) {
                (Ok(nodes), Some(&events)) => marks.push((Mark { nodes, events }, stack)),
                (Ok(_), None) => strangers += 1,
                (Err(_), _) => {}
            }
        }
        if strangers > 0 {
            warnings.push(format!(
                "{strangers} of {} marks count allocator events that the trace does not hold; they are ignored",
                file.marks.len()
            ));
        }
        marks.sort_by_key(|(mark, _)| (mark.nodes, mark.events));
        Self { marks }
    }

    /// The place in the user's program at which an allocator event happened.
    fn site(&self, event: u32, raw: &Event, file: &File, flat: &Flat) -> Site {
        let after = self.marks.partition_point(|(m, _)| m.events <= event);
        let nodes = self.marks[..after].last().map_or(0, |(m, _)| m.nodes) as usize;
        let node = flat.starts[nodes.min(flat.starts.len() - 1)];
        let mut frames = user_frames(&raw.frames);
        if frames.is_empty() {
            let stack = self.marks.get(after).and_then(|(_, stack)| *stack);
            frames = stack.and_then(|s| file.stacks.get(s as usize)).map_or_else(Vec::new, |s| user_frames(s));
        }
        Site { node, frames }
    }
}

/// Frames without those of PyTorch and of the exporter.
fn user_frames(raw: &[RawFrame]) -> Vec<Frame> {
    const INTERNAL: [&str; 5] = ["_fn", "inner", "__torch_dispatch__", "decorate_context", "_wrapped_call_impl"];
    let frames = raw.iter().map(|frame| match frame {
        RawFrame::Full { function, file, line } => {
            Frame { function: function.clone(), file: Some(file.clone()), line: *line }
        }
        RawFrame::Text(text) => {
            let (function, line) = text.rsplit_once(':').unwrap_or((text, ""));
            Frame { function: function.to_owned(), file: None, line: line.parse().unwrap_or(0) }
        }
    });
    let ours = |file: &str| {
        file.contains("/torch/") || file.contains("toolstorm_capture") || file.ends_with("sitecustomize.py")
    };
    frames.filter(|f| !INTERNAL.contains(&f.function.as_str()) && !f.file.as_deref().is_some_and(ours)).collect()
}

/// One address among a node's parameters.
struct Pointer {
    address: u64,
    /// The exact bytes behind it, for copies and memsets; else the whole lifetime.
    region: Option<Region>,
    access: Access,
    sure: bool,
    firm: bool,
}

fn pointers(node: &RawNode) -> Result<Vec<Pointer>> {
    let blobs = node.params.iter().map(|text| unhex(text)).collect::<Result<Vec<_>>>()?;
    let exact = |index: usize, access| -> Result<Option<Pointer>> {
        let Some(address) = blobs.get(index).and_then(|b| words(b).next()) else { return Ok(None) };
        let len = node.bytes.unwrap_or(1);
        let stride = node.pitch.get(index).copied().filter(|&p| p >= len).unwrap_or(len);
        let region = Region { base: address, row_stride: stride, len, rows: node.rows.unwrap_or(1) };
        let end = region.rows.checked_mul(stride).and_then(|span| span.checked_add(address));
        if end.is_none() {
            return Err(Error::usage(format!("a {} at {address:#x} ends beyond the address space", node.kind)));
        }
        Ok(Some(Pointer { address, region: Some(region), access, sure: true, firm: true }))
    };
    match node.kind.as_str() {
        "memcpy" => Ok([exact(0, Access::Read)?, exact(1, Access::Write)?].into_iter().flatten().collect()),
        "memset" => Ok(exact(0, Access::Write)?.into_iter().collect()),
        _ => Ok(parameters(node, &blobs)),
    }
}

fn parameters(node: &RawNode, blobs: &[Vec<u8>]) -> Vec<Pointer> {
    let declared = node.signature.as_deref().map(const_parameters).unwrap_or_default();
    let mut found: BTreeMap<u64, (bool, bool)> = BTreeMap::new();
    for (index, blob) in blobs.iter().enumerate() {
        let plain = blob.len() == 8;
        // A signature counts only where it has as many parameters as the launch.
        let reads = plain && declared.len() == blobs.len() && declared[index];
        for address in words(blob).filter(|&a| a != 0) {
            let known = found.entry(address).or_insert((true, false));
            *known = (known.0 && reads, known.1 || plain);
        }
    }
    let access = |reads| if reads { Access::Read } else { Access::Unknown };
    found
        .into_iter()
        .map(|(address, (reads, firm))| Pointer { address, region: None, access: access(reads), sure: false, firm })
        .collect()
}

/// The 8-byte aligned words of a parameter.
fn words(blob: &[u8]) -> impl Iterator<Item = u64> + '_ {
    blob.chunks_exact(8).map(|chunk| chunk.iter().rev().fold(0_u64, |word, &byte| word << 8 | u64::from(byte)))
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    let wrong = || Error::usage(format!("`{}` among a node's parameters is no hexadecimal text", clip(text)));
    if text.len() % 2 == 1 || !text.is_ascii() {
        return Err(wrong());
    }
    text.as_bytes()
        .chunks_exact(2)
        .map(|pair| {
            let digit = |byte: u8| (byte as char).to_digit(16).ok_or_else(wrong);
            Ok((digit(pair[0])? * 16 + digit(pair[1])?) as u8)
        })
        .collect()
}

fn clip(text: &str) -> String {
    text.chars().take(24).collect()
}

fn label(node: &RawNode) -> String {
    let name = node.signature.as_deref().or(node.name.as_deref());
    name.map_or_else(|| node.kind.clone(), short_name)
}

fn attribute(capture: &mut Capture, axis: &Axis, flat: &Flat, pointers: &[Vec<Pointer>]) {
    let mut attribution = Attribution::new(&axis.spans, &axis.marks, axis.events);
    for (node, (found, (top, _))) in pointers.iter().zip(&flat.nodes).enumerate() {
        let mut touched: BTreeMap<u32, Touch> = BTreeMap::new();
        let mut exact = Vec::new();
        for pointer in found {
            let Some(lifetime) = attribution.lifetime(*top, pointer.address) else { continue };
            let touch = touch(capture, node as u32, lifetime, pointer);
            if pointer.region.is_some() {
                exact.push(touch);
            } else {
                // Several pointers into one tensor: one that may write decides.
                let known = touched.entry(lifetime).or_insert(touch);
                known.firm |= touch.firm;
                if touch.access == Access::Unknown {
                    known.access = Access::Unknown;
                }
            }
        }
        capture.touches.extend(touched.into_values().chain(exact));
    }
    let tally = attribution.tally;
    if tally.ambiguous > 0 {
        capture.warnings.push(format!(
            "{} pointers could mean two lifetimes alive between the same marks; the newer was taken",
            tally.ambiguous
        ));
    }
}

fn touch(capture: &Capture, node: u32, lifetime: u32, pointer: &Pointer) -> Touch {
    let bytes = &capture.lifetimes[lifetime as usize].bytes;
    let whole = Region::contiguous(bytes.start, bytes.end - bytes.start);
    let region = pointer.region.unwrap_or(whole);
    Touch { node, lifetime, region, access: pointer.access, sure: pointer.sure, firm: pointer.firm }
}

fn attribute_to_all(capture: &mut Capture, axis: &Axis, pointers: &[Vec<Pointer>]) -> Result<()> {
    let low = axis.spans.iter().map(|s| s.bytes.start).min().unwrap_or(0);
    let high = axis.spans.iter().map(|s| s.bytes.end).max().unwrap_or(0);
    let mut owners: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for (node, found) in pointers.iter().enumerate() {
        for pointer in found.iter().filter(|p| (low..high).contains(&p.address)) {
            let lifetimes = owners.entry(pointer.address).or_insert_with(|| {
                (0..axis.spans.len() as u32)
                    .filter(|&s| axis.spans[s as usize].bytes.contains(&pointer.address))
                    .collect()
            });
            let touches: Vec<Touch> = lifetimes.iter().map(|&l| touch(capture, node as u32, l, pointer)).collect();
            capture.touches.extend(touches);
        }
        if capture.touches.len() > UNMARKED_LIMIT {
            return Err(Error::usage("the capture has no marks and too many lifetimes an address to analyse").hint(HOW));
        }
    }
    Ok(())
}

/// A fresh allocation holds nothing worth reading: whoever touches it first writes it.
fn first_touch_writes(capture: &mut Capture) {
    let mut touched = BTreeSet::new();
    for touch in &mut capture.touches {
        let fresh = capture.lifetimes[touch.lifetime as usize].inside && touched.insert(touch.lifetime);
        if fresh && touch.access == Access::Unknown {
            touch.access = Access::Write;
        }
    }
}

/// Names each lifetime by size and by what is known of its origin.
fn name_lifetimes(capture: &mut Capture) {
    let mut writers: BTreeMap<u32, u32> = BTreeMap::new();
    for touch in &capture.touches {
        writers.entry(touch.lifetime).or_insert(touch.node);
    }
    for (index, lifetime) in capture.lifetimes.iter_mut().enumerate() {
        let size = lifetime.bytes.end - lifetime.bytes.start;
        let writer = writers.get(&(index as u32)).map(|&n| &capture.nodes[n as usize].kernel);
        lifetime.name = match (lifetime.allocated.frames.first(), writer) {
            (Some(frame), _) => format!("{size} B of {}", place(frame)),
            (None, Some(kernel)) if lifetime.inside => format!("{size} B output of {kernel}"),
            _ => format!("{size} B at {:#x}", lifetime.bytes.start),
        };
    }
}

fn place(frame: &Frame) -> String {
    match &frame.file {
        Some(file) => format!("{}:{}", file.rsplit('/').next().unwrap_or(file), frame.line),
        None => format!("{}:{}", frame.function, frame.line),
    }
}
