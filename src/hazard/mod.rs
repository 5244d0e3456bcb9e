//! Happens-before analysis of captured graphs: from one capture to every hazard in it, without a stress run.
//!
//! A **hazard** is two operations of a captured graph that no path orders and that touch the same bytes, at least one of
//! them writing (or its access unknown), under different allocation lifetimes or under one. A stress run says whether a
//! race bites; this says why, also where it bites never on this machine.
//!
//! Everything here is pure: a [`Capture`] comes in (from the engine's own device trace through [`trace`], or from a
//! PyTorch capture file through [`torch`]), a [`Report`] goes out, and [`output`] renders it. Ordering is by vector
//! clocks over chains ([`order`]), byte overlap by a sweep over a tree of address ranges ([`sweep`]).

use std::{collections::BTreeSet, ops::Range};

use crate::device::Region;

mod attribute;
pub mod bite;
pub mod cause;
pub mod engine;
pub mod fix;
mod mangle;
pub mod order;
pub mod output;
pub mod overlap;
pub mod replay;
pub mod report;
pub mod sweep;
pub mod torch;
pub mod trace;

pub use order::Order;
pub use report::{Graph, Group, Report, examine};
pub use sweep::{Analysis, analyse};

/// One captured graph in neutral form: what runs, in which order, on which bytes.
#[derive(Debug, Clone, Default)]
pub struct Capture {
    /// How reports call the graph: `bucket 8`, or the file's stem.
    pub name: String,
    /// The arm of a matrix, or the process of a program, that it belongs to; empty where there is only one.
    pub group: String,
    /// Names of the streams that nodes and lifetimes refer to by index; empty for a foreign graph.
    pub streams: Vec<String>,
    /// Operations, in the order in which the host enqueued them.
    pub nodes: Vec<Node>,
    /// `(before, after)`: stream order and event waits.
    pub edges: Vec<(u32, u32)>,
    /// Allocations, in the order in which the host made them.
    pub lifetimes: Vec<Lifetime>,
    /// What each node touches, sorted by node.
    pub touches: Vec<Touch>,
    /// Keys of the lifetimes that exist when the capture begins, where the capture says so.
    pub alive: Option<BTreeSet<u64>>,
    /// Known benign multi-writers: conflicts inside these bytes are counted, not reported.
    pub benign: Vec<Benign>,
    /// True where nobody knows which tensors its kernels touch: what is not found is not known to be absent.
    pub blind: bool,
    /// True where a pointer means every lifetime of its address: two operations are then one hazard at most.
    pub unmarked: bool,
    /// What a reader should know about the quality of this capture.
    pub warnings: Vec<String>,
}

impl Capture {
    /// What identifies a hazard in another analysis of this capture: operations and lifetimes, without marks the
    /// operations alone.
    pub fn identity(&self, hazard: &Hazard) -> (u32, u32, u32, u32) {
        let (first, second, early, late) = hazard.key();
        if self.unmarked { (first, second, 0, 0) } else { (first, second, early, late) }
    }
}

/// One operation of a captured graph.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// The kernel's name, as a human knows it.
    pub kernel: String,
    /// Decoder layer.
    pub layer: Option<u32>,
    /// Stream, as an index into [`Capture::streams`].
    pub stream: Option<u32>,
    /// Charged duration, where a cost model knows it.
    pub duration_us: Option<f64>,
}

/// One allocation from its `alloc` to its `free`; several lifetimes share bytes one after the other.
#[derive(Debug, Clone, Default)]
pub struct Lifetime {
    /// The tensor's name, or what is known of it.
    pub name: String,
    /// Identity across the captures of one pool: equal for one lifetime seen from two graphs.
    pub key: u64,
    /// Its bytes.
    pub bytes: Range<u64>,
    /// The stream that owns the block, as an index into [`Capture::streams`].
    pub stream: Option<u32>,
    /// Where the host allocated it.
    pub allocated: Site,
    /// Where the host dropped it; none while it is still held at the end of the capture.
    pub freed: Option<Site>,
    /// True when the capture itself allocated it: then its first toucher must be its writer.
    pub inside: bool,
    /// True where no allocator told of it: bytes that copies and memsets name, which nobody is known to have freed.
    pub untraced: bool,
}

