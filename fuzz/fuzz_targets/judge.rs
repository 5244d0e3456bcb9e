//! Any body: no panic, and the same judgement in every chunking.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use toolstorm::validate::{Ending, Expectation, Observation, Reader, judge, judge_answer, record};

/// What is expected: a closed schema, an oracle and canaries, so that every rule has something to do.
static EXPECTATION: LazyLock<Expectation> = LazyLock::new(|| {
    let case = r#"{"body": "", "stream": true, "tools": [{"type": "function", "function": {"name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"], "additionalProperties": false}}}], "context": {"own_canary": "S-0102-KD",
        "foreign_canaries": ["S-0417-QX"], "foreign_tools": ["book_room"],
        "expect_calls": [{"name": "get_weather", "arguments": {"city": "Lyon"}}]}}"#;
    record::read("fuzz", case.as_bytes()).expect("the case is sound").remove(0).expectation
});

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, body)) = bytes.split_first() else { return };
    let stream = first & 1 == 0;
    let ending = if first & 2 == 0 { Ending::Eof } else { Ending::Reset };
    let observation = Observation { http_status: 200, content_type: None, stream, body, ending };
    let whole = judge(&observation, &EXPECTATION);
    let mut reader = Reader::new(stream);
    body.chunks(usize::from(first >> 2) + 1).for_each(|piece| reader.feed(piece));
    assert_eq!(judge_answer(&observation, &EXPECTATION, &reader.finish()), whole);
});
