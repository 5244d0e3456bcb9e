//! From PyTorch capture files (`toolstorm-capture/1`) to [`Capture`]s.
//!
//! The exporter beside this file ([`EXPORTER`]) writes them: graph nodes with their raw parameter bytes, edges, the
//! allocator's trace, and marks that tie the two together. Pointers sit anywhere in the parameter bytes, 8-byte
//! aligned; each that falls into a lifetime alive at its node's moment is a touch of that lifetime.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::LazyLock,
};

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
/// First byte beyond what a GPU can address; sums of what lies below it cannot overflow.
const ADDRESSES: u64 = 1 << 57;
/// Rows are walked one by one where two regions meet: of more than this many the gaps count as touched as well.
const ROWS: u64 = 1 << 20;
/// Kinds of nodes that are read, or that touch no memory of the device.
const UNDERSTOOD: [&str; 8] = ["kernel", "memcpy", "memset", "graph", "empty", "host", "event_record", "wait_event"];
/// What stands before or after the several first or last nodes of a child graph.
static JOIN: LazyLock<RawNode> = LazyLock::new(|| RawNode { kind: "empty".to_owned(), ..RawNode::default() });

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

#[derive(Debug, Default, Deserialize)]
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

/// Reads captures of one program, in the order in which they were captured; each process has a pool of its own.
#[derive(Debug, Default)]
pub struct Pool {
    /// By process: identity, by address and size, of what was alive when the capture before ended.
    keys: BTreeMap<String, BTreeMap<(u64, u64), u64>>,
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
        flat.warn(&mut capture.warnings);
        let mut axis = Axis::of(file, &flat, &mut capture.warnings)?;
        let pointers = flat.nodes.iter().map(|(_, node)| pointers(node)).collect::<Result<Vec<_>>>()?;
        capture.blind = axis.spans.is_empty() && pointers.iter().any(|found| !found.is_empty());
        if capture.blind {
            capture.warnings.push(BLIND.to_owned());
        }
        capture.unmarked = axis.marks.is_empty() && !axis.spans.is_empty();
        axis.adopt(&flat, &pointers, &mut capture.warnings);
        capture.nodes = flat.nodes.iter().map(|(_, node)| Node { kernel: label(node), ..Node::default() }).collect();
        capture.lifetimes = self.identify(&axis, file);
        if file.live.is_some() {
            capture.alive = Some(capture.lifetimes.iter().filter(|l| !l.inside).map(|l| l.key).collect());
        }
        if capture.unmarked {
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
    fn identify(&mut self, axis: &Axis, file: &File) -> Vec<Lifetime> {
        let Self { keys: pools, next } = self;
        let before = pools.entry(file.process.clone().unwrap_or_default()).or_default();
        let mut keys = BTreeMap::new();
        let mut lifetimes = Vec::with_capacity(axis.spans.len());
        for (index, ((span, born), died)) in axis.spans.iter().zip(&axis.births).zip(&axis.deaths).enumerate() {
            let place = (span.bytes.start, span.bytes.end - span.bytes.start);
            let inside = span.from > 0;
            let known = before.get(&place).copied().filter(|_| !inside);
            let key = known.unwrap_or_else(|| {
                *next += 1;
                *next
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
                untraced: index < axis.untraced,
                ..Lifetime::default()
            });
        }
        if file.live.is_some() {
            *before = keys;
        } else {
            // A capture that does not say what is alive ends nothing.
            before.extend(keys);
        }
        lifetimes
    }
}

const UNMARKED: &str = "the capture has no marks, so a pointer means every lifetime of its address: expect false \
                        hazards, and export again with marks to be rid of them";

const BLIND: &str = "the capture holds no trace of the allocator, so nobody knows which tensors its kernels touch; only \
                     copies and memsets are analysed: export it with the memory history on";

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

    /// Says which nodes may touch memory that nobody sees.
    fn warn(&self, warnings: &mut Vec<String>) {
        let mut strange: BTreeMap<&str, usize> = BTreeMap::new();
        for kind in self.nodes.iter().map(|(_, node)| node.kind.as_str()).filter(|k| !UNDERSTOOD.contains(k)) {
            *strange.entry(kind).or_default() += 1;
        }
        let said = strange.iter().map(|(kind, count)| {
            format!("nodes of kind {kind} are not understood and count as touching nothing: {count}")
        });
        warnings.extend(said);
    }

