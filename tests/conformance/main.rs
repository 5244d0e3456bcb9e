//! One suite for both backends: every kernel on random inputs, with poisoned outputs.
//!
//! On each backend, bytes outside an op's declared writes never change, and changing bytes outside its declared reads never
//! changes what it writes. Where a GPU is found, both backends run the same cases at the same addresses and must write the
//! same bytes: all of them where the arithmetic is exact or done in one order, within the stated tolerance elsewhere.
//! `cargo test --test conformance -- --ignored` runs the part that needs a GPU.

mod cases;
mod engine;

use toolstorm::{
    device::{
        Device, Operand,
        cuda::Cuda,
        sim::{Config, Sim, reference::Reference},
    },
    seed::Seed,
};

use cases::{CASES, Case, Prepared, Tolerance};

const REPETITIONS: u64 = 3;

fn virtual_gpu() -> Device {
    Device::new(Box::new(Sim::new(Config::default(), Box::new(Reference::new()))))
}

fn cuda() -> Device {
    Device::new(Box::new(Cuda::open(0).expect("a CUDA device")))
}

/// Bytes of every tensor of a case.
type Image = Vec<Vec<u8>>;

fn image(device: &Device, case: &Prepared) -> Image {
    let read = |tensor: &toolstorm::device::Tensor| {
        let mut bytes = vec![0; tensor.bytes() as usize];
        device.copy_out(tensor.address(), &mut bytes).expect("a copy from the device");
        bytes
    };
    case.tensors.iter().map(read).collect()
}

fn load(device: &Device, case: &Prepared, image: &Image) {
    for (tensor, bytes) in case.tensors.iter().zip(image) {
        device.copy_in(tensor.address(), bytes).expect("a copy to the device");
    }
}

fn run(device: &Device, case: &Prepared, before: &Image) -> Image {
    load(device, case, before);
    device.enqueue(case.stream, case.op.clone()).expect("a launch");
    device.synchronize().expect("an end");
    image(device, case)
}

/// For each tensor, which of its bytes lie in one of `operands`.
fn covered(case: &Prepared, operands: &[Operand]) -> Vec<Vec<bool>> {
    let mut marks: Vec<_> = case.tensors.iter().map(|tensor| vec![false; tensor.bytes() as usize]).collect();
    for operand in operands {
        let at = case.tensors.iter().position(|tensor| tensor.lifetime() == operand.lifetime).expect("a tensor");
        for row in 0..operand.region.rows {
            let range = operand.region.row(row);
            let start = case.tensors[at].address();
            marks[at][(range.start - start) as usize..(range.end - start) as usize].fill(true);
        }
    }
    marks
}

/// Runs one case, checks what holds on any backend, and returns the bytes before and after.
fn check(device: &Device, case: &Case, seed: Seed) -> (Prepared, Image, Image) {
    let prepared = Prepared::new(device, case, seed);
    let before = image(device, &prepared);
    let after = run(device, &prepared, &before);
    let (reads, writes) = (covered(&prepared, &prepared.op.reads), covered(&prepared, &prepared.op.writes));

    let mut scrambled = before.clone();
    let mut noise = seed.fork("scramble").rng();
    let (mut changed, mut scrambled_bytes) = (0u64, 0u64);
    for tensor in 0..before.len() {
        for byte in 0..before[tensor].len() {
            if after[tensor][byte] != before[tensor][byte] {
                assert!(writes[tensor][byte], "{}: tensor {tensor}, byte {byte} is no declared write", case.name);
                changed += 1;
            }
            if !reads[tensor][byte] {
                scrambled[tensor][byte] = rand::RngExt::random(&mut noise);
                scrambled_bytes += 1;
            }
        }
    }
    assert!(changed > 0, "{}: nothing was written", case.name);
    assert!(scrambled_bytes > 0, "{}: nothing could be scrambled", case.name);

    let again = run(device, &prepared, &scrambled);
    let exact: Vec<_> = prepared.op.writes.iter().filter(|operand| !operand.indexed).copied().collect();
    let whole = covered(&prepared, &exact);
    for tensor in 0..before.len() {
        for byte in 0..before[tensor].len() {
            let written = whole[tensor][byte] || after[tensor][byte] != before[tensor][byte];
            if written && writes[tensor][byte] {
                assert_eq!(
                    again[tensor][byte], after[tensor][byte],
                    "{}: tensor {tensor}, byte {byte} depends on undeclared bytes",
                    case.name
                );
            }
        }
    }
    (prepared, before, after)
}

