//! What a token costs on its way out: parsed, and written as one server-sent event, in 64 streams.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use toolstorm::engine::{
    request::{Event, Finish, Usage},
    server::stream::{Collector, EventWriter, Identity, Reader},
};

const STREAMS: u64 = 64;
const ANSWER: &[u8] =
    br#"get_weather", "arguments": {"city": "Lodz", "note": "a \"quoted\" word and a tab\t", "days": [1, 2, 3]}}"#;

fn identity(number: u64) -> Identity {
    Identity { number, created: 1_700_000_000, model: "toolstorm-copy".into() }
}

fn events() -> impl Iterator<Item = Event> {
    ANSWER.iter().map(|token| Event::Token(*token)).chain([Event::Finished(Finish::Stop, Usage::default())])
}

fn streamed() {
    for number in 0..STREAMS {
        let mut writer = EventWriter::new(Reader::new(true, true), identity(number), 1, true);
        for event in events() {
            let mut text = String::new();
            writer.write(event, &mut text);
            black_box(text);
        }
    }
}

fn collected() {
    for number in 0..STREAMS {
        let (mut collector, identity) = (Collector::new(Reader::new(true, true)), identity(number));
        for event in events() {
            black_box(collector.take(event, &identity));
        }
    }
}

fn serving(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("serving");
    group.throughput(Throughput::Elements(STREAMS * ANSWER.len() as u64));
    group.bench_function("events", |bencher| bencher.iter(streamed));
    group.bench_function("objects", |bencher| bencher.iter(collected));
    group.finish();
}

criterion_group!(benches, serving);
criterion_main!(benches);
