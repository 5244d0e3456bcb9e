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

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::seed::Seed;

    /// The rules again, in the plainest form: a list of blocks, searched from end to end.
    #[derive(Default)]
    struct Plain {
        blocks: Vec<PlainBlock>,
        top: u64,
    }

    #[derive(Clone, Copy)]
    struct PlainBlock {
        pool: PoolId,
        stream: StreamId,
        large: bool,
        segment: u64,
        start: u64,
        end: u64,
        free: bool,
    }

    impl Plain {
        fn alloc(&mut self, pool: PoolId, stream: StreamId, bytes: u64) -> u64 {
            let size = bytes.max(1).div_ceil(512) * 512;
            let large = size > 1024 * 1024;
            let fits = |b: &PlainBlock| {
                b.free && b.pool == pool && b.stream == stream && b.large == large && b.end - b.start >= size
            };
            let best = (0..self.blocks.len())
                .filter(|&at| fits(&self.blocks[at]))
                .min_by_key(|&at| (self.blocks[at].end - self.blocks[at].start, self.blocks[at].start));
            let at = best.unwrap_or_else(|| {
                let mib = 1024 * 1024;
                let length = match size {
                    _ if !large => 2 * mib,
                    _ if size < 10 * mib => 20 * mib,
                    _ => size.div_ceil(2 * mib) * 2 * mib,
                };
                let (start, end) = (self.top, self.top + length);
                self.top = end;
                self.blocks.push(PlainBlock { pool, stream, large, segment: start, start, end, free: true });
                self.blocks.len() - 1
            });
            let rest = self.blocks[at].end - self.blocks[at].start - size;
            if rest >= if large { 1024 * 1024 + 1 } else { 512 } {
                let tail = PlainBlock { start: self.blocks[at].start + size, ..self.blocks[at] };
                self.blocks[at].end = tail.start;
                self.blocks.push(tail);
            }
            self.blocks[at].free = false;
            self.blocks[at].start
        }

        fn free(&mut self, address: u64) -> PlainBlock {
            let at = self.blocks.iter().position(|b| b.start == address && !b.free).unwrap();
            let freed = self.blocks[at];
            self.blocks[at].free = true;
            let mut merged = self.blocks.swap_remove(at);
            let joins = |b: &PlainBlock, m: &PlainBlock| {
                b.free && b.segment == m.segment && (b.end == m.start || b.start == m.end)
            };
            while let Some(at) = self.blocks.iter().position(|b| joins(b, &merged)) {
                let other = self.blocks.swap_remove(at);
                (merged.start, merged.end) = (merged.start.min(other.start), merged.end.max(other.end));
            }
            self.blocks.push(merged);
            freed
        }
    }

    #[test]
    fn a_hundred_thousand_operations_follow_the_rules() {
        let mut rng = Seed(20).fork("allocator").rng();
        let mut allocator = Allocator::default();
        allocator.reserve(1 << 40);
        let pools = [PoolId::DEFAULT, allocator.create_pool(), allocator.create_pool()];
        let mut plain = Plain::default();
        let mut live: BTreeMap<u64, (u64, PoolId)> = BTreeMap::new();
        let (mut reused, mut split) = (0, 0);
        for _ in 0..100_000 {
            if live.len() < 20 || (live.len() < 300 && rng.random_ratio(1, 2)) {
                let (pool, stream) = (pools[rng.random_range(0..3)], StreamId(rng.random_range(0..4)));
                let magnitude = [9, 14, 20, 20, 24][rng.random_range(0..5)];
                let bytes = rng.random_range(0..1_u64 << magnitude);
                let carved = allocator.carved();
                let address = allocator.alloc(pool, stream, bytes).expect("room");
                assert_eq!(address, plain.alloc(pool, stream, bytes));
                let end = address + bytes.max(1).next_multiple_of(ROUND);
                let before = live.range(..end).next_back();
                assert!(before.is_none_or(|(_, &(other_end, _))| other_end <= address), "two live blocks overlap");
                reused += usize::from(allocator.carved() == carved);
                split += usize::from(plain.blocks.last().is_some_and(|block| block.start == end));
                live.insert(address, (end, pool));
            } else {
                let (&address, &(_, pool)) = live.iter().nth(rng.random_range(0..live.len())).unwrap();
                live.remove(&address);
                allocator.free(pool, address);
                let freed = plain.free(address);
                assert_eq!(freed.pool, pool);
            }
        }
        assert!(reused > 10_000 && split > 10_000, "{reused} reused, {split} split");
        for (address, (_, pool)) in live {
            allocator.free(pool, address);
        }
        let whole = allocator.pools.iter().flat_map(|pool| &pool.blocks).all(|(start, block)| *start == block.segment);
        assert!(whole, "when all is free every segment is one block again");
    }

    #[test]
    fn a_request_past_the_arena_says_how_much_is_wanted() {
        let mut allocator = Allocator::default();
        assert_eq!(allocator.alloc(PoolId::DEFAULT, StreamId(0), 1), Err(Growth { wanted: SMALL_SEGMENT }));
        allocator.reserve(SMALL_SEGMENT);
        assert_eq!(allocator.alloc(PoolId::DEFAULT, StreamId(0), 1), Ok(0));
        assert_eq!(allocator.alloc(PoolId::DEFAULT, StreamId(1), 1), Err(Growth { wanted: 2 * SMALL_SEGMENT }));
    }
}
