//! The caching allocator: PyTorch semantics, for every backend.
//!
//! A block belongs to the stream that was current when it was allocated, and only that stream's later allocations may be
//! handed it again. A free takes effect at once, in host order. Pools keep to themselves: the default one, and private
//! ones that graphs share. Segments are carved from one arena and never given back.

use std::collections::{BTreeMap, BTreeSet};

use super::{PoolId, StreamId};

/// Sizes round up to this.
pub const ROUND: u64 = 512;
/// Requests up to this come from small segments.
pub const SMALL_LIMIT: u64 = 1 << 20;
/// Length of a small segment.
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// Requests below this come from segments of [`LARGE_SEGMENT`].
pub const LARGE_LIMIT: u64 = 10 << 20;
/// Length of a large segment.
pub const LARGE_SEGMENT: u64 = 20 << 20;
/// Requests of [`LARGE_LIMIT`] and more get a segment of their own, rounded up to this.
pub const HUGE_ROUND: u64 = 2 << 20;

/// The blocks of every pool over one arena.
#[derive(Debug, Default)]
pub struct Allocator {
    pools: Vec<Pool>,
    top: u64,
    reserved: u64,
}

/// The arena must grow before this allocation can be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Growth {
    /// Arena length that would serve it.
    pub wanted: u64,
}

#[derive(Debug, Default)]
struct Pool {
    blocks: BTreeMap<u64, Held>,
    /// Free blocks by owner, kind and size, so that the first fit in order is the best fit.
    free: BTreeSet<(StreamId, bool, u64, u64)>,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    size: u64,
    segment: u64,
    stream: StreamId,
    large: bool,
    free: bool,
}

impl Allocator {
    /// Length of the arena that may be carved.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Allows carving up to `bytes`.
    pub fn reserve(&mut self, bytes: u64) {
        self.reserved = self.reserved.max(bytes);
    }

    /// Bytes carved into segments so far.
    pub fn carved(&self) -> u64 {
        self.top
    }

    /// A new private pool.
    pub fn create_pool(&mut self) -> PoolId {
        self.pool_mut(PoolId::DEFAULT);
        self.pools.push(Pool::default());
        PoolId(self.pools.len() as u32 - 1)
    }

    /// Takes `bytes` for `stream`: best fit by size, then address; else a new segment.
    pub fn alloc(&mut self, pool: PoolId, stream: StreamId, bytes: u64) -> Result<u64, Growth> {
        let size = bytes.max(1).next_multiple_of(ROUND);
        let large = size > SMALL_LIMIT;
        let fit = {
            let free = &self.pool_mut(pool).free;
            free.range((stream, large, size, 0)..).next().copied().filter(|f| f.0 == stream && f.1 == large)
        };
        let (address, held) = match fit {
            Some((_, _, size, address)) => (address, size),
            None => self.add_segment(pool, stream, size, large)?,
        };
        let remainder = held - size;
        let split = if large { remainder > SMALL_LIMIT } else { remainder >= ROUND };
        self.pool_mut(pool).take(address, if split { size } else { held });
        Ok(address)
    }

    /// Gives the block at `address` back: its owner's next allocation may have it.
    pub fn free(&mut self, pool: PoolId, address: u64) {
        self.pool_mut(pool).give_back(address);
    }

    fn pool_mut(&mut self, pool: PoolId) -> &mut Pool {
        if self.pools.is_empty() {
            self.pools.push(Pool::default());
        }
        &mut self.pools[pool.0 as usize]
    }

    fn add_segment(&mut self, pool: PoolId, stream: StreamId, size: u64, large: bool) -> Result<(u64, u64), Growth> {
        let length = match (large, size < LARGE_LIMIT) {
            (false, _) => SMALL_SEGMENT,
            (true, true) => LARGE_SEGMENT,
            (true, false) => size.next_multiple_of(HUGE_ROUND),
        };
        let (address, wanted) = (self.top, self.top + length);
        if wanted > self.reserved {
            return Err(Growth { wanted });
        }
        self.top = wanted;
        let pool = self.pool_mut(pool);
        pool.blocks.insert(address, Held { size: length, segment: address, stream, large, free: true });
        pool.free.insert((stream, large, length, address));
        Ok((address, length))
    }
}

impl Pool {
    fn take(&mut self, address: u64, size: u64) {
        let block = self.blocks.get_mut(&address).expect("a free block is held");
        assert!(block.free, "the block at {address:#x} is taken twice");
        self.free.remove(&(block.stream, block.large, block.size, address));
        let rest = Held { size: block.size - size, ..*block };
        (block.size, block.free) = (size, false);
        if rest.size > 0 {
            self.blocks.insert(address + size, rest);
            self.free.insert((rest.stream, rest.large, rest.size, address + size));
        }
    }

    fn give_back(&mut self, address: u64) {
        let mut block = self.blocks.remove(&address).expect("only held blocks are given back");
        assert!(!block.free, "the block at {address:#x} is freed twice");
        block.free = true;
        let mut start = address;
        if let Some((&next, &after)) = self.blocks.range(address..).next()
            && after.free
            && after.segment == block.segment
        {
            self.remove_free(next, after);
            block.size += after.size;
        }
        if let Some((&previous, &before)) = self.blocks.range(..address).next_back()
            && before.free
            && before.segment == block.segment
        {
            self.remove_free(previous, before);
            block.size += before.size;
            start = previous;
        }
        self.free.insert((block.stream, block.large, block.size, start));
        self.blocks.insert(start, block);
    }

    fn remove_free(&mut self, address: u64, block: Held) {
        self.blocks.remove(&address);
        self.free.remove(&(block.stream, block.large, block.size, address));
    }
}