/// A point in the host's program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Site {
    /// Number of nodes enqueued before this point.
    pub node: u32,
    /// Stack, innermost frame first, the framework's own frames filtered out.
    pub frames: Vec<Frame>,
}

/// One frame of a user's stack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frame {
    /// Function.
    pub function: String,
    /// Source file, where the capture has it.
    pub file: Option<String>,
    /// Line in it.
    pub line: u32,
}

/// What an operation does to the bytes that it touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reads them.
    Read,
    /// Writes them.
    Write,
    /// Nobody said: a pointer among a kernel's parameters.
    Unknown,
}

/// One node touching one region under one lifetime.
#[derive(Debug, Clone, Copy)]
pub struct Touch {
    /// Index into [`Capture::nodes`].
    pub node: u32,
    /// Index into [`Capture::lifetimes`].
    pub lifetime: u32,
    /// Exact strided bytes, or the whole lifetime where nothing better is known.
    pub region: Region,
    /// What it does to them.
    pub access: Access,
    /// False when the access is inferred (a const parameter, the first toucher of a fresh allocation).
    pub sure: bool,
    /// False when the address was found inside a larger parameter, where it may be left-over bytes.
    pub firm: bool,
}

/// Bytes in which concurrent writers are known to do no harm.
#[derive(Debug, Clone)]
pub struct Benign {
    /// The bytes.
    pub bytes: Range<u64>,
    /// Why they are harmless.
    pub reason: String,
}

/// Which order of accesses the missing edge would have kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Write after read: the second operation may overwrite what the first still reads.
    War,
    /// Read after write: the second operation may read before the first has written.
    Raw,
    /// Write after write: the first operation may land last.
    Waw,
    /// Both touch the bytes; whether they read or write is not known for certain.
    Touch,
}

impl Kind {
    /// The field's abbreviation.
    pub fn label(self) -> &'static str {
        match self {
            Self::War => "WAR",
            Self::Raw => "RAW",
            Self::Waw => "WAW",
            Self::Touch => "touch",
        }
    }

    /// The kind of two accesses in host order; none where both only read.
    pub fn of(first: Access, second: Access) -> Option<Self> {
        match (first, second) {
            (Access::Read, Access::Read) => None,
            (Access::Read, Access::Write) => Some(Self::War),
            (Access::Write, Access::Read) => Some(Self::Raw),
            (Access::Write, Access::Write) => Some(Self::Waw),
            _ => Some(Self::Touch),
        }
    }
}

/// How sure it is that at least one of the two operations writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Likelihood {
    /// Both accesses are declared.
    Certain,
    /// One side is a copy or a memset, or must be the first writer of a fresh allocation.
    Likely,
    /// Nothing is known of either access.
    Possible,
    /// One side takes the pointer as const and the other may only read as well.
    Unlikely,
}

impl Likelihood {
    /// Lower-case word for reports.
    pub fn label(self) -> &'static str {
        match self {
            Self::Certain => "certain",
            Self::Likely => "likely",
            Self::Possible => "possible",
            Self::Unlikely => "unlikely",
        }
    }
}

/// Two operations that no path orders and that touch the same bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hazard {
    /// What the missing edge would have kept in order.
    pub kind: Kind,
    /// Best guess where `kind` is [`Kind::Touch`].
    pub likely: Option<Kind>,
    /// What the two operations do to the bytes, in the same order, as far as declared or inferred.
    pub accesses: [Access; 2],
    /// The operation that the host enqueued first.
    pub first: u32,
    /// The operation that the host enqueued second.
    pub second: u32,
    /// What the first operation means by the bytes.
    pub first_lifetime: u32,
    /// What the second operation means by them.
    pub second_lifetime: u32,
    /// The smallest range that holds every shared byte.
    pub bytes: Range<u64>,
    /// Number of shared bytes.
    pub shared: u64,
    /// How sure it is that one of them writes.
    pub likelihood: Likelihood,
}

impl Hazard {
    /// True when the bytes were recycled: the two operations mean different allocations by them.
    pub fn recycled(&self) -> bool {
        self.first_lifetime != self.second_lifetime
    }

    /// Both operations, and what each means by the bytes.
    pub fn key(&self) -> (u32, u32, u32, u32) {
        (self.first, self.second, self.first_lifetime, self.second_lifetime)
    }
}
