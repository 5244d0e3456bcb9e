//! A request on its way through the worker: waiting, then running.

use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;

use super::{
    DecodeRow,
    cache::Table,
    handle::QueuePlace,
    races::Row,
    request::{Event, Finish, Request, Usage},
    scheduler::Progress,
    tokenizer::{TURN_END, Token},
};

/// A request that waits for a place in the batch.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) request: Request,
    pub(super) events: UnboundedSender<Event>,
    pub(super) arrived: Duration,
    /// The step from which it is admitted, once it is expected under lockstep.
    pub(super) ready: Option<u64>,
    _place: QueuePlace,
}

impl Waiting {
    pub(super) fn new(request: Request, events: UnboundedSender<Event>, arrived: Duration, place: QueuePlace) -> Self {
        Self { request, events, arrived, ready: None, _place: place }
    }

    pub(super) fn session(&self) -> Option<u32> {
        self.request.place.map(|place| place.session)
    }
}

/// A request in the batch.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) tokens: Vec<Token>,
    /// Tokens whose entries are in the cache.
    pub(super) fed: u32,
    prompt: u32,
    max_tokens: u32,
    cancel_after: Option<u32>,
    pub(super) session: Option<u32>,
    round: u32,
    pub(super) table: Table,
    pub(super) events: UnboundedSender<Event>,
    pub(super) arrived: Duration,
    pub(super) finish: Option<Finish>,
}

impl Sequence {
    pub(super) fn new(waiting: Waiting, table: Table) -> Self {
        let session = waiting.session();
        let round = waiting.request.place.map_or(0, |place| place.round);
        let Request { prompt: tokens, max_tokens, cancel_after, .. } = waiting.request;
        let (prompt, fed) = (tokens.len() as u32, table.cached());
        let (events, arrived) = (waiting.events, waiting.arrived);
        Self { tokens, fed, prompt, max_tokens, cancel_after, session, round, table, events, arrived, finish: None }
    }

    pub(super) fn progress(&self) -> Progress {
        let target = self.prompt - 1;
        Progress { prefilled: self.fed.min(target), target }
    }

    pub(super) fn row(&self) -> DecodeRow<'_> {
        DecodeRow {
            token: self.tokens[self.fed as usize],
            position: self.fed,
            page_table: self.table.pages(),
            window_page: self.table.window(),
            session: self.session,
        }
    }

    /// Whose row it is in the step that gave `next`, for the race log; nothing for a request without a session.
    pub(super) fn raced(&self, next: Token) -> Option<Row<'_>> {
        let answer = &self.tokens[self.prompt as usize..];
        Some(Row { session: self.session?, round: self.round, answer, next })
    }

    /// Tokens decoded.
    pub(super) fn generated(&self) -> u32 {
        self.fed + 1 - self.prompt
    }

    /// Takes a decoded token; sending fails only when the client went away, which the next step notices.
    pub(super) fn take(&mut self, token: Token) {
        self.fed += 1;
        if token == TURN_END {
            self.finish = Some(Finish::Stop);
            return;
        }
        self.tokens.push(token);
        let _ = self.events.send(Event::Token(token));
        if Some(self.generated()) == self.cancel_after {
            self.finish = Some(Finish::Cancelled);
        } else if self.generated() >= self.max_tokens {
            self.finish = Some(Finish::Length);
        }
    }

    pub(super) fn usage(&self) -> Usage {
        Usage { prompt: self.prompt, cached: self.table.cached(), completion: self.generated() }
    }
}
