//! The loop: take requests in, schedule, run the model, send tokens out. One thread owns the model and the cache.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use serde::Serialize;
use tokio::sync::{mpsc as events, oneshot};

use super::{
    Activity, DecodeRow, Prefill, TokenModel,
    cache::{KvCache, Table, pages_for},
    config::Limits,
    lockstep::{Lockstep, Place, Refused},
    metrics::{Ending, Metrics},
    scheduler::{self, Progress},
    tokenizer::{TURN_END, Token},
};
use crate::{
    clock::Clock,
    error::{Error, Result},
};

/// How often a worker that waits for sessions looks for clients that went away.
const POLL: Duration = Duration::from_millis(50);

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

/// What the worker tells about itself.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Snapshot {
    /// Steps taken.
    pub steps: u64,
    /// Requests waiting for a place in the batch.
    pub waiting: usize,
    /// Sequences running.
    pub running: usize,
    /// Pages of the cache.
    pub pages: u32,
    /// Pages that running sequences hold.
    pub pages_held: u32,
    /// Pages that only the prefix cache holds.
    pub pages_cached: u32,
    /// Prompt tokens prefilled.
    pub prompt_tokens: u64,
    /// Prompt tokens that the prefix cache served.
    pub cached_tokens: u64,
    /// Tokens decoded.
    pub generation_tokens: u64,
    /// Decode steps by their number of rows.
    pub batch_sizes: std::collections::BTreeMap<usize, u64>,
    /// What the model tells.
    pub engine: Activity,
    /// Under lockstep, who is expected.
    pub lockstep: Option<LockstepSnapshot>,
}

/// Where lockstep stands.
#[derive(Debug, Clone, Default, Serialize)]
pub struct LockstepSnapshot {
    /// Announced sessions.
    pub sessions: u32,
    /// Sessions that run at a time.
    pub concurrency: u32,
    /// Sessions that have ended.
    pub ended: u32,
    /// Sessions without which no step is taken.
    pub expected: Vec<u32>,
    /// Those of them that have no request queued or running.
    pub missing: Vec<u32>,
    /// Why everything fails since a wait was too long.
    pub stalled: Option<String>,
}

enum Command {
    Submit(Box<Waiting>),
    Begin { sessions: u32, concurrency: u32, reply: oneshot::Sender<Ruling> },
    End { session: u32, reply: oneshot::Sender<Ruling> },
    EndFrom { first: u32, reply: oneshot::Sender<Ruling> },
    Drain,
}

/// The answer to a lockstep announcement.
pub type Ruling = std::result::Result<(), Refused>;

/// What the worker and its handles share.
#[derive(Debug)]
struct Shared {
    limits: Limits,
    queue: Arc<AtomicUsize>,
    draining: AtomicBool,
    snapshot: Mutex<Snapshot>,
    metrics: Metrics,
    clock: Clock,
    /// A clone lives as long as the worker's thread.
    life: Arc<()>,
}

/// A place in the queue, given up on drop.
#[must_use]
#[derive(Debug)]
struct QueuePlace(Arc<AtomicUsize>);

