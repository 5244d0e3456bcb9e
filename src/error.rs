//! The top-level error: a message that names the file, flag or key, a hint with the cure, and an exit code.

use std::fmt;

use crate::exit;

/// What every command returns when it cannot do its work.
///
/// Messages are lower-case fragments; the cure is a separate hint.
#[derive(Debug)]
pub struct Error {
    message: String,
    hint: Option<String>,
    code: u8,
}

/// The result of everything that can fail with an [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A usage or set-up error (exit code 2).
    pub fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, code: exit::USAGE }
    }

    /// An incomplete or interrupted run (exit code 3).
    pub fn incomplete(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, code: exit::INCONCLUSIVE }
    }

    /// Adds the cure, printed on its own line as `hint: …`.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Puts `context` in front of the message: the file, the arm or the step at which it happened.
    #[must_use]
    pub fn within(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// Message and cure in one sentence, for a journal or a table.
    pub fn sentence(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{}; {hint}", self.message),
            None => self.message.clone(),
        }
    }

    /// The process's exit code for this error.
    pub fn code(&self) -> u8 {
        self.code
    }

    /// The cure, where there is one.
    pub fn cure(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
