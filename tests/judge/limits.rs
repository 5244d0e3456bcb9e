//! Hostile sizes: linear time, bounded memory, a named error; and no input panics.

use proptest::prelude::*;
use toolstorm::validate::{Class, Ending, Expectation, Judgement, Observation, Reader, judge, judge_answer};

use crate::cases;

const HEAD: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"c\",\"function\":\
    {\"name\":\"f\",\"arguments\":\"\"}}]}}]}\n\n";
const TAIL: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\n\ndata: [DONE]\n\n";

fn observe(stream: bool, body: &[u8]) -> Observation<'_> {
    Observation { http_status: 200, content_type: None, stream, body, ending: Ending::Eof }
}

fn unknown() -> Expectation {
    Expectation { tools_unknown: true, ..Expectation::default() }
}

fn judge_fed(body: &[u8], size: usize) -> Judgement {
    let mut reader = Reader::new(true);
    body.chunks(size).for_each(|piece| reader.feed(piece));
    judge_answer(&observe(true, body), &unknown(), &reader.finish())
}

fn delta(arguments: &str) -> String {
    let text = serde_json::to_string(arguments).unwrap();
    format!(
        "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"tool_calls\":[{{\"index\":0,\"function\":{{\"arguments\":{text}}}}}]}}}}]}}\n\n"
    )
}

#[test]
fn a_line_of_a_hundred_megabytes_is_a_bad_frame() {
    let mut body = HEAD.as_bytes().to_vec();
    body.extend_from_slice(b"data: ");
    body.resize(100 << 20, b'x');
    body.extend_from_slice(b"\n\n");
    body.extend_from_slice(TAIL.as_bytes());
    for size in [1 << 16, body.len()] {
        let judgement = judge_fed(&body, size);
        assert_eq!(judgement.class, Class::BadFrame);
        assert_eq!(judgement.detail.as_deref(), Some("a line or event is longer than 16777216 bytes"));
    }
    assert_eq!(judge(&observe(false, &body), &unknown()).class, Class::BadFrame);
}

#[test]
fn a_million_reads_of_one_byte_are_read() {
    let text = format!("{{\"a\": \"{}\"}}", "xyz ".repeat(5));
    let deltas: String = text.chars().map(|character| delta(&character.to_string())).collect();
    let filler = ": comment\n\n".repeat(100_000);
    let body = format!("{HEAD}{filler}{deltas}{TAIL}");
    assert!(body.len() > 1_000_000);
    assert_eq!(judge_fed(body.as_bytes(), 1).class, Class::Ok);
}

#[test]
fn a_hundred_thousand_deltas_make_one_call() {
    let body = format!("{HEAD}{}{}{}{TAIL}", delta("{\"a\": \""), delta("q%"), delta("z"));
    assert_eq!(judge_fed(body.as_bytes(), body.len()).class, Class::ArgsTruncated);
    let deltas: String = (0..100_000).map(|number| delta(&format!("{number},"))).collect();
    let body = format!("{HEAD}{}{deltas}{}{TAIL}", delta("{\"a\": \""), delta("\"}"));
    let judgement = judge_fed(body.as_bytes(), 4096);
    assert_eq!(judgement.class, Class::Ok, "{:?}", judgement.detail);
    assert!(judgement.calls[0].arguments.len() > 500_000);
}

#[test]
fn too_many_calls_are_named() {
    let call = |index: u32| {
        format!(
            "data: {{\"choices\":[{{\"delta\":{{\"tool_calls\":[{{\"index\":{index},\"id\":\"c{index}\",\"function\":{{\"name\":\"f\",\"arguments\":\"{{}}\"}}}}]}}}}]}}\n\n"
        )
    };
    let body: String = (0..100_000).map(call).collect();
    let judgement = judge_fed(body.as_bytes(), 1 << 16);
    assert_eq!(judgement.detail.as_deref(), Some("more than 4096 calls in one answer"));
}

#[test]
fn deep_nesting_is_cut_in_frames_and_in_arguments() {
    let deep = (0..100_000).fold(String::new(), |mut text, number| {
        text.push_str(&format!("{{\"k{number}\":"));
        text
    });
    let body = format!("{HEAD}{}{TAIL}", delta(&deep));
    let judgement = judge_fed(body.as_bytes(), body.len());
    assert_eq!(judgement.class, Class::ArgsMalformed);
    assert!(judgement.calls[0].detail.as_ref().unwrap().starts_with("nested deeper than 256 at byte"));
    let frame = format!("{HEAD}data: {}{}\n\n{TAIL}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(judge_fed(frame.as_bytes(), frame.len()).class, Class::BadFrame);
    let object = format!("{{\"choices\":{}", "{\"a\":".repeat(100_000));
    assert_eq!(judge(&observe(false, object.as_bytes()), &unknown()).class, Class::BadEnvelope);
}

/// The time for ten times the input is not a hundred times as long; counted in work, not in seconds.
#[test]
fn long_hostile_texts_are_judged() {
    for unit in ["<", "[", "{\"a\":", "!a", "\\u", "ab", "|", "<|", "т", "}{", "\u{fffd}"] {
        let text = unit.repeat(400_000 / unit.len());
        let body = format!("{HEAD}{}{TAIL}", delta(&text));
        assert_ne!(judge_fed(body.as_bytes(), body.len()).class, Class::Ok, "{unit}");
        let content = serde_json::to_string(&text).unwrap();
        let body = format!("{{\"choices\":[{{\"message\":{{\"content\":{content}}},\"finish_reason\":\"stop\"}}]}}");
        judge(&observe(false, body.as_bytes()), &unknown());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400), size in 1_usize..40, stream: bool) {
        let whole = judge(&observe(stream, &bytes), &unknown());
        let mut reader = Reader::new(stream);
        bytes.chunks(size).for_each(|piece| reader.feed(piece));
        prop_assert_eq!(judge_answer(&observe(stream, &bytes), &unknown(), &reader.finish()), whole);
    }
}

/// Bytes of real cases, damaged anywhere: nothing panics, and every chunking agrees.
#[test]
fn no_damaged_case_panics() {
    let mut corrupted = 0;
    for (number, case) in cases::all().iter().enumerate() {
        for step in 0..40 {
            let mut body = case.record.body.clone();
            if body.is_empty() {
                continue;
            }
            let at = (number * 131 + step * 977) % body.len();
            match step % 4 {
                0 => body[at] ^= 1 << (step % 8),
                1 => body.truncate(at),
                2 => drop(body.remove(at)),
                _ => body.insert(at, b"\"\\{}[]\n\x80"[step % 8]),
            }
            let observation = Observation { body: &body, ..case.record.observation() };
            let whole = judge(&observation, &case.record.expectation);
            let mut reader = Reader::new(case.record.stream);
            body.chunks(1 + step).for_each(|piece| reader.feed(piece));
            let fed = judge_answer(&observation, &case.record.expectation, &reader.finish());
            assert_eq!(fed, whole, "{} step {step}", case.record.id);
            corrupted += u32::from(whole.class != Class::Ok);
        }
    }
    assert!(corrupted > 1000, "only {corrupted} of the damaged cases were called anything");
}
