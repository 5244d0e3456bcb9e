//! Live progress on stderr: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::terminal::Console;
use crate::{
    error::Result,
    run::{Consumer, RunEvent, SessionEnd},
    validate::Verdict,
};

/// Shows what happens.
pub struct Progress {
    console: Console,
    bar: Option<ProgressBar>,
    now: Now,
    launches: usize,
    begun: usize,
}

/// The launch that runs.
#[derive(Default)]
struct Now {
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
        Self { console, bar: None, now: Now::default(), launches, begun: 0 }
    }

    fn begin(&mut self, arm: &str, sessions: u64) {
        self.begun += 1;
        self.now = Now { arm: arm.to_owned(), total: sessions, ..Now::default() };
        let place = format!("[{}/{}] {arm}", self.begun, self.launches);
        if self.console.quiet {
            return;
        }
        if std::io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(sessions), ProgressDrawTarget::stderr_with_hz(8));
            let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} sessions, {msg} {elapsed}");
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar.set_prefix(place);
            self.bar = Some(bar);
        } else {
            self.console.note(format!("{place}: {sessions} sessions"));
        }
    }

    fn show(&self) {
        let Now { arm, total, ended, corrupted, calls, damaged } = &self.now;
        let state = format!("{corrupted} corrupted, {calls} calls");
        match &self.bar {
            Some(bar) => {
                bar.set_position(*ended);
                bar.set_message(state);
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

    fn end(&mut self, text: &str) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        self.console.note(text);
    }
}

impl Consumer for Progress {
    fn consume(&mut self, event: &RunEvent) -> Result<()> {
        match event {
            RunEvent::LaunchStarted { arm, sessions, .. } => self.begin(arm, sessions.len() as u64),
            RunEvent::Answered(answer) => {
                self.now.calls += answer.calls.iter().filter(|call| call.name.is_some()).count() as u64;
                self.now.damaged +=
                    answer.calls.iter().filter(|call| call.verdict == Verdict::Corrupted).count() as u64;
            }
            RunEvent::SessionEnded { end, .. } => {
                self.now.corrupted += u64::from(*end == SessionEnd::Corrupted);
                if *end != SessionEnd::Interrupted {
                    self.now.ended += 1;
                    self.show();
                }
            }
            RunEvent::LaunchEnded { wall_ms, .. } => {
                let Now { arm, ended, corrupted, calls, .. } = &self.now;
                let text =
                    format!("{arm}: {corrupted} of {ended} sessions corrupted, {calls} calls, {:.1} s", wall_ms / 1e3);
                self.end(&text);
            }
            RunEvent::LaunchFailed { arm, reason, .. } => {
                self.end(&format!("{arm}: the launch failed"));
                self.console.warn(format!("{arm}: {reason}"));
            }
            RunEvent::RunStarted { .. } | RunEvent::RunEnded { .. } | RunEvent::SessionStarted { .. } => {}
        }
        Ok(())
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