impl QueuePlace {
    fn take(taken: &Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        let place = Self(Arc::clone(taken));
        let before = taken.fetch_add(1, Ordering::Relaxed);
        (before < limit).then_some(place)
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The way to a worker, from any thread. The worker ends when it was told to drain, or when all handles are gone.
#[derive(Debug, Clone)]
pub struct Handle {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

impl Handle {
    /// Starts a worker whose thread builds the model and owns it; returns when the model is ready.
    pub fn start<M: TokenModel>(
        limits: Limits,
        lockstep: Option<Gate>,
        model: impl FnOnce() -> Result<M> + Send + 'static,
    ) -> Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let queue = Arc::default();
        let shared = Arc::new(Shared {
            limits,
            queue,
            draining: AtomicBool::new(false),
            snapshot: Mutex::default(),
            metrics: Metrics::new(),
            clock: Clock::start(),
            life: Arc::default(),
        });
        let life = Arc::clone(&shared.life);
        let (ready, built) = mpsc::channel();
        let worker_side = Arc::clone(&shared);
        thread::Builder::new()
            .name("engine".into())
            .spawn(move || match model() {
                Ok(model) => {
                    let mut worker = Worker::new(model, lockstep, inbox, worker_side);
                    worker.publish();
                    let _ = ready.send(Ok(()));
                    worker.run();
                    drop(life);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            })
            .map_err(|error| Error::usage(format!("cannot start the engine's thread: {error}")))?;
        built.recv().map_err(|_| Error::usage("the engine's thread died while it built the model"))??;
        Ok(Self { commands, shared })
    }

    /// Hands a request in; its events come out of what is returned, until a last one that is no token.
    pub fn submit(&self, request: Request) -> std::result::Result<events::UnboundedReceiver<Event>, Failure> {
        if self.shared.draining.load(Ordering::Relaxed) {
            return Err(Failure::Draining);
        }
        let limit = self.shared.limits.queue;
        let place = QueuePlace::take(&self.shared.queue, limit).ok_or(Failure::QueueFull(limit))?;
        let (sender, receiver) = events::unbounded_channel();
        let arrived = self.shared.clock.elapsed();
        let waiting = Waiting { request, events: sender, arrived, ready: None, _place: place };
        self.send(Command::Submit(Box::new(waiting)))?;
        Ok(receiver)
    }

    /// Announces sessions, before the first request; only under lockstep.
    pub async fn begin(&self, sessions: u32, concurrency: u32) -> std::result::Result<(), Failure> {
        self.ask(|reply| Command::Begin { sessions, concurrency, reply }).await
    }

    /// Ends a session; only under lockstep.
    pub async fn end(&self, session: u32) -> std::result::Result<(), Failure> {
        self.ask(|reply| Command::End { session, reply }).await
    }

    /// Ends all sessions from `first` on; only under lockstep.
    pub async fn end_from(&self, first: u32) -> std::result::Result<(), Failure> {
        self.ask(|reply| Command::EndFrom { first, reply }).await
    }

    /// Lets the worker finish what it has and then end.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Relaxed);
        let _ = self.send(Command::Drain);
    }

    /// Whether the worker was told to drain.
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Relaxed)
    }

    /// Whether the worker's thread runs.
    pub fn is_alive(&self) -> bool {
        Arc::strong_count(&self.shared.life) > 1
    }

    /// What the worker told last.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// What bounds a request.
    pub fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    async fn ask(&self, command: impl FnOnce(oneshot::Sender<Ruling>) -> Command) -> std::result::Result<(), Failure> {
        let (reply, ruling) = oneshot::channel();
        self.send(command(reply))?;
        ruling.await.map_err(|_| dead())?.map_err(Failure::Lockstep)
    }

    fn send(&self, command: Command) -> std::result::Result<(), Failure> {
        self.commands.send(command).map_err(|_| if self.is_draining() { Failure::Draining } else { dead() })
    }
}

fn dead() -> Failure {
    Failure::Engine("its thread has ended".into())
}

/// A request that waits for a place in the batch.
#[derive(Debug)]
struct Waiting {
    request: Request,
    events: events::UnboundedSender<Event>,
    arrived: Duration,
    /// The step from which it is admitted, once it is expected under lockstep.
    ready: Option<u64>,
    _place: QueuePlace,
}

impl Waiting {
    fn session(&self) -> Option<u32> {
        self.request.place.map(|place| place.session)
    }
}

/// A request in the batch.
#[derive(Debug)]
struct Sequence {
    tokens: Vec<Token>,
    /// Tokens whose entries are in the cache.
    fed: u32,
    prompt: u32,
    max_tokens: u32,
    cancel_after: Option<u32>,
    session: Option<u32>,
    table: Table,
    events: events::UnboundedSender<Event>,
    arrived: Duration,
    finish: Option<Finish>,
}

impl Sequence {
    fn new(waiting: Waiting, table: Table) -> Self {
        let session = waiting.session();
        let Request { prompt: tokens, max_tokens, cancel_after, .. } = waiting.request;
        let (prompt, fed) = (tokens.len() as u32, table.cached());
        let (events, arrived) = (waiting.events, waiting.arrived);
        Self { tokens, fed, prompt, max_tokens, cancel_after, session, table, events, arrived, finish: None }
    }

    fn progress(&self) -> Progress {
        let target = self.prompt - 1;
        Progress { prefilled: self.fed.min(target), target }
    }

    fn row(&self) -> DecodeRow<'_> {
        DecodeRow {
            token: self.tokens[self.fed as usize],
            position: self.fed,
            page_table: self.table.pages(),
            window_page: self.table.window(),
            session: self.session,
        }
    }

    /// Tokens decoded.
    fn generated(&self) -> u32 {
        self.fed + 1 - self.prompt
    }

    /// Takes a decoded token; sending fails only when the client went away, which the next step notices.
    fn take(&mut self, token: Token) {
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

    fn usage(&self) -> Usage {
        Usage { prompt: self.prompt, cached: self.table.cached(), completion: self.generated() }
    }
}