fn value(bytes: &[u8], width: usize) -> f32 {
    match width {
        2 => f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

/// Compares two backends' bytes and returns the largest error in units of the tolerance, or where they differ by more.
fn compare(case: &Case, prepared: &Prepared, before: &Image, ours: &Image, theirs: &Image) -> Result<f32, String> {
    let written = covered(prepared, &prepared.op.writes);
    let mut worst = 0.0f32;
    for tensor in 0..ours.len() {
        let (width, bound) = match case.tolerance {
            Tolerance::Exact => (1, 0.0),
            Tolerance::Bf16(bound) => (2, bound),
            Tolerance::F32(bound) | Tolerance::OfLargest(bound) => (4, bound),
        };
        // What nearly cancels keeps the error of its terms, so the largest that was written is the measure.
        let of_largest = matches!(case.tolerance, Tolerance::OfLargest(_)).then(|| {
            let pairs = theirs[tensor].chunks_exact(width).zip(before[tensor].chunks_exact(width));
            pairs.filter(|(new, old)| new != old).map(|(new, _)| value(new, width).abs()).fold(1.0, f32::max)
        });
        for at in (0..ours[tensor].len() / width * width).step_by(width) {
            let (a, b) = (&ours[tensor][at..at + width], &theirs[tensor][at..at + width]);
            if a == b {
                continue;
            }
            if bound == 0.0 || !written[tensor][at] {
                return Err(format!("{}: tensor {tensor}, byte {at}: {a:x?} and {b:x?}", case.name));
            }
            let (a, b) = (value(a, width), value(b, width));
            let scale = of_largest.unwrap_or(b.abs().max(1.0));
            let error = (a - b).abs() / (scale * bound);
            if error.is_nan() || error > 1.0 {
                return Err(format!("{}: tensor {tensor}, byte {at}: {a} and {b}", case.name));
            }
            worst = worst.max(error);
        }
    }
    Ok(worst)
}

#[test]
fn kernels_touch_what_they_declare_on_the_virtual_gpu() {
    let device = virtual_gpu();
    for case in CASES {
        for repetition in 0..REPETITIONS {
            check(&device, case, Seed(repetition).fork(case.name));
        }
    }
    assert!(CASES.len() >= 30, "{} cases", CASES.len());
}

/// What a sanitizer's run takes: `CONFORMANCE_SHARD=2/6` is every sixth case from the third on, and
/// `CONFORMANCE_REPETITIONS` how often each runs.
fn part() -> (usize, usize, u64) {
    let variable = toolstorm::env::var;
    let shard = variable("CONFORMANCE_SHARD").unwrap_or_else(|| "0/1".to_owned());
    let (shard, shards) = shard.split_once('/').expect("a shard of shards");
    let repetitions = variable("CONFORMANCE_REPETITIONS").map(|count| count.parse().expect("a number"));
    (shard.parse().expect("a number"), shards.parse().expect("a number"), repetitions.unwrap_or(REPETITIONS))
}

#[test]
#[ignore = "needs a GPU"]
fn both_backends_compute_the_same() {
    let (sim, cuda) = (virtual_gpu(), cuda());
    let (shard, shards, repetitions) = part();
    let cases: Vec<&Case> = CASES.iter().skip(shard).step_by(shards).collect();
    // All cases run, whatever one of them shows.
    let mut differences = Vec::new();
    for case in &cases {
        let (mut worst, known) = (0.0f32, differences.len());
        for repetition in 0..repetitions {
            let seed = Seed(repetition).fork(case.name);
            let (prepared, before, expected) = check(&sim, case, seed);
            let (other, start, got) = check(&cuda, case, seed);
            assert_eq!(prepared.op, other.op, "{}: the backends were asked for different ops", case.name);
            assert!(before == start, "{}: the backends started differently", case.name);
            match compare(case, &prepared, &before, &got, &expected) {
                Ok(error) => worst = worst.max(error),
                Err(difference) => differences.push(difference),
            }
        }
        let differ = if differences.len() > known { ", differs by more" } else { "" };
        println!("{:32} {:?}, worst {worst:.2} of it{differ}", case.name, case.tolerance);
    }
    println!("{} cases, {repetitions} times each", cases.len());
    assert!(differences.is_empty(), "the backends differ:\n{}", differences.join("\n"));
}
