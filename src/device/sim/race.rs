//! The race log: reads that saw another writer than host order gives them.

use std::{borrow::Cow, ops::Range};

use crate::device::{LifetimeId, StreamId};

/// How the two ops came to be in the wrong order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RaceKind {
    /// The reader saw bytes that a later op had already overwritten.
    WriteAfterRead,
    /// The reader read before an earlier op had written.
    ReadAfterWrite,
    /// An earlier op's late write replaced a later op's before its reader came.
    WriteAfterWrite,
}

/// One of the two ops of a race hit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Side {
    /// Position in host order within the launch.
    pub op: u32,
    /// Kernel name.
    pub kernel: &'static str,
    /// Decoder layer.
    pub layer: Option<u8>,
    /// Stream.
    pub stream: StreamId,
    /// The stream's name.
    pub stream_name: Cow<'static, str>,
    /// The allocation by which this op means the bytes.
    pub lifetime: LifetimeId,
    /// That allocation's name.
    pub tensor: Cow<'static, str>,
}

/// Two unordered ops that touched the same bytes in an order that changed what was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaceHit {
    /// Number of the launch.
    pub launch: u64,
    /// Kind.
    pub kind: RaceKind,
    /// The op that comes first in host order.
    pub first: Side,
    /// The op that comes second in host order.
    pub second: Side,
    /// Position in host order of the op that read wrong bytes.
    pub reader: u32,
    /// The reader's rows that read wrong bytes, ascending. Where its blocks are columns of all rows, those to which
    /// [`RaceHit::bytes`] belongs.
    pub rows: Vec<u32>,
    /// The smallest range that holds all changed bytes.
    pub bytes: Range<u64>,
    /// How many bytes were read with another value than host order gives.
    pub changed: u64,
    /// Up to eight bytes at the first difference: what host order gives.
    pub expected: Vec<u8>,
    /// What was read instead.
    pub seen: Vec<u8>,
    /// Virtual time of the first wrong read, from the launch's start.
    pub at_ns: u64,
}