/// Lockstep as the worker keeps it.
#[derive(Debug)]
pub struct Gate {
    lockstep: Lockstep,
    /// The longest wait for missing sessions.
    patience: Duration,
    /// Since when somebody waits for somebody who is missing.
    closed: Option<Duration>,
    stalled: Option<String>,
}

impl Gate {
    /// Waits for the sessions of `lockstep`, at most `patience` at a time.
    pub fn new(lockstep: Lockstep, patience: Duration) -> Self {
        Self { lockstep, patience, closed: None, stalled: None }
    }
}

/// What the loop does next.
enum Readiness {
    /// Take a step.
    Step,
    /// Wait for a command.
    Idle,
    /// Wait for sessions, not forever.
    Closed,
    /// End.
    Done,
}

struct Worker<M> {
    model: M,
    cache: KvCache,
    limits: Limits,
    gate: Option<Gate>,
    inbox: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    /// In order of arrival, or under lockstep of sessions.
    waiting: Vec<Waiting>,
    running: Vec<Sequence>,
    snapshot: Snapshot,
}

impl<M: TokenModel> Worker<M> {
    fn new(model: M, gate: Option<Gate>, inbox: mpsc::Receiver<Command>, shared: Arc<Shared>) -> Self {
        let limits = shared.limits.clone();
        let cache = KvCache::new(limits.pages, limits.max_batch as u32, limits.prefix_cache);
        let snapshot = Snapshot { pages: cache.capacity(), ..Snapshot::default() };
        Self { model, cache, limits, gate, inbox, shared, waiting: Vec::new(), running: Vec::new(), snapshot }
    }

    fn run(&mut self) {
        loop {
            let received = match self.readiness() {
                Readiness::Step => {
                    self.step();
                    self.inbox.try_recv().map_err(|error| error == mpsc::TryRecvError::Disconnected)
                }
                Readiness::Idle => self.inbox.recv().map_err(|_| true),
                Readiness::Closed => {
                    self.inbox.recv_timeout(POLL).map_err(|error| error == mpsc::RecvTimeoutError::Disconnected)
                }
                Readiness::Done => return,
            };
            match received {
                Ok(command) => self.obey_all(command),
                Err(true) if self.waiting.is_empty() && self.running.is_empty() => return,
                Err(_) => {}
            }
            self.forget_absent();
            self.publish();
        }
    }

    fn obey_all(&mut self, command: Command) {
        self.obey(command);
        while let Ok(command) = self.inbox.try_recv() {
            self.obey(command);
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(waiting) => self.queue(*waiting),
            Command::Begin { sessions, concurrency, reply } => {
                self.rule(reply, |gate| gate.lockstep.begin(sessions, concurrency));
            }
            Command::End { session, reply } => {
                self.rule(reply, |gate| gate.lockstep.end(session));
                self.drop_session(session);
            }
            Command::EndFrom { first, reply } => self.rule(reply, |gate| {
                gate.lockstep.end_from(first);
                Ok(())
            }),
            Command::Drain => {}
        }
    }

    fn rule(&mut self, reply: oneshot::Sender<Ruling>, change: impl FnOnce(&mut Gate) -> Ruling) {
        // Without lockstep the server does not ask; a reply that nobody awaits any more is no loss.
        let _ = reply.send(self.gate.as_mut().map_or(Ok(()), change));
    }

    fn queue(&mut self, waiting: Waiting) {
        if let Err(failure) = self.accept(waiting.request.place) {
            let _ = waiting.events.send(Event::Failed(failure));
            return;
        }
        let behind = |other: &Waiting| self.gate.is_none() || other.session() < waiting.session();
        let at = self.waiting.partition_point(behind);
        self.waiting.insert(at, waiting);
    }

    /// Under lockstep, whether a request fits the announced sessions.
    fn accept(&mut self, place: Option<Place>) -> std::result::Result<(), Failure> {
        let present = self.present();
        let (Some(gate), Some(place)) = (&mut self.gate, place) else { return Ok(()) };
        if let Some(reason) = &gate.stalled {
            return Err(Failure::Stalled(reason.clone()));
        }
        if present.contains(&place.session) {
            return Err(Failure::InFlight(place.session));
        }
        gate.lockstep.arrive(place).map_err(Failure::Lockstep)
    }

