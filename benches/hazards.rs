//! The analyser over graphs of 10^3 to 10^6 nodes on 8 streams, each node with a lifetime of its own in recycled bytes.

#![expect(clippy::print_stderr, reason = "a bench says what it measured beside its times")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use toolstorm::{
    device::Region,
    hazard::{Access, Capture, Lifetime, Node, Site, Touch, analyse},
};

const STREAMS: u32 = 8;
/// Nodes of one stream between a fork and the next join.
const BRANCH: u32 = 6;
const BLOCK: u64 = 512;
/// Blocks that are recycled: those of about ten layers.
const RING: u64 = 512;

/// Layers that fork to every stream and join again; each node reads its predecessor's output, the layer's input and a
/// shared weight, and writes a block that an earlier layer used; a fork reads what the layer before left. With
/// `mistakes`, one join in ten is missing.
fn graph(nodes: u32, mistakes: bool) -> Capture {
    let mut capture = Capture { streams: (0..STREAMS).map(|s| format!("s{s}")).collect(), ..Capture::default() };
    let mut tails: Vec<Option<u32>> = vec![None; STREAMS as usize];
    let mut layer = 0;
    capture.lifetimes.push(Lifetime {
        name: "weight".to_owned(),
        bytes: 1 << 40..(1 << 40) + 4096,
        ..Lifetime::default()
    });
    while (capture.nodes.len() as u32) < nodes {
        let fork = node(&mut capture, 0, tails[0], &tails[1..]);
        if !(mistakes && layer % 10 == 9) {
            capture.edges.extend(tails[1..].iter().flatten().map(|&tail| (tail, fork)));
        }
        tails[0] = Some(fork);
        for stream in 0..STREAMS {
            for step in 0..BRANCH {
                let before = if step == 0 { Some(fork) } else { tails[stream as usize] };
                tails[stream as usize] = Some(node(&mut capture, stream, before, &[Some(fork)]));
            }
        }
        layer += 1;
    }
    capture
}

fn node(capture: &mut Capture, stream: u32, before: Option<u32>, inputs: &[Option<u32>]) -> u32 {
    let at = capture.nodes.len() as u32;
    capture.nodes.push(Node { kernel: "op".to_owned(), stream: Some(stream), ..Node::default() });
    let previous = capture.nodes[..at as usize].iter().rposition(|n| n.stream == Some(stream)).map(|p| p as u32);
    capture.edges.extend(before.map(|b| (b, at)));
    capture.edges.extend(previous.filter(|p| before.is_some_and(|b| b != *p)).map(|p| (p, at)));
    let start = u64::from(at) % RING * BLOCK;
    let site = |node| Site { node, frames: Vec::new() };
    capture.lifetimes.push(Lifetime {
        name: "block".to_owned(),
        key: u64::from(at),
        bytes: start..start + BLOCK,
        allocated: site(at),
        freed: Some(site(at + 2)),
        inside: true,
        ..Lifetime::default()
    });
    let mut touch = |lifetime: u32, access| {
        let bytes = &capture.lifetimes[lifetime as usize].bytes;
        let region = Region::contiguous(bytes.start, bytes.end - bytes.start);
        capture.touches.push(Touch { node: at, lifetime, region, access, sure: true, firm: true });
    };
    touch(at + 1, Access::Write);
    touch(0, Access::Read);
    for read in before.iter().chain(inputs.iter().flatten().filter(|i| before != Some(**i))) {
        touch(read + 1, Access::Read);
    }
    at
}

fn scale(c: &mut Criterion) {
    let mut group = c.benchmark_group("hazards");
    group.sample_size(10);
    for nodes in [1_000, 10_000, 100_000, 1_000_000] {
        let capture = graph(nodes, false);
        let found = analyse(&capture).expect("a sound graph");
        eprintln!("{nodes} nodes: {} hazards on {} chains", found.hazards.len(), found.order.chains());
        group.throughput(Throughput::Elements(u64::from(nodes)));
        group.bench_with_input(BenchmarkId::new("clean", nodes), &capture, |b, capture| {
            b.iter(|| analyse(black_box(capture)).map(|a| a.hazards.len()));
        });
    }
    let capture = graph(100_000, true);
    let found = analyse(&capture).expect("a sound graph");
    eprintln!("one join in ten missing: {} hazards", found.hazards.len());
    group.bench_function("mistakes/100000", |b| b.iter(|| analyse(black_box(&capture)).map(|a| a.hazards.len())));
    group.finish();
}

criterion_group!(benches, scale);
criterion_main!(benches);
