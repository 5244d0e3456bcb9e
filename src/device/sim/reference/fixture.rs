//! A memory for kernel tests, and the check that every kernel goes through.

use std::{collections::BTreeMap, ops::Range};

use rand::{Rng, RngExt};
use rand_pcg::Pcg64Mcg;

use super::{
    super::{Kernels, Memory, Touch, View, Writes, memory::Scratch},
    Reference,
    numeric::Element,
};
use crate::{
    device::{Block, LifetimeId, Op, Operand, Region, SparseWeight, WeightId, kernel::Kernel},
    seed::Seed,
};

/// An arena that starts as noise, and weights.
pub(super) struct Fixture {
    pub(super) memory: Memory,
    pub(super) rng: Pcg64Mcg,
    weights: Vec<SparseWeight>,
    used: u64,
}

impl Fixture {
    pub(super) fn new(bytes: u64, seed: u64) -> Self {
        let mut rng = Seed(seed).fork("kernels").rng();
        let mut memory = Memory::new(bytes);
        memory.write(0, &noise(&mut rng, bytes));
        Self { memory, rng, weights: Vec::new(), used: 0 }
    }

    /// `rows` rows of `len` bytes at `stride`.
    pub(super) fn region(&mut self, rows: u64, stride: u64, len: u64) -> Operand {
        let region = Region { base: self.used, row_stride: stride, len, rows };
        self.used = (self.used + rows * stride).next_multiple_of(512);
        assert!(self.used <= self.memory.len(), "the arena is too small");
        Operand { region, lifetime: LifetimeId(0), indexed: false }
    }

    /// As [`Fixture::region`] without gaps, filled by `value(row, column)`.
    pub(super) fn matrix<T: Element>(
        &mut self,
        rows: u64,
        columns: u64,
        mut value: impl FnMut(u64, u64) -> f32,
    ) -> Operand {
        let len = columns * size_of::<T>() as u64;
        let operand = self.region(rows, len, len);
        for row in 0..rows {
            let values: Vec<T> = (0..columns).map(|column| T::put(value(row, column))).collect();
            self.memory.write(operand.region.row(row).start, bytemuck::cast_slice(&values));
        }
        operand
    }

    /// bf16 between -2 and 2.
    pub(super) fn random(&mut self, rows: u64, columns: u64) -> Operand {
        let mut rng = self.rng.clone();
        let operand = self.matrix::<u16>(rows, columns, |_, _| rng.random_range(-2.0..2.0));
        self.rng = rng;
        operand
    }

    pub(super) fn words(&mut self, rows: u64, columns: u64, value: impl Fn(u64, u64) -> i32) -> Operand {
        let operand = self.region(rows, columns * 4, columns * 4);
        for row in 0..rows {
            let words: Vec<i32> = (0..columns).map(|column| value(row, column)).collect();
            self.memory.write(operand.region.row(row).start, bytemuck::cast_slice(&words));
        }
        operand
    }

    pub(super) fn weight(&mut self, weight: SparseWeight) -> WeightId {
        self.weights.push(weight);
        WeightId(self.weights.len() as u32 - 1)
    }

    /// A weight with about `density` of its entries, exact in bf16.
    pub(super) fn random_weight(&mut self, rows: u32, columns: u32, density: f64) -> WeightId {
        let mut entries = Vec::new();
        for row in 0..rows {
            for column in 0..columns {
                if self.rng.random_bool(density) {
                    entries.push((row, column, self.rng.random_range(-128..=128) as f32 / 64.0));
                }
            }
        }
        self.weight(SparseWeight::from_entries(rows, columns, &entries))
    }

    pub(super) fn entries(&self, id: WeightId) -> Vec<(usize, usize, f64)> {
        let weight = &self.weights[id.0 as usize];
        let row = |row: u32| {
            let (columns, values) = weight.row(row);
            columns.iter().zip(values).map(move |(&c, &v)| (row as usize, c as usize, f64::from(v))).collect::<Vec<_>>()
        };
        (0..weight.rows).flat_map(row).collect()
    }

