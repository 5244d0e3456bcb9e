//! `latency.hlog`: an HdrHistogram log, one tagged histogram for each launch and latency, that other tools can merge.

use std::time::{Duration, SystemTime};

use hdrhistogram::serialization::{V2DeflateSerializer, interval_log::IntervalLogWriterBuilder};

use super::{measure::histograms, tally::Tally};
use crate::{
    error::{Error, Result},
    run::Plan,
};

/// The whole log. Values are microseconds; intervals follow each other as the launches did.
pub(super) fn render(plan: &Plan, tally: &Tally) -> Result<String> {
    let fail = |error: &dyn std::fmt::Display| Error::usage(format!("latency.hlog: {error}"));
    let mut bytes = Vec::new();
    let mut serializer = V2DeflateSerializer::new();
    let mut builder = IntervalLogWriterBuilder::new();
    builder.with_start_time(SystemTime::UNIX_EPOCH).with_max_value_divisor(1000.0);
    builder
        .add_comment(&format!("toolstorm {}: microseconds, tagged arm.launch.latency", plan.name.replace('\n', " ")));
    let mut writer =
        builder.begin_log_with(&mut bytes, &mut serializer).map_err(|error| fail(&format!("{error:?}")))?;
    let mut start = Duration::ZERO;
    for (number, launch) in &tally.launches {
        let length = Duration::try_from_secs_f64(launch.wall_ms / 1e3).unwrap_or_default();
        let answers = launch.sessions.values().filter(|session| !session.warmup).flat_map(|session| &session.answers);
        for (name, histogram) in histograms(answers) {
            let plain =
                |letter: char| if letter.is_ascii_alphanumeric() || "-_".contains(letter) { letter } else { '_' };
            let arm: String = launch.arm.chars().map(plain).collect();
            let text = format!("{arm}.{number}.{name}");
            let tag = hdrhistogram::serialization::interval_log::Tag::new(&text).ok_or_else(|| fail(&"bad tag"))?;
            writer
                .write_histogram(&histogram, start, length, Some(tag))
                .map_err(|error| fail(&format!("{error:?}")))?;
        }
        start += length;
    }
    drop(writer);
    String::from_utf8(bytes).map_err(|error| fail(&error))
}
