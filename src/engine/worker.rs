//! The loop: take requests in, schedule, run the model, send tokens out. One thread owns the model and the cache.

use std::{
    collections::BTreeSet,
    sync::{Arc, PoisonError, atomic::Ordering, mpsc},
    time::Duration,
};

use tokio::sync::{mpsc::UnboundedSender, oneshot};

use super::{
    Prefill, TokenModel,
    cache::KvCache,
    config::Limits,
    gate::{Gate, Passage},
    handle::{Command, Ruling, Shared},
    lockstep::Place,
    metrics::Ending,
    request::{Event, Failure, Finish},
    scheduler,
    sequence::{Sequence, Waiting},
    snapshot::{LockstepSnapshot, Snapshot},
};
use crate::error::Result;

/// How often a worker that waits for sessions looks for clients that went away.
const POLL: Duration = Duration::from_millis(50);

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

/// The model, the cache, and the requests on their way.
pub(super) struct Worker<M> {
    /// Dropped first: whoever sees its request gone sees that the worker is.
    _life: Arc<()>,
    model: M,
    cache: KvCache,
    limits: Limits,
    gate: Option<Gate>,
    inbox: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    /// In order of arrival, or under lockstep of sessions.
    waiting: Vec<Waiting>,
    running: Vec<Sequence>,
    /// The last events of requests that ended since the snapshot was published. They are held back until then:
    /// whoever reads an answer and then the snapshot finds the request gone from it.
    farewells: Vec<(UnboundedSender<Event>, Event)>,
    snapshot: Snapshot,
}

impl<M: TokenModel> Worker<M> {
    pub(super) fn new(
        model: M,
        gate: Option<Gate>,
        inbox: mpsc::Receiver<Command>,
        shared: Arc<Shared>,
        life: Arc<()>,
    ) -> Self {
        let limits = shared.limits.clone();
        let cache = KvCache::new(limits.pages, limits.max_batch as u32, limits.prefix_cache);
        let snapshot = Snapshot { device: model.device(), pages: cache.capacity(), ..Snapshot::default() };
        Self {
            _life: life,
            model,
            cache,
            limits,
            gate,
            inbox,
            shared,
            waiting: Vec::new(),
            running: Vec::new(),
            farewells: Vec::new(),
            snapshot,
        }
    }

    /// Works until it was told to drain and has nothing left, or until nobody can reach it.
    pub(super) fn run(&mut self) {
        loop {
            let began = self.shared.clock.elapsed();
            let readiness = self.readiness();
            let works = matches!(readiness, Readiness::Step);
            let received = match readiness {
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
                Err(true) if self.waiting.is_empty() && self.running.is_empty() => return self.publish(),
                Err(_) => {}
            }
            self.forget_absent();
            self.publish();
            if works {
                let worked = self.shared.clock.elapsed().saturating_sub(began);
                self.shared.metrics.worker_busy_seconds.inc_by(worked.as_secs_f64());
            }
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
                self.drop_session(session);
                self.rule(reply, |gate| gate.lockstep.end(session));
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
        let ruling = self.gate.as_mut().map_or(Ok(()), change);
        self.publish();
        let _ = reply.send(ruling);
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
        gate.accept(place, &present)
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
        let (present, now) = (self.present(), self.shared.clock.elapsed());
        match self.gate.as_mut().map(|gate| gate.check(&present, now)) {
            None | Some(Passage::Open) => return Readiness::Step,
            // Whoever is missing will not be let in any more.
            Some(_) if self.shared.draining.load(Ordering::Relaxed) => self.fail_all(&Failure::Draining),
            Some(Passage::Closed) => {}
            Some(Passage::Stalled(reason)) => self.fail_all(&Failure::Stalled(reason)),
        }
        Readiness::Closed
    }

    fn fail_all(&mut self, failure: &Failure) {
        let running = self.running.drain(..).map(|sequence| sequence.events);
        for events in running.chain(self.waiting.drain(..).map(|waiting| waiting.events)) {
            self.shared.metrics.ended(Ending::Failed);
            self.farewells.push((events, Event::Failed(failure.clone())));
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
            self.farewells.push((sequence.events, failed.clone()));
        }
        for waiting in self.waiting.extract_if(.., |waiting| waiting.session() == Some(session)) {
            self.farewells.push((waiting.events, failed.clone()));
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
        if let Some(races) = self.model.take_races() {
            let rows: Vec<_> = batch.iter().zip(&tokens).map(|(at, token)| self.running[*at].raced(*token)).collect();
            self.shared.races.lock().unwrap_or_else(PoisonError::into_inner).record(races, &rows);
        }
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
            self.farewells.push((sequence.events, Event::Finished(finish, usage)));
        }
    }

    /// Lets the other threads see where the worker stands, and then the ended requests that they have.
    pub(super) fn publish(&mut self) {
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
        let present = self.present();
        self.snapshot.lockstep = self.gate.as_ref().map(|gate| LockstepSnapshot::new(gate, &present));
        self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&self.snapshot);
        for (events, last) in self.farewells.drain(..) {
            let _ = events.send(last);
        }
    }
}