    /// Sessions with a request queued or running.
    fn present(&self) -> BTreeSet<u32> {
        let running = self.running.iter().filter_map(|sequence| sequence.session);
        running.chain(self.waiting.iter().filter_map(Waiting::session)).collect()
    }

    fn readiness(&mut self) -> Readiness {
        if self.waiting.is_empty() && self.running.is_empty() {
            return if self.shared.draining.load(Ordering::Relaxed) { Readiness::Done } else { Readiness::Idle };
        }
        let present = self.present();
        let Some(gate) = &mut self.gate else { return Readiness::Step };
        let missing = gate.lockstep.missing(&present);
        if missing.is_empty() {
            gate.closed = None;
            return Readiness::Step;
        }
        let now = self.shared.clock.elapsed();
        let since = *gate.closed.get_or_insert(now);
        if self.shared.draining.load(Ordering::Relaxed) {
            self.fail_all(&Failure::Draining);
            return Readiness::Done;
        }
        if now.saturating_sub(since) > gate.patience {
            let reason = stalled(&missing, gate.patience, present.len());
            gate.stalled = Some(reason.clone());
            self.fail_all(&Failure::Stalled(reason));
        }
        Readiness::Closed
    }

    fn fail_all(&mut self, failure: &Failure) {
        let running = self.running.drain(..).map(|sequence| sequence.events);
        for events in running.chain(self.waiting.drain(..).map(|waiting| waiting.events)) {
            self.shared.metrics.ended(Ending::Failed);
            let _ = events.send(Event::Failed(failure.clone()));
        }
    }

    /// Drops the requests of clients that went away, and with them their pages.
    fn forget_absent(&mut self) {
        let before = self.waiting.len() + self.running.len();
        self.waiting.retain(|waiting| !waiting.events.is_closed());
        self.running.retain(|sequence| !sequence.events.is_closed());
        for _ in self.waiting.len() + self.running.len()..before {
            self.shared.metrics.ended(Ending::Aborted);
        }
    }

    fn drop_session(&mut self, session: u32) {
        let failed = Event::Failed(Failure::SessionEnded(session));
        for sequence in self.running.extract_if(.., |sequence| sequence.session == Some(session)) {
            let _ = sequence.events.send(failed.clone());
        }
        for waiting in self.waiting.extract_if(.., |waiting| waiting.session() == Some(session)) {
            let _ = waiting.events.send(failed.clone());
        }
    }

    fn step(&mut self) {
        self.admit();
        let progress: Vec<_> = self.running.iter().map(Sequence::progress).collect();
        let step = scheduler::plan(&progress, &self.limits.scheduler());
        if let Err(error) = self.decode(&step.decode).and_then(|()| self.prefill(&step.prefill)) {
            self.fail_all(&Failure::Engine(error.to_string()));
        }
        self.retire();
        self.snapshot.steps += 1;
        self.shared.metrics.steps.inc();
    }

    fn admit(&mut self) {
        let eligible = self.eligible();
        let costs = eligible.iter().map(|at| {
            let request = &self.waiting[*at].request;
            self.cache.cost(&request.prompt, request.max_tokens)
        });
        let limits = self.limits.scheduler();
        let admitted = scheduler::admissible(costs, self.running.len(), self.cache.spare(), &limits);
        let admitted = &eligible[..admitted];
        let mut indices = 0..;
        let is_admitted = |_: &mut Waiting| indices.next().is_some_and(|at| admitted.binary_search(&at).is_ok());
        let admitted: Vec<_> = self.waiting.extract_if(.., is_admitted).collect();
        for waiting in admitted {
            let table = self.cache.admit(&waiting.request.prompt, waiting.request.max_tokens);
            let table = table.expect("the scheduler admits only what the cache has pages for");
            self.count_prompt(waiting.request.prompt.len() as u64, u64::from(table.cached()));
            self.running.push(Sequence::new(waiting, table));
        }
    }

    fn count_prompt(&mut self, all: u64, cached: u64) {
        self.snapshot.prompt_tokens += all - cached;
        self.snapshot.cached_tokens += cached;
        self.shared.metrics.prompt_tokens.inc_by(all - cached);
        self.shared.metrics.cached_tokens.inc_by(cached);
    }