    /// Inlines one graph and returns its first and its last node. A child graph with several is given one: pairs of
    /// them would grow with the square of its width.
    fn inline(&mut self, nodes: &'a [RawNode], edges: &[(u32, u32)], top: Option<u32>) -> Result<(u32, u32)> {
        let mut ends = Vec::with_capacity(nodes.len());
        for (index, node) in nodes.iter().enumerate() {
            let at = self.nodes.len() as u32;
            if top.is_none() {
                self.starts.push(at);
            }
            let top = top.unwrap_or(index as u32);
            if node.nodes.is_empty() {
                self.nodes.push((top, node));
                ends.push((at, at));
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
            self.edges.push((from.1, to.0));
        }
        let Some(top) = top else { return Ok((0, 0)) };
        let firsts: Vec<u32> = ends.iter().zip(has_before).filter(|(_, before)| !before).map(|(e, _)| e.0).collect();
        let lasts: Vec<u32> = ends.iter().zip(has_after).filter(|(_, after)| !after).map(|(e, _)| e.1).collect();
        let first = self.gather(top, &firsts, |join, node| (join, node));
        Ok((first, self.gather(top, &lasts, |join, node| (node, join))))
    }

    /// The only one of `nodes`, or a new node that `edge` ties to each of them.
    fn gather(&mut self, top: u32, nodes: &[u32], edge: impl Fn(u32, u32) -> (u32, u32)) -> u32 {
        if let [only] = nodes {
            return *only;
        }
        let join = self.nodes.len() as u32;
        self.nodes.push((top, &*JOIN));
        self.edges.extend(nodes.iter().map(|&node| edge(join, node)));
        join
    }
}

/// Host time: allocator events, the lifetimes they bound, and the marks that tie them to nodes.
struct Axis {
    events: u32,
    spans: Vec<Span>,
    /// How many of them, from the first, no allocator told of.
    untraced: usize,
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
            untraced: 0,
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
        let end = block.addr.checked_add(block.size).filter(|&end| end <= ADDRESSES).ok_or_else(|| {
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

    /// Copies and memsets name their bytes exactly: where no lifetime holds them, each run of them is one.
    fn adopt(&mut self, flat: &Flat, pointers: &[Vec<Pointer>], warnings: &mut Vec<String>) {
        let mut attribution = Attribution::new(&self.spans, &self.marks, self.events);
        let mut strange: Vec<Range<u64>> = Vec::new();
        for (found, (top, _)) in pointers.iter().zip(&flat.nodes) {
            for (pointer, region) in found.iter().filter_map(|p| Some((p, p.region?))).filter(|(_, r)| !r.is_empty()) {
                if attribution.lifetime(*top, pointer.address, true).is_none() {
                    strange.push(region.span());
                }
            }
        }
        if !strange.is_empty() {
            warnings.push(format!(
                "operands of copies and memsets in memory that the allocator's trace does not hold: {}; each run of \
                 such bytes is taken for one tensor",
                strange.len()
            ));
        }
        let runs = runs(strange);
        self.untraced = runs.len();
        self.births.splice(0..0, runs.iter().map(|_| Site::default()));
        self.deaths.splice(0..0, runs.iter().map(|_| None));
        self.spans.splice(0..0, runs.into_iter().map(|bytes| Span { bytes, from: 0, until: u32::MAX }));
    }

    /// True where `pointer`, found in a lifetime, may be an address of it: where no allocator vouches for the lifetime,
    /// only a plain parameter is.
    fn vouches(&self, lifetime: u32, pointer: &Pointer) -> bool {
        pointer.firm || lifetime as usize >= self.untraced
    }
}

/// Ranges that overlap as one.
fn runs(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut runs: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match runs.last_mut().filter(|last| range.start < last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => runs.push(range),
        }
    }
    runs
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
                "{strangers} of {} marks count allocator events that the trace does not hold, so none is trusted",
                file.marks.len()
            ));
            // The others would meet counts of the trace by chance.
            marks.clear();
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
    match node.kind.as_str() {
        "memcpy" => {
            let ends = [exact(node, &blobs, 0, Access::Read)?, exact(node, &blobs, 1, Access::Write)?];
            Ok(ends.into_iter().flatten().collect())
        }
        "memset" => Ok(exact(node, &blobs, 0, Access::Write)?.into_iter().collect()),
        _ => Ok(parameters(node, &blobs)),
    }
}

/// One side of a copy, or what a memset fills; none where it lies in the host's memory.
fn exact(node: &RawNode, blobs: &[Vec<u8>], index: usize, access: Access) -> Result<Option<Pointer>> {
    let Some(address) = blobs.get(index).and_then(|b| words(b).next()).filter(|&a| a != 0) else { return Ok(None) };
    let (len, rows) = (node.bytes.unwrap_or(1), node.rows.unwrap_or(1));
    let stride = node.pitch.get(index).copied().filter(|&p| p >= len).unwrap_or(len);
    let end = rows.checked_mul(stride).and_then(|span| span.checked_add(address)).filter(|&end| end <= ADDRESSES);
    if end.is_none() {
        return Err(Error::usage(format!("a {} at {address:#x} ends beyond the address space", node.kind)));
    }
    let mut region = Region { base: address, row_stride: stride, len, rows };
    if rows > ROWS {
        region = Region::contiguous(address, region.span().end - address);
    }
    Ok(Some(Pointer { address, region: Some(region), access, sure: true, firm: true }))
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
            let Some(lifetime) =
                attribution.lifetime(*top, pointer.address, pointer.firm).filter(|&l| axis.vouches(l, pointer))
            else {
                continue;
            };
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
    if tally.dangling > 0 {
        capture.warnings.push(format!(
            "pointers into memory that was free when their operation was enqueued: {}; each is taken for the last owner's",
            tally.dangling
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
            let lifetimes = owners.entry(pointer.address).or_insert_with(|| holders(&axis.spans, pointer.address));
            let vouched = lifetimes.iter().filter(|&&l| axis.vouches(l, pointer));
            let touches: Vec<Touch> = vouched.map(|&l| touch(capture, node as u32, l, pointer)).collect();
            capture.touches.extend(touches);
        }
        if capture.touches.len() > UNMARKED_LIMIT {
            return Err(Error::usage("the capture has no marks and too many lifetimes an address to analyse").hint(HOW));
        }
    }
    Ok(())
}

/// Of the lifetimes that hold `address` the first and the last of each extent: two operations that share bytes under any
/// two lifetimes do so under two of these.
fn holders(spans: &[Span], address: u64) -> Vec<u32> {
    let mut extents: BTreeMap<(u64, u64), [u32; 2]> = BTreeMap::new();
    for (at, Span { bytes, .. }) in spans.iter().enumerate().filter(|(_, s)| s.bytes.contains(&address)) {
        extents.entry((bytes.start, bytes.end)).or_insert([at as u32; 2])[1] = at as u32;
    }
    let kept: BTreeSet<u32> = extents.into_values().flatten().collect();
    kept.into_iter().collect()
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
