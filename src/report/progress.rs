//! Live progress on stderr: a bar on a terminal, plain lines elsewhere.

use std::{collections::BTreeMap, io::IsTerminal};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::terminal::Console;
use crate::{
    error::Result,
    run::{Consumer, RunEvent, SessionEnd},
    validate::Verdict,
};

/// Shows what happens.
pub struct Progress {
    console: Console,
    bars: MultiProgress,
    now: BTreeMap<u32, Now>,
    launches: usize,
    begun: usize,
}

/// A launch that runs.
#[derive(Default)]
struct Now {
    bar: Option<ProgressBar>,
    arm: String,
    total: u64,
    ended: u64,
    corrupted: u64,
    calls: u64,
    damaged: u64,
}

impl Progress {
    /// Progress over `launches` launches.
    pub fn new(console: Console, launches: usize) -> Self {
        let bars = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(8));
        Self { console, bars, now: BTreeMap::new(), launches, begun: 0 }
    }

    fn begin(&mut self, launch: u32, arm: &str, sessions: u64) {
        self.begun += 1;
        let mut now = Now { arm: arm.to_owned(), total: sessions, ..Now::default() };
        let place = format!("[{}/{}] {arm}", self.begun, self.launches);
        if std::io::stderr().is_terminal() && !self.console.quiet {
            let bar = self.bars.add(ProgressBar::new(sessions));
            let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} sessions, {msg} {elapsed}");
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar.set_prefix(place);
            now.bar = Some(bar);
        } else {
            self.console.note(format!("{place}: {sessions} sessions"));
        }
        self.now.insert(launch, now);
    }

    fn show(&self, launch: u32) {
        let Some(Now { bar, arm, total, ended, corrupted, calls, damaged }) = self.now.get(&launch) else { return };
        match bar {
            Some(bar) => {
                bar.set_position(*ended);
                bar.set_message(format!("{corrupted} corrupted, {calls} calls"));
            }
            // Without a terminal a line for each quarter is enough.
            None if *total >= 8 && ended.is_multiple_of(total.div_ceil(4)) && ended < total => {
                self.console.note(format!(
                    "{arm}: {ended} of {total} sessions, {corrupted} corrupted; {calls} calls, {damaged} corrupted"
                ));
            }
            None => {}
        }
    }

    /// Takes a launch off the display; `text` says how it ended.
    fn end(&mut self, launch: u32, text: impl FnOnce(&Now) -> String) {
        let now = self.now.remove(&launch).unwrap_or_default();
        if let Some(bar) = &now.bar {
            bar.finish_and_clear();
        }
        let text = text(&now);
        self.bars.suspend(|| self.console.note(text));
    }
}

impl Consumer for Progress {
    fn consume(&mut self, event: &RunEvent) -> Result<()> {
        match event {
            RunEvent::LaunchStarted { launch, arm, sessions, .. } => self.begin(*launch, arm, sessions.len() as u64),
            RunEvent::Answered(answer) => {
                let now = self.now.entry(answer.launch).or_default();
                now.calls += answer.calls.iter().filter(|call| call.name.is_some()).count() as u64;
                now.damaged += answer.calls.iter().filter(|call| call.verdict == Verdict::Corrupted).count() as u64;
            }
            RunEvent::SessionEnded { launch, end, .. } => {
                let now = self.now.entry(*launch).or_default();
                now.corrupted += u64::from(*end == SessionEnd::Corrupted);
                if *end != SessionEnd::Interrupted {
                    now.ended += 1;
                    self.show(*launch);
                }
            }
            RunEvent::LaunchEnded { launch, wall_ms, hazards_failure, races_failure, .. } => {
                self.end(*launch, |now| {
                    let Now { arm, ended, corrupted, calls, .. } = now;
                    format!("{arm}: {corrupted} of {ended} sessions corrupted, {calls} calls, {:.1} s", wall_ms / 1e3)
                });
                if let Some(why) = hazards_failure {
                    self.bars.suspend(|| self.console.warn(format!("hazards not analysed: {why}")));
                }
                if let Some(why) = races_failure {
                    self.bars.suspend(|| self.console.warn(format!("the race log could not be read: {why}")));
                }
            }
            RunEvent::LaunchFailed { launch, arm, reason } => {
                self.end(*launch, |_| format!("{arm}: the launch failed"));
                self.bars.suspend(|| self.console.warn(format!("{arm}: {reason}")));
            }
            RunEvent::RunStarted { .. }
            | RunEvent::RunEnded { .. }
            | RunEvent::SessionStarted { .. }
            | RunEvent::Compared { .. } => {}
        }
        Ok(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        for bar in self.now.values().filter_map(|now| now.bar.as_ref()) {
            bar.finish_and_clear();
        }
    }
}
