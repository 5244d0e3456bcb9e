//! All sessions of a launch: when they start, what they do, when it is over.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use serde_json::json;
use tokio::{
    sync::{Semaphore, mpsc::UnboundedSender},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::{
    Client, Comparison, Conversation, Exchange, Happening, Reply, SessionEnd, Step, Timing, Turn, conversation::Common,
    pacing::Pacing,
};
use crate::{
    clock::Clock,
    error::Error,
    scenario::{Arrival, Parity, Scenario, nonce},
    seed::Seed,
    validate::{
        self, Ending, Observation, Verdict,
        parity::{self, Form, Forms},
    },
};

/// One launch's sessions and how they are sent.
#[derive(Debug)]
pub struct Job {
    /// What the sessions are made of.
    pub scenario: Arc<Scenario>,
    /// The workload's seed.
    pub seed: Seed,
    /// The sessions to drive.
    pub sessions: Vec<u64>,
    /// Go on with further sessions for this long.
    pub duration: Option<Duration>,
    /// Sessions in flight at once.
    pub concurrency: u32,
    /// When sessions start.
    pub arrival: Arrival,
    /// Sessions a second.
    pub rate: Option<f64>,
    /// Time to full concurrency.
    pub ramp: Duration,
    /// Time whose sessions are not counted.
    pub warmup: Duration,
    /// Times a request without a response is sent again.
    pub retries: u32,
    /// Whether ends are announced and no time is waited.
    pub lockstep: bool,
    /// The model asked.
    pub model: String,
    /// Further members of every body.
    pub extra_body: serde_json::Map<String, serde_json::Value>,
    /// Whether arguments must match byte for byte.
    pub exact: bool,
    /// Whether the server may have a race log, to be asked about corrupted responses.
    pub races: bool,
}

struct Flight {
    job: Arc<Job>,
    client: Client,
    common: Arc<Common>,
    clock: Clock,
    start: Duration,
    stop: CancellationToken,
    sink: UnboundedSender<Happening>,
    waiting: Mutex<BTreeSet<u64>>,
}

/// Drives all sessions of `job` and returns when the last one is over. Once `stop` is cancelled nothing is sent and
/// every session ends at once.
pub async fn drive(
    job: Arc<Job>,
    client: Client,
    clock: Clock,
    stop: CancellationToken,
    sink: UnboundedSender<Happening>,
) {
    let canaries = validate::Canaries::new();
    for session in &job.sessions {
        canaries.add(&nonce(job.seed, *session));
    }
    let common = Common {
        model: job.model.clone(),
        extra_body: job.extra_body.clone(),
        canaries: Arc::new(canaries),
        exact: job.exact,
    };
    let flight = Arc::new(Flight {
        common: Arc::new(common),
        client,
        clock,
        start: clock.elapsed(),
        stop,
        sink,
        waiting: Mutex::default(),
        job,
    });
    if flight.job.lockstep {
        let announcement = json!({"sessions": flight.job.sessions.len(), "concurrency": flight.job.concurrency});
        if !flight.client.post("/lockstep/begin", &announcement).await {
            let error = Error::usage("the server does not take part in lockstep").hint("give --no-lockstep");
            flight.report(Happening::Failed(error));
            return;
        }
    }
    flight.start_all().await;
}

impl Flight {
    async fn start_all(self: Arc<Self>) {
        let job = &self.job;
        let places = Arc::new(Semaphore::new(job.concurrency as usize));
        let mut pacing = Pacing::new(job.arrival, job.rate, job.concurrency, job.ramp, job.seed);
        let mut tasks = JoinSet::new();
        for place in 0.. {
            let session = match job.duration {
                None => job.sessions.get(place as usize).copied(),
                Some(duration) => (self.since_start() < duration).then_some(place),
            };
            let Some(session) = session else { break };
            let planned = pacing.next();
            tokio::select! {
                () = self.stop.cancelled() => break,
                () = tokio::time::sleep(planned.saturating_sub(self.since_start())) => {}
            }
            let due = if job.arrival == Arrival::Closed { self.since_start() } else { planned };
            let waiting = self.since_start();
            let permit = tokio::select! {
                () = self.stop.cancelled() => break,
                permit = Arc::clone(&places).acquire_owned() => permit,
            };
            let Ok(permit) = permit else { break };
            if job.duration.is_some_and(|duration| self.since_start() >= duration) {
                break;
            }
            let now = self.since_start();
            // Under closed arrivals a session is due when a place is free, so it never waits.
            let (delay, queue) = match job.arrival {
                Arrival::Closed => (Duration::ZERO, Duration::ZERO),
                _ => (now.saturating_sub(due), now.saturating_sub(waiting)),
            };
            let warmup = now < job.warmup;
            self.report(Happening::Started {
                session,
                warmup,
                schedule_delay_ms: delay.as_secs_f64() * 1e3,
                client_queue_ms: queue.as_secs_f64() * 1e3,
                offset_ms: now.as_secs_f64() * 1e3,
            });
            let flight = Arc::clone(&self);
            tasks.spawn(async move {
                flight.session(session, place, warmup).await;
                drop(permit);
            });
        }
        while tasks.join_next().await.is_some() {}
    }

    /// One session, known to the server as `place`.
    async fn session(&self, session: u64, place: u64, warmup: bool) {
        let made = self.job.scenario.session(self.job.seed, session);
        let (end, rounds) = match made {
            Err(error) => {
                self.report(Happening::Failed(error));
                (SessionEnd::Interrupted, 0)
            }
            Ok(made) => {
                if self.job.duration.is_some() {
                    self.common.canaries.add(&made.nonce);
                }
                let mut conversation =
                    Conversation::new(made, Arc::clone(&self.job.scenario), Arc::clone(&self.common));
                let end = tokio::select! {
                    () = self.stop.cancelled() => SessionEnd::Interrupted,
                    end = self.rounds(&mut conversation, session, place, warmup) => end,
                };
                let end = if end == SessionEnd::Interrupted && conversation.is_poisoned() {
                    SessionEnd::Corrupted
                } else {
                    end
                };
                (end, conversation.rounds())
            }
        };
        self.in_flight().remove(&session);
        if self.job.lockstep && !self.stop.is_cancelled() {
            self.client.post("/lockstep/end", &json!({"session": place})).await;
        }
        self.report(Happening::Ended { session, end, rounds });
    }

    async fn rounds(&self, conversation: &mut Conversation, session: u64, place: u64, warmup: bool) -> SessionEnd {
        loop {
            let turn = match conversation.next() {
                Step::End(end) => return end,
                Step::Send(turn) => turn,
            };
            if !self.job.lockstep && !turn.think.is_zero() {
                tokio::time::sleep(turn.think).await;
            }
            let mut neighbours = self.enter(session);
            let in_flight = neighbours.len() as u32;
            let (mut reply, timing, retries) = self.attempt(&turn, place).await;
            neighbours.extend(self.leave(session));
            neighbours.remove(&session);
            let judgement = judge(&turn, &reply);
            // An answer that was complete before its cancel counts as any other does.
            reply.cut |=
                turn.cancel_after.is_some() && !matches!(judgement.verdict, Verdict::Valid | Verdict::Corrupted);
            let after_corruption = conversation.is_poisoned();
            let races = if judgement.verdict == Verdict::Corrupted { self.races(place).await } else { None };
            let exchange = Exchange {
                session,
                warmup,
                nonce: conversation.nonce().to_owned(),
                turn: *turn,
                reply,
                timing,
                judgement,
                after_corruption,
                retries,
                neighbours,
                in_flight,
                races,
            };
            // A damaged history is no fair question, and what was cut or lost is no answer to compare with.
            let answered = matches!(exchange.judgement.verdict, Verdict::Valid | Verdict::Corrupted);
            let comparison = if answered && !exchange.reply.cut && !after_corruption {
                self.compare(&exchange, &conversation.dictated(exchange.turn.round), place).await
            } else {
                None
            };
            // Nothing is awaited from here to the report: a session that is stopped counts as corrupted only with the
            // call that was.
            if exchange.reply.cut {
                conversation.cancel();
            } else {
                conversation.absorb(&exchange.judgement);
            }
            self.report(Happening::Exchanged(Box::new(exchange)));
            if let Some(comparison) = comparison {
                self.report(Happening::Compared(Box::new(comparison)));
            }
        }
    }

    /// Asks the turn of `first` again in the scenario's other forms, one after the other, as part of its session.
    async fn compare(&self, first: &Exchange, dictated: &[String], place: u64) -> Option<Comparison> {
        let other = Form::parsed(!first.turn.stream);
        let others: &[Form] = match self.job.scenario.parity {
            Parity::Off => return None,
            Parity::Form => &[other],
            Parity::Raw => &[other, Form::Raw],
        };
        let mut forms = Forms::default();
        forms.add(Form::parsed(first.turn.stream), (&first.judgement).into());
        let mut further = Vec::new();
        for &form in others {
            let exchange = self.again(first, form, place).await;
            let calls = first.turn.expectation.calls.as_deref().unwrap_or_default();
            let heard = if form == Form::Raw {
                parity::raw(&exchange.judgement, calls, dictated)
            } else {
                Some((&exchange.judgement).into())
            };
            if let Some(heard) = heard {
                forms.add(form, heard);
                further.push((form, exchange));
            }
        }
        Some(Comparison { session: first.session, round: first.turn.round, forms, further })
    }

    async fn again(&self, first: &Exchange, form: Form, place: u64) -> Exchange {
        let (session, warmup, nonce) = (first.session, first.warmup, first.nonce.clone());
        let turn = Conversation::again(&first.turn, form);
        let mut neighbours = self.enter(session);
        let in_flight = neighbours.len() as u32;
        let (reply, timing, retries) = self.attempt(&turn, place).await;
        neighbours.extend(self.leave(session));
        neighbours.remove(&session);
        let judgement = judge(&turn, &reply);
        Exchange {
            session,
            warmup,
            nonce,
            turn,
            reply,
            timing,
            judgement,
            after_corruption: false,
            retries,
            neighbours,
            in_flight,
            races: None,
        }
    }

    /// The hits of the server's race log that reached a session, before its next request adds to them.
    async fn races(&self, place: u64) -> Option<Result<serde_json::Value, String>> {
        if !self.job.races {
            return None;
        }
        self.client.json(&format!("/races?session={place}")).await.transpose()
    }

    async fn attempt(&self, turn: &Turn, place: u64) -> (Reply, Timing, u32) {
        let mut retries = 0;
        loop {
            let (reply, timing) = self.client.send(turn, place).await;
            if reply.ending != Ending::NoResponse || retries == self.job.retries {
                return (reply, timing, retries);
            }
            retries += 1;
            // A server that is gone is not asked again at once.
            tokio::time::sleep(Duration::from_millis(100 << retries.min(6))).await;
        }
    }

    fn enter(&self, session: u64) -> BTreeSet<u64> {
        let mut in_flight = self.in_flight();
        in_flight.insert(session);
        in_flight.clone()
    }

    fn leave(&self, session: u64) -> BTreeSet<u64> {
        let mut in_flight = self.in_flight();
        in_flight.remove(&session);
        in_flight.clone()
    }

    fn in_flight(&self) -> std::sync::MutexGuard<'_, BTreeSet<u64>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn since_start(&self) -> Duration {
        self.clock.elapsed().saturating_sub(self.start)
    }

    /// A listener that went away ends the run by itself.
    fn report(&self, happening: Happening) {
        let _ = self.sink.send(happening);
    }
}

/// The verdict on `reply`.
pub fn judge(turn: &Turn, reply: &Reply) -> validate::Judgement {
    let observation = Observation {
        http_status: reply.status,
        content_type: reply.content_type.as_deref(),
        stream: turn.stream,
        body: &reply.body,
        ending: reply.ending,
    };
    validate::judge(&observation, &turn.expectation)
}