    /// Indices of those who may be admitted, in order.
    fn eligible(&mut self) -> Vec<usize> {
        let Some(gate) = &self.gate else { return (0..self.waiting.len()).collect() };
        let expected: BTreeSet<_> = gate.lockstep.expected().collect();
        let now = self.snapshot.steps;
        let mut eligible = Vec::new();
        for (at, waiting) in self.waiting.iter_mut().enumerate() {
            if waiting.session().is_some_and(|session| expected.contains(&session)) {
                let ready = *waiting.ready.get_or_insert(now + u64::from(waiting.request.think));
                eligible.push((ready, at));
            }
        }
        // When everybody thinks, the time until the first is done passes at once.
        let first = eligible.iter().map(|(ready, _)| *ready).min().unwrap_or(now);
        let now = if self.running.is_empty() { now.max(first) } else { now };
        self.snapshot.steps = now;
        eligible.into_iter().filter_map(|(ready, at)| (ready <= now).then_some(at)).collect()
    }

    fn decode(&mut self, batch: &[usize]) -> Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let rows: Vec<_> = batch.iter().map(|at| self.running[*at].row()).collect();
        let tokens = self.model.decode(&rows)?;
        let now = self.shared.clock.elapsed();
        for (at, token) in batch.iter().zip(tokens) {
            let sequence = &mut self.running[*at];
            sequence.take(token);
            if sequence.generated() == 1 {
                self.shared.metrics.first_token_seconds.observe(now.saturating_sub(sequence.arrived).as_secs_f64());
            }
        }
        self.snapshot.generation_tokens += batch.len() as u64;
        self.shared.metrics.generation_tokens.inc_by(batch.len() as u64);
        *self.snapshot.batch_sizes.entry(batch.len()).or_default() += 1;
        Ok(())
    }

    fn prefill(&mut self, chunks: &[scheduler::Chunk]) -> Result<()> {
        for chunk in chunks {
            let sequence = &mut self.running[chunk.sequence];
            self.model.prefill(&Prefill {
                tokens: &sequence.tokens,
                range: chunk.range.clone(),
                page_table: sequence.table.pages(),
                window_page: sequence.table.window(),
                resumed: chunk.range.start > 0 && chunk.range.start == sequence.table.cached(),
                session: sequence.session,
            })?;
            sequence.fed = chunk.range.end;
        }
        Ok(())
    }

    /// Takes the finished sequences out; their full pages stay in the prefix cache.
    fn retire(&mut self) {
        let now = self.shared.clock.elapsed();
        for sequence in self.running.extract_if(.., |sequence| sequence.finish.is_some()) {
            let finish = sequence.finish.unwrap_or(Finish::Stop);
            let usage = sequence.usage();
            self.shared.metrics.ended(finish.into());
            self.shared.metrics.request_seconds.observe(now.saturating_sub(sequence.arrived).as_secs_f64());
            self.cache.retire(&sequence.tokens[..sequence.fed as usize], sequence.table);
            let _ = sequence.events.send(Event::Finished(finish, usage));
        }
    }

    /// Lets the other threads see where the worker stands.
    fn publish(&mut self) {
        let snapshot = &mut self.snapshot;
        snapshot.waiting = self.waiting.len();
        snapshot.running = self.running.len();
        snapshot.pages_held = self.cache.held();
        snapshot.pages_cached = self.cache.idle();
        snapshot.engine = self.model.activity();
        let metrics = &self.shared.metrics;
        metrics.waiting.set(snapshot.waiting as i64);
        metrics.running.set(snapshot.running as i64);
        metrics.pages_held.set(i64::from(snapshot.pages_held));
        metrics.pages_cached.set(i64::from(snapshot.pages_cached));
        metrics.observe(&snapshot.engine);
        if self.gate.is_some() {
            let present = self.present();
            self.snapshot.lockstep = self.gate.as_ref().map(|gate| LockstepSnapshot {
                sessions: gate.lockstep.sessions(),
                concurrency: gate.lockstep.concurrency(),
                ended: gate.lockstep.ended(),
                expected: gate.lockstep.expected().collect(),
                missing: gate.lockstep.missing(&present),
                stalled: gate.stalled.clone(),
            });
        }
        self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&self.snapshot);
    }
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

fn stalled(missing: &[u32], patience: Duration, waiting: usize) -> String {
    let named: Vec<_> = missing.iter().take(16).map(u32::to_string).collect();
    let more = if missing.len() > named.len() { ", …" } else { "" };
    format!(
        "lockstep: sessions {}{more} sent no request and no end for {} s while {waiting} waited for them",
        named.join(", "),
        patience.as_secs_f64(),
    )
}

/// Whether a request could ever be admitted.
pub fn fits(limits: &Limits, prompt: usize, max_tokens: u32) -> bool {
    pages_for(prompt as u32 + max_tokens) <= limits.pages
}
