//! A request as the engine takes it, and what happens to it.

use super::{
    lockstep::{Place, Refused},
    metrics::Ending,
    tokenizer::Token,
};

/// A request as the worker takes it.
#[derive(Debug)]
pub struct Request {
    /// The prompt's tokens.
    pub prompt: Vec<Token>,
    /// Tokens after which the answer is cut.
    pub max_tokens: u32,
    /// Tokens after which the answer is dropped, as a client that loses interest would do, but at an exact step.
    pub cancel_after: Option<u32>,
    /// Its session and round, where the client tells them.
    pub place: Option<Place>,
    /// Steps to wait before admission, under lockstep.
    pub think: u32,
}

/// What happens to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The next token of the answer.
    Token(Token),
    /// The answer is over.
    Finished(Finish, Usage),
    /// The answer will not be finished.
    Failed(Failure),
}

/// Why an answer is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it.
    Stop,
    /// It reached its token limit.
    Length,
    /// It was cancelled after the number of tokens that the request asked for.
    Cancelled,
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Tokens of the prompt that the prefix cache served.
    pub cached: u32,
    /// Tokens decoded, the end of the turn included.
    pub completion: u32,
}

/// Why a request failed in the engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// All places in the queue are taken.
    #[error("the queue of {0} requests is full")]
    QueueFull(usize),
    /// The request does not fit the announced sessions.
    #[error("{0}")]
    Lockstep(Refused),
    /// The session has a request already.
    #[error("session {0} has a request in flight already")]
    InFlight(u32),
    /// Announced sessions did not send anything.
    #[error("{0}")]
    Stalled(String),
    /// The session was ended while its request was in flight.
    #[error("session {0} was ended")]
    SessionEnded(u32),
    /// The server shuts down.
    #[error("the server is shutting down")]
    Draining,
    /// The model failed.
    #[error("the engine failed: {0}")]
    Engine(String),
}

impl From<Finish> for Ending {
    fn from(finish: Finish) -> Self {
        match finish {
            Finish::Stop => Self::Stop,
            Finish::Length => Self::Length,
            Finish::Cancelled => Self::Cancelled,
        }
    }
}
