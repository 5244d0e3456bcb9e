//! When the parts of a response came.

use std::time::Duration;

use serde::Deserialize;
use serde_json::value::RawValue;

/// The times of one response, all since sending.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Timing {
    /// The status line.
    pub first_byte: Option<Duration>,
    /// Each output event of a stream.
    pub outputs: Vec<Duration>,
    /// The last byte.
    pub end: Duration,
}

impl Timing {
    /// Time to the first output token: streams only.
    pub fn ttft_ms(&self) -> Option<f64> {
        self.outputs.first().map(|time| millis(*time))
    }

    /// Mean time between output tokens, of which there were `tokens`.
    pub fn tpot_ms(&self, tokens: Option<u64>) -> Option<f64> {
        let (first, last) = (self.outputs.first()?, self.outputs.last()?);
        let gaps = tokens.unwrap_or(self.outputs.len() as u64).saturating_sub(1);
        (gaps > 0 && last > first).then(|| millis(last.saturating_sub(*first)) / gaps as f64)
    }

    /// Gaps between output events in microseconds.
    pub fn itl_us(&self) -> Vec<u32> {
        self.outputs
            .windows(2)
            .map(|pair| pair[1].saturating_sub(pair[0]).as_micros().min(u32::MAX.into()) as u32)
            .collect()
    }

    /// The whole request.
    pub fn e2el_ms(&self) -> f64 {
        millis(self.end)
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Whether the data of a stream's event brings output: text, reasoning or part of a call.
pub(super) fn brings_output(data: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Chunk<'a> {
        #[serde(borrow)]
        choices: Vec<Choice<'a>>,
    }
    #[derive(Deserialize)]
    struct Choice<'a> {
        #[serde(borrow)]
        delta: Delta<'a>,
    }
    #[derive(Deserialize)]
    struct Delta<'a> {
        #[serde(borrow)]
        content: Option<&'a RawValue>,
        #[serde(borrow)]
        reasoning_content: Option<&'a RawValue>,
        #[serde(borrow)]
        reasoning: Option<&'a RawValue>,
        #[serde(borrow)]
        tool_calls: Option<&'a RawValue>,
    }
    let Ok(chunk) = serde_json::from_slice::<Chunk<'_>>(data) else { return false };
    let full = |part: Option<&RawValue>| part.is_some_and(|raw| !matches!(raw.get(), "null" | "\"\"" | "[]"));
    chunk.choices.iter().any(|choice| {
        let delta = &choice.delta;
        full(delta.content) || full(delta.reasoning_content) || full(delta.reasoning) || full(delta.tool_calls)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn role_usage_and_finish_frames_bring_no_output() {
        let output = |text: &str| brings_output(text.as_bytes());
        assert!(!output(r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#));
        assert!(!output(r#"{"choices":[],"usage":{"completion_tokens":3}}"#));
        assert!(!output(r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#));
        assert!(!output("[DONE]"));
        assert!(output(r#"{"choices":[{"delta":{"content":"a"}}]}"#));
        assert!(output(r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#));
    }

    #[test]
    fn token_times_follow_the_reported_tokens() {
        let at = Duration::from_millis;
        let timing = Timing { first_byte: Some(at(5)), outputs: vec![at(10), at(20), at(50)], end: at(60) };
        assert_eq!(timing.ttft_ms(), Some(10.0));
        assert_eq!(timing.tpot_ms(Some(5)), Some(10.0));
        assert_eq!(timing.tpot_ms(None), Some(20.0));
        assert_eq!(timing.itl_us(), [10_000, 30_000]);
        assert_eq!(Timing::default().tpot_ms(None), None);
    }
}