    pub(super) fn row<T: Element>(&self, operand: Operand, row: u64) -> Vec<f64> {
        self.memory.slice::<T>(operand.region.row(row)).iter().map(|value| f64::from(value.get())).collect()
    }

    /// Runs an op whole, block by block, and each block again in an arena in which everything that it does not declare
    /// is other noise: all must leave the same bytes, and exactly the declared ones.
    pub(super) fn run(&mut self, kernel: Kernel, reads: &[Operand], writes: &[Operand]) {
        let op = Op { kernel, reads: reads.to_vec(), writes: writes.to_vec(), layer: None };
        let kernels = Reference::new();
        let mut blocks = Vec::new();
        kernels.blocks(&op, &self.memory, &mut blocks);
        assert!(!blocks.is_empty(), "{} has no blocks", op.kernel.name());
        let whole = self.outputs(&kernels, &op, &blocks, &self.memory);
        let dense = self.outputs(&Reference::dense(), &op, &blocks, &self.memory);
        assert!(whole == dense, "{}: the fast path differs from the plain one", op.kernel.name());
        let mut apart = BTreeMap::new();
        let step = blocks.len().div_ceil(24);
        for (number, block) in blocks.iter().enumerate() {
            let bytes = self.outputs(&kernels, &op, std::slice::from_ref(block), &self.memory);
            if number % step == 0 {
                self.check_declared(&kernels, &op, block, &bytes);
            }
            apart.extend(bytes);
        }
        assert!(whole == apart, "{}: blocks differ from the whole launch", op.kernel.name());
        for (address, byte) in whole {
            self.memory.write(address, &[byte]);
        }
    }

    fn outputs(&self, kernels: &Reference, op: &Op, blocks: &[Block], memory: &Memory) -> BTreeMap<u64, u8> {
        let mut scratch = Scratch::default();
        kernels.compute(op, blocks, &View::new(op, memory, &self.weights), &mut Writes::new(op, &mut scratch));
        scratch.iter().flat_map(|(range, bytes)| range.clone().zip(bytes.iter().copied())).collect()
    }

    fn check_declared(&self, kernels: &Reference, op: &Op, block: &Block, bytes: &BTreeMap<u64, u8>) {
        let mut junk = Memory::new(self.memory.len());
        let mut rng = Seed(u64::from(block.index)).fork("junk").rng();
        junk.write(0, &noise(&mut rng, self.memory.len()));
        let mut written: Vec<Range<u64>> = Vec::new();
        kernels.accesses(op, block, &self.memory, &mut |touch, range| match touch {
            Touch::Write => written.push(range),
            Touch::Index | Touch::Read => junk.write(range.start, self.memory.bytes(range.clone())),
        });
        let declared: std::collections::BTreeSet<u64> = written.into_iter().flatten().collect();
        let name = op.kernel.name();
        assert!(declared.iter().eq(bytes.keys()), "{name} block {block:?} writes other bytes than it declares");
        let alone = self.outputs(kernels, op, std::slice::from_ref(block), &junk);
        assert!(alone == *bytes, "{name} block {block:?} reads bytes that it does not declare");
    }
}

fn noise(rng: &mut Pcg64Mcg, bytes: u64) -> Vec<u8> {
    let mut noise = vec![0; bytes as usize];
    rng.fill_bytes(&mut noise);
    noise
}

/// Panics unless `ours` is within `relative` of `naive`, element by element, on the scale of the largest.
pub(super) fn assert_close(ours: &[f64], naive: &[f64], relative: f64, what: &str) {
    assert_eq!(ours.len(), naive.len(), "{what}");
    let scale = naive.iter().fold(1e-3, |largest: f64, value| largest.max(value.abs()));
    for (at, (a, b)) in ours.iter().zip(naive).enumerate() {
        assert!((a - b).abs() <= relative * scale, "{what}, element {at}: {a} instead of {b}");
    }
}
