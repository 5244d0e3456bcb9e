//! The terminal: results on stdout, everything else on stderr, colour by request.

use std::{
    io::{self, IsTerminal, Write},
    sync::OnceLock,
};

use serde::Serialize;

use crate::{env, error::Error};

/// When to colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Color {
    /// On a terminal, unless `NO_COLOR` is set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// How a command speaks: `--json`, `--quiet`, `--color`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Console {
    /// The machine form alone goes to stdout.
    pub json: bool,
    /// No progress and no notes.
    pub quiet: bool,
    /// When to colour.
    pub color: Color,
}

impl Console {
    /// Prints a result for people on stdout; nothing under `--json`.
    pub fn say(self, text: impl AsRef<str>) {
        if !self.json {
            print(text.as_ref());
        }
    }

    /// Prints the machine form on stdout: one line, under `--json` only.
    pub fn emit(self, value: &impl Serialize) {
        if self.json {
            let text = serde_json::to_string(value).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"));
            print(&text);
        }
    }

    /// Prints progress or a remark on stderr, unless `--quiet`.
    pub fn note(self, text: impl AsRef<str>) {
        if !self.quiet {
            write_line(&mut std::io::stderr().lock(), text.as_ref()).ok();
        }
    }

    /// Prints a warning on stderr.
    pub fn warn(self, text: impl AsRef<str>) {
        let label = self.paint("warning:", "33");
        write_line(&mut std::io::stderr().lock(), &format!("{label} {}", text.as_ref())).ok();
    }

    /// Prints an error and its cure on stderr.
    pub fn fail(self, error: &Error) {
        let mut stderr = std::io::stderr().lock();
        write_line(&mut stderr, &format!("{} {error}", self.paint("error:", "31;1"))).ok();
        if let Some(cure) = error.cure() {
            write_line(&mut stderr, &format!("{} {cure}", self.paint("hint:", "36"))).ok();
        }
    }

    /// Whether text on stdout is coloured.
    pub fn colored(self) -> bool {
        self.wants_color(std::io::stdout().is_terminal())
    }

    /// `text` in the ANSI style `style`, where stderr is coloured.
    fn paint(self, text: &str, style: &str) -> String {
        if self.wants_color(std::io::stderr().is_terminal()) {
            format!("\x1b[{style}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    fn wants_color(self, terminal: bool) -> bool {
        match self.color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => terminal && env::var("NO_COLOR").is_none_or(|value| value.is_empty()),
        }
    }
}

/// The first result that could not be printed.
static UNPRINTED: OnceLock<io::Error> = OnceLock::new();

/// Why a result could not be printed, if so: the exit code must not claim that it was.
pub fn unprinted() -> Option<Error> {
    UNPRINTED.get().map(|error| Error::usage(format!("cannot write to the standard output: {error}")))
}

/// A reader that went away (`| head`) is no reason to fail.
fn print(text: &str) {
    if let Err(error) = write_line(&mut io::stdout().lock(), text)
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        UNPRINTED.set(error).ok();
    }
}

fn write_line(stream: &mut impl Write, text: &str) -> io::Result<()> {
    writeln!(stream, "{text}")?;
    stream.flush()
}
