//! Any bytes, cut anywhere: the same events.

#![no_main]

use libfuzzer_sys::fuzz_target;
use toolstorm::sse::Decoder;

fn events(bytes: &[u8], size: usize) -> Vec<String> {
    let mut events = Vec::new();
    let mut decoder = Decoder::with_limit(200);
    for piece in bytes.chunks(size) {
        decoder.feed(piece, |event| events.push(format!("{event:?}")));
    }
    decoder.finish(|event| events.push(format!("{event:?}")));
    events
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&size, body)) = bytes.split_first() else { return };
    assert_eq!(events(body, usize::from(size).max(1)), events(body, body.len().max(1)));
});
