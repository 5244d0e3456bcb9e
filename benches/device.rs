//! The virtual GPU's own cost, without any arithmetic: blocks per second of the timing pass, with and without ops that
//! meet in conflict; and the allocator.

use std::{hint::black_box, ops::Range};

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use toolstorm::device::{
    Block, Device, Graph, Op, PoolId, StreamId,
    kernel::Kernel,
    pool::Allocator,
    sim::{Config, Kernels, Memory, Sim, Touch, View, Writes},
};

const LAYERS: u64 = 5;
const OPS: u64 = 24;
const BLOCKS: u64 = 85;
const ROW: u64 = 256;

/// One block a row; no arithmetic.
struct Idle;

impl Kernels for Idle {
    fn blocks(&self, op: &Op, _memory: &Memory, out: &mut Vec<Block>) {
        let rows = op.writes[0].region.rows as u32;
        out.extend((0..rows).map(|index| Block { index, part: 0, bytes: 150_000, flops: 0 }));
    }

    fn accesses(&self, op: &Op, block: &Block, _memory: &Memory, visit: &mut dyn FnMut(Touch, Range<u64>)) {
        let row = u64::from(block.index);
        op.reads.iter().for_each(|operand| visit(Touch::Read, operand.region.row(row)));
        op.writes.iter().for_each(|operand| visit(Touch::Write, operand.region.row(row)));
    }

    fn compute(&self, _op: &Op, _blocks: &[Block], _view: &View<'_>, _out: &mut Writes<'_>) {}
}

/// A graph of the decode step's shape: four streams a layer that fork and join. With `shared`, all write the same bytes.
fn graph(device: &Device, shared: bool) -> Graph {
    device.reserve(256 << 20).expect("an arena");
    let streams: Vec<StreamId> =
        ["main", "kv", "compressor", "indexer"].map(|name| device.stream(name).expect("a stream")).to_vec();
    let pool = device.graph_pool();
    device.begin_capture("step", streams[0], pool).expect("a capture");
    let buffers: Vec<_> = (0..OPS).map(|_| device.alloc(streams[0], BLOCKS * ROW, "buffer").expect("room")).collect();
    for _ in 0..LAYERS {
        streams[1..].iter().for_each(|&side| device.wait_stream(side, streams[0]).expect("a fork"));
        for op in 0..OPS {
            let buffer = &buffers[if shared { 0 } else { op as usize }];
            let writes = vec![buffer.operand(buffer.region(ROW, ROW, BLOCKS, 0))];
            let op_record = Op { kernel: Kernel::Copy, reads: writes.clone(), writes, layer: None };
            device.enqueue(streams[(op % 4) as usize], op_record).expect("an op");
        }
        streams[1..].iter().for_each(|&side| device.wait_stream(streams[0], side).expect("a join"));
    }
    device.end_capture().expect("a graph")
}

fn launches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("launch");
    group.throughput(Throughput::Elements(LAYERS * OPS * BLOCKS));
    for (name, shared) in [("disjoint", false), ("conflicting", true)] {
        let device = Device::new(Box::new(Sim::new(Config::default(), Box::new(Idle))));
        let graph = graph(&device, shared);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                device.launch(&graph).expect("a launch");
                device.synchronize().expect("a run");
                device.drain_race_hits().len()
            });
        });
    }
    group.finish();
}

fn allocator(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocator");
    let sizes = [8192, 3072, 2048, 16_384, 8200, 2048, 1024, 65_536, 16_384, 8192].map(|row: u64| row * 64);
    group.throughput(Throughput::Elements(100 * sizes.len() as u64));
    group.bench_function("alloc and free", |bencher| {
        let warm = || {
            let mut allocator = Allocator::default();
            allocator.reserve(1 << 40);
            allocator
        };
        bencher.iter_batched_ref(
            warm,
            |allocator| {
                for _ in 0..100 {
                    let taken = sizes.map(|size| allocator.alloc(PoolId::DEFAULT, StreamId(0), size).expect("room"));
                    for address in taken {
                        allocator.free(PoolId::DEFAULT, black_box(address));
                    }
                }
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(benches, launches, allocator);
criterion_main!(benches);
