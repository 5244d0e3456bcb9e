//! The way to the worker, from any thread.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use serde_json::Value;
use tokio::sync::{mpsc as events, oneshot};

use super::{
    TokenModel,
    config::Limits,
    gate::Gate,
    lockstep::Refused,
    metrics::Metrics,
    races::RaceLog,
    request::{Event, Failure, Request},
    sequence::Waiting,
    snapshot::Snapshot,
    worker::Worker,
};
use crate::{
    clock::Clock,
    error::{Error, Result},
};

/// What a handle asks of the worker.
#[derive(Debug)]
pub(super) enum Command {
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
pub(super) struct Shared {
    pub(super) limits: Limits,
    queue: Arc<AtomicUsize>,
    pub(super) draining: AtomicBool,
    pub(super) snapshot: Mutex<Snapshot>,
    pub(super) races: Mutex<RaceLog>,
    pub(super) metrics: Metrics,
    pub(super) clock: Clock,
    lockstep: bool,
    /// A clone lives as long as the worker's thread.
    life: Arc<()>,
}

/// A place in the queue, given up on drop.
#[must_use]
#[derive(Debug)]
pub(super) struct QueuePlace(Arc<AtomicUsize>);

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
        gate: Option<Gate>,
        model: impl FnOnce() -> Result<M> + Send + 'static,
    ) -> Result<Self> {
        let (commands, inbox) = mpsc::channel();
        let queue = Arc::default();
        let shared = Arc::new(Shared {
            limits,
            queue,
            draining: AtomicBool::new(false),
            snapshot: Mutex::default(),
            races: Mutex::default(),
            metrics: Metrics::new(),
            clock: Clock::start(),
            lockstep: gate.is_some(),
            life: Arc::default(),
        });
        let life = Arc::clone(&shared.life);
        let (ready, built) = mpsc::channel();
        let worker_side = Arc::clone(&shared);
        thread::Builder::new()
            .name("engine".into())
            .spawn(move || match model() {
                Ok(model) => {
                    let mut worker = Worker::new(model, gate, inbox, worker_side, life);
                    worker.publish();
                    let _ = ready.send(Ok(()));
                    worker.run();
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
        let waiting = Waiting::new(request, sender, arrived, place);
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

    /// Whether the worker waits for announced sessions.
    pub fn is_lockstep(&self) -> bool {
        self.shared.lockstep
    }

    /// Whether the worker's thread runs.
    pub fn is_alive(&self) -> bool {
        Arc::strong_count(&self.shared.life) > 1
    }

    /// What the worker told last.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The race log: counts by kind, or the hits that reached `session`. `None` where the device has none.
    pub fn races(&self, session: Option<u32>) -> Option<Value> {
        self.snapshot().engine.race_hits?;
        let log = self.shared.races.lock().unwrap_or_else(PoisonError::into_inner);
        Some(session.map_or_else(|| log.overview(), |session| log.of(session)))
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
