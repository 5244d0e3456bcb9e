//! Judged server-sent events a second on one core: decoded, reassembled, parsed, schema-checked, compared.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use serde_json::json;
use toolstorm::{
    sse::Decoder,
    validate::{Class, Ending, Expectation, ExpectedCall, Observation, Reader, Tools, judge},
};

const DELTAS: usize = 200;

/// A stream of one call in `DELTAS` fragments of one word each, and what is expected of it.
fn stream() -> (String, Expectation, u64) {
    let words: Vec<String> = (0..DELTAS - 4).map(|number| format!("word{number} ")).collect();
    let arguments = json!({"nonce": "S-0102-KD", "seq": 7, "text": words.concat()});
    let frame = |delta: serde_json::Value, finish: Option<&str>| {
        let frame = json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]});
        format!("data: {frame}\n\n")
    };
    let entry = |arguments: &str| json!({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]});
    let mut body = frame(json!({"role": "assistant", "content": null}), None);
    let opener =
        json!({"index": 0, "id": "call_1", "type": "function", "function": {"name": "store", "arguments": ""}});
    body += &frame(json!({"tool_calls": [opener]}), None);
    body += &frame(entry("{\"nonce\": \"S-0102-KD\", \"seq\": 7, \"text\": \""), None);
    words.iter().for_each(|word| body += &frame(entry(word), None));
    body += &frame(entry("\"}"), None);
    body += &frame(json!({}), Some("tool_calls"));
    body += "data: [DONE]\n\n";
    let parameters = json!({"type": "object", "additionalProperties": false, "required": ["nonce", "seq", "text"],
        "properties": {"nonce": {"type": "string"}, "seq": {"type": "integer"}, "text": {"type": "string"}}});
    let expectation = Expectation {
        tools: Tools::new(vec![json!({"type": "function", "function": {"name": "store", "parameters": parameters}})]),
        calls: Some(vec![ExpectedCall { name: "store".to_owned(), arguments, text: None }]),
        own_canary: Some("S-0102-KD".to_owned()),
        ..Expectation::default()
    };
    let events = body.matches("data: ").count() as u64;
    (body, expectation, events)
}

fn judging(criterion: &mut Criterion) {
    let (body, expectation, events) = stream();
    let observation = Observation {
        http_status: 200,
        content_type: Some("text/event-stream"),
        stream: true,
        body: body.as_bytes(),
        ending: Ending::Eof,
    };
    assert_eq!(judge(&observation, &expectation).class, Class::Ok);
    let mut group = criterion.benchmark_group("judge");
    group.throughput(Throughput::Elements(events));
    group.bench_function("whole", |bencher| bencher.iter(|| judge(black_box(&observation), &expectation)));
    group.bench_function("reassemble", |bencher| bencher.iter(|| Reader::read(true, black_box(body.as_bytes()))));
    group.bench_function("decode", |bencher| {
        bencher.iter(|| {
            let mut count = 0_u64;
            Decoder::new().feed(black_box(body.as_bytes()), |_| count += 1);
            count
        });
    });
    group.finish();
}

criterion_group!(benches, judging);
criterion_main!(benches);
