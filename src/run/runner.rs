//! Launch after launch: start the server, drive the sessions, judge, tell everybody, stop the server.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    mem,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, TryStreamExt, stream};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Answer, Arm, CallRecord, Plan, Races, RunEvent, Selfcheck, Todo, Watch, evidence, why::Why};
use crate::{
    clock::Clock,
    drive::{self, Client, Exchange, Happening, Job, Limits},
    error::{Error, Result},
    scenario::{TargetKind, hex},
    target::{self, Hazards, Server, Start},
    validate::Verdict,
};

/// The arms under a sequential test, by index.
type Watches = BTreeMap<usize, Watch>;

/// Who wants to know what happens.
pub trait Consumer {
    /// Takes note of an event.
    fn consume(&mut self, event: &RunEvent) -> Result<()>;
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// Whether it was stopped before its end.
    pub interrupted: bool,
    /// Launches whose server did not start.
    pub launches_failed: u32,
}

/// Runs a plan.
pub struct Runner<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The result folder.
    pub result: PathBuf,
    /// The run's identifier.
    pub id: String,
    /// The clock of all times.
    pub clock: Clock,
    /// The self-check before it.
    pub selfcheck: Option<Selfcheck>,
    /// Ends the run as soon as possible.
    pub stop: CancellationToken,
    /// Launches that may run side by side, at least one. More than one is right only where a launch is a function of
    /// its seeds, so that its neighbours cannot disturb it.
    pub jobs: usize,
    /// Who wants to know.
    pub consumers: Vec<&'a mut dyn Consumer>,
}

/// What the launches of a run share.
struct Shared<'a> {
    consumers: RefCell<Vec<&'a mut dyn Consumer>>,
    watches: RefCell<Watches>,
    launches_failed: Cell<u32>,
}

impl Shared<'_> {
    fn tell(&self, event: &RunEvent) -> Result<()> {
        self.consumers.borrow_mut().iter_mut().try_for_each(|consumer| consumer.consume(event))
    }
}

impl Runner<'_> {
    /// Runs what is left of the plan.
    pub async fn run(&mut self, todo: &[Todo]) -> Result<Finished> {
        let begin = self.clock.elapsed();
        let shared = Shared {
            consumers: RefCell::new(mem::take(&mut self.consumers)),
            watches: RefCell::default(),
            launches_failed: Cell::new(0),
        };
        shared.tell(&RunEvent::RunStarted {
            id: self.id.clone(),
            plan_sha256: self.plan.sha256(),
            started_at: self.clock.timestamp().to_string(),
            selfcheck: self.selfcheck,
        })?;
        let launches = stream::iter(todo).map(Ok);
        launches.try_for_each_concurrent(self.jobs.max(1), |todo| self.attempt(todo, &shared)).await?;
        let interrupted = self.stop.is_cancelled();
        let wall_ms = self.clock.elapsed().saturating_sub(begin).as_secs_f64() * 1e3;
        shared.tell(&RunEvent::RunEnded { interrupted, wall_ms })?;
        Ok(Finished { interrupted, launches_failed: shared.launches_failed.get() })
    }

    /// Runs a launch, unless the run is over or its arm decided; a launch that fails is told and does not end the run.
    async fn attempt(&self, todo: &Todo, shared: &Shared<'_>) -> Result<()> {
        let decided = shared.watches.borrow().get(&todo.launch.arm).is_some_and(Watch::is_decided);
        if self.stop.is_cancelled() || decided {
            return Ok(());
        }
        let Err(error) = self.launch(todo, shared).await else { return Ok(()) };
        if self.stop.is_cancelled() {
            return Ok(());
        }
        shared.launches_failed.update(|failed| failed + 1);
        let reason = error.sentence();
        let arm = self.plan.arms[todo.launch.arm].name.clone();
        shared.tell(&RunEvent::LaunchFailed { launch: todo.launch.number, arm, reason })
    }

    async fn launch(&self, todo: &Todo, shared: &Shared<'_>) -> Result<()> {
        let arm = &self.plan.arms[todo.launch.arm];
        let captures = self.captures(todo, arm);
        // What an earlier try left is void.
        if let Some(Err(error)) = captures.as_ref().map(std::fs::remove_dir_all)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(Error::usage(format!("cannot empty the folder of captures of arm `{}`: {error}", arm.name)));
        }
        let server = tokio::select! {
            () = self.stop.cancelled() => return Ok(()),
            server = self.start(todo, arm, captures.as_deref()) => server?,
        };
        let outcome = self.drive(todo, arm, &server, shared).await;
        let grace = if self.stop.is_cancelled() { Duration::ZERO } else { self.grace() };
        server.stop(grace).await;
        outcome
    }

    fn grace(&self) -> Duration {
        self.plan.target.stop_timeout.map_or(Duration::from_secs(10), |span| span.0)
    }

    /// The folder for the graphs that the launch's foreign server captures; nothing where no one asks for them.
    fn captures(&self, todo: &Todo, arm: &Arm) -> Option<PathBuf> {
        let foreign = self.plan.target.kind == TargetKind::Command && analysed(todo, arm);
        foreign.then(|| self.result.join(format!("captures-{}", evidence::file_name(&arm.name))))
    }

    /// The hazards of the captured graphs, after the load so that the analysis disturbs none of it.
    async fn hazards(&self, todo: &Todo, arm: &Arm) -> Option<Result<Hazards>> {
        if !analysed(todo, arm) {
            return None;
        }
        let analysis = async {
            match self.captures(todo, arm) {
                Some(folder) => target::hazards::of_captures(&folder).await,
                None => target::hazards::of_engine(&arm.env).await,
            }
        };
        Some(tokio::select! {
            () = self.stop.cancelled() => Err(Error::incomplete("the run was interrupted")),
            found = analysis => found,
        })
    }

    /// Starts the server of a launch; `captures` is where its captured graphs go.
    pub async fn start(&self, todo: &Todo, arm: &Arm, captures: Option<&Path>) -> Result<Server> {
        let env = self.plan.environment(arm, todo.launch.repetition, todo.sessions.len());
        let log = self.result.join(log_name(&arm.name, todo.launch.repetition));
        target::start(&Start {
            target: &self.plan.target,
            arm: &arm.name,
            env: &env,
            args: &arm.args,
            command: &arm.command,
            base_url: arm.base_url.as_deref(),
            log: &log,
            captures,
        })
        .await
    }

    async fn drive(&self, todo: &Todo, arm: &Arm, server: &Server, shared: &Shared<'_>) -> Result<()> {
        let client = Client::new(server.endpoint.clone(), self.limits(), self.clock)?;
        let model = target::model(&self.plan.target, &client).await?;
        let shared_server = self.plan.target.kind == TargetKind::Url;
        let health = match client.health().await {
            Err(why) if shared_server => {
                return Err(Error::usage(format!("cannot reach it: {why}"))
                    .hint(format!("check that a server runs at {}", server.endpoint.base_url)));
            }
            health => health.unwrap_or_default(),
        };
        // A server that someone else runs has counted before.
        let before = if shared_server { client.get("/metrics").await } else { None };
        let config = health.and_then(|text| serde_json::from_str(&text).ok());
        let launch = todo.launch.number;
        let timed = self.plan.load.duration.is_some();
        // From here on the journal voids what an earlier try showed of these sessions.
        let void = |session: u64| timed || todo.sessions.contains(&session);
        evidence::set_aside(&self.result, &arm.name, launch, void, self.clock)?;
        shared.tell(&RunEvent::LaunchStarted {
            launch,
            arm: arm.name.clone(),
            seed: self.plan.launch_seed(todo.launch.repetition).0,
            sessions: if timed { Vec::new() } else { todo.sessions.clone() },
            config: config.unwrap_or(Value::Null),
            started_at: self.clock.timestamp().to_string(),
        })?;
        let job = Arc::new(self.job(todo, arm, model));
        if let Some(until) = self.plan.load.until {
            let mut watches = shared.watches.borrow_mut();
            watches.entry(todo.launch.arm).or_insert_with(|| Watch::new(until)).launch(launch, todo.sessions.len());
        }
        // A test that has decided ends its own launch; the run goes on.
        let stop = self.stop.child_token();
        let begin = self.clock.elapsed();
        let (sink, mut happenings) = mpsc::unbounded_channel();
        let task = tokio::spawn(drive::drive(Arc::clone(&job), client.clone(), self.clock, stop.clone(), sink));
        let mut failure = None;
        while let Some(happening) = happenings.recv().await {
            match happening {
                Happening::Failed(error) => failure = Some(error),
                other => {
                    if decides(&mut shared.watches.borrow_mut(), todo, &other) {
                        stop.cancel();
                    }
                    self.happened(todo, arm, &job, other, shared)?;
                }
            }
        }
        task.await.map_err(|error| Error::incomplete(format!("the driver failed: {error}")))?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        let wall_ms = self.clock.elapsed().saturating_sub(begin).as_secs_f64() * 1e3;
        let complete = !self.stop.is_cancelled();
        let metrics = if complete { client.get("/metrics").await } else { None };
        let races = if complete && job.races { client.json("/races").await } else { Ok(None) };
        let races = races.and_then(|page| page.map(Races::read).transpose());
        let (races, races_failure) = races.map_or_else(|error| (None, Some(error)), |races| (races, None));
        let mut server = metrics.map(|text| samples(&text)).unwrap_or_default();
        for (name, before) in before.map(|text| samples(&text)).unwrap_or_default() {
            if let Some(count) = server.get_mut(&name).filter(|_| name.ends_with("_total")) {
                *count = (*count - before).max(0.0);
            }
        }
        let findings = if complete && job.races { findings(client.json("/stats").await) } else { Vec::new() };
        let hazards = if complete { self.hazards(todo, arm).await } else { None };
        let complete = !self.stop.is_cancelled();
        let (found, hazards_failure) = match hazards.transpose() {
            Ok(found) => (found, None),
            Err(error) => (None, Some(error.sentence())),
        };
        let missing = found.as_ref().filter(|found| found.missing > 0);
        shared.tell(&RunEvent::LaunchEnded {
            launch,
            complete,
            server,
            hazards: found.as_ref().map(|found| found.count),
            hazards_failure: missing
                .map(|found| format!("graphs that could not be read: {}", found.missing))
                .or(hazards_failure),
            hazard_tensors: found.map(|found| found.tensors).unwrap_or_default(),
            findings,
            races,
            races_failure,
            wall_ms,
        })
    }

    fn job(&self, todo: &Todo, arm: &Arm, model: String) -> Job {
        let load = &self.plan.load;
        Job {
            scenario: Arc::new(self.plan.scenario.clone()),
            seed: self.plan.workload_seed(),
            sessions: todo.sessions.clone(),
            duration: load.duration.map(|span| span.0),
            concurrency: arm.concurrency,
            arrival: load.arrival,
            rate: load.rate,
            ramp: load.ramp.0,
            warmup: load.warmup.0,
            retries: load.retries,
            lockstep: load.lockstep,
            model,
            extra_body: self.plan.target.extra_body.clone(),
            exact: self.plan.target.kind == TargetKind::Builtin,
            races: self.plan.target.kind == TargetKind::Builtin,
        }
    }

    /// The limits of every request.
    pub fn limits(&self) -> Limits {
        let load = &self.plan.load;
        Limits {
            connect: load.connect_timeout.0,
            first_byte: load.first_byte_timeout.0,
            stall: load.stall_timeout.0,
            total: load.timeout.0,
            cuts: !load.lockstep,
        }
    }

    fn happened(&self, todo: &Todo, arm: &Arm, job: &Job, happening: Happening, shared: &Shared<'_>) -> Result<()> {
        let launch = todo.launch.number;
        let event = match happening {
            Happening::Failed(_) => return Ok(()),
            Happening::Started { session, warmup, schedule_delay_ms, client_queue_ms, offset_ms } => {
                RunEvent::SessionStarted { launch, session, warmup, schedule_delay_ms, client_queue_ms, offset_ms }
            }
            Happening::Ended { session, end, rounds } => RunEvent::SessionEnded { launch, session, end, rounds },
            Happening::Exchanged(exchange) => {
                let why = Why::of(&exchange, &self.result);
                if exchange.judgement.verdict != Verdict::Valid && !exchange.reply.cut {
                    let lockstep = self.plan.load.lockstep;
                    evidence::write(&self.result, &arm.name, launch, lockstep, &exchange, None, why.as_ref())?;
                }
                let seed = self.plan.launch_seed(todo.launch.repetition).0;
                let answer = answer(&exchange, launch, &arm.name, seed, &job.model, self.clock);
                let why = why.map(|why| why.lines).unwrap_or_default();
                RunEvent::Answered(Box::new(Answer { why, ..answer }))
            }
            Happening::Compared(comparison) => {
                let drive::Comparison { session, round, forms, further } = *comparison;
                for (form, exchange) in &further {
                    if forms.is_broken(*form) != Some(false) {
                        evidence::write(
                            &self.result,
                            &arm.name,
                            launch,
                            self.plan.load.lockstep,
                            exchange,
                            Some(*form),
                            None,
                        )?;
                    }
                }
                RunEvent::Compared { launch, session, round, forms }
            }
        };
        shared.tell(&event)
    }
}

/// Whether the captured graphs of a launch are wanted; they are the same in every repetition.
fn analysed(todo: &Todo, arm: &Arm) -> bool {
    arm.hazards && todo.launch.repetition == 0
}

/// Whether the arm's sequential test has decided with this.
fn decides(watches: &mut Watches, todo: &Todo, happening: &Happening) -> bool {
    let (Happening::Ended { session, end, .. }, Some(watch)) = (happening, watches.get_mut(&todo.launch.arm)) else {
        return false;
    };
    let place = todo.sessions.iter().position(|other| other == session).unwrap_or(*session as usize);
    watch.end(todo.launch.number, place as u64, *end)
}

/// The journal's form of an exchange.
fn answer(exchange: &Exchange, launch: u32, arm: &str, seed: u64, model: &str, clock: Clock) -> Answer {
    let Exchange { turn, reply, timing, judgement, .. } = exchange;
    let expected = turn.expectation.calls.as_ref();
    let lines = judgement.calls.len().max(1);
    let record = |place: usize| {
        let call = judgement.calls.get(place);
        let sha256 = expected.and_then(|_| turn.expected_sha256.get(place)).cloned();
        CallRecord {
            session: exchange.session,
            round: turn.round,
            call: place as u32,
            arm: arm.to_owned(),
            launch,
            seed,
            model: model.to_owned(),
            stream: turn.stream,
            name: call.map(|call| call.name.clone()),
            arguments: call.map(|call| call.arguments.clone()),
            verdict: call.map_or(judgement.verdict, |call| call.verdict),
            class: call.map_or(judgement.class, |call| call.class),
            detail: call.map_or(&judgement.detail, |call| &call.detail).clone(),
            response_verdict: judgement.verdict,
            response_class: judgement.class,
            after_corruption: exchange.after_corruption,
            warmup: exchange.warmup,
            quirks: if place == 0 { judgement.quirks.iter().copied().collect() } else { Vec::new() },
            expected_sha256: sha256,
            nonce: exchange.nonce.clone(),
            finish_reason: judgement.finish_reason.clone(),
            output_tokens: judgement.completion_tokens,
            in_flight_at: exchange.in_flight,
            prompt_bytes: turn.body.len() as u64,
            ttft_ms: timing.ttft_ms(),
            e2el_ms: Some(timing.e2el_ms()),
            started_at: timestamp(clock, reply.sent),
            data_index: 0,
            request_sha256: hex(&<sha2::Sha256 as sha2::Digest>::digest(&turn.body)),
            tool_calls_valid: !judgement.calls.is_empty() && judgement.verdict == Verdict::Valid,
            duration_ms: Some(timing.e2el_ms()),
        }
    };
    Answer {
        launch,
        session: exchange.session,
        round: turn.round,
        cancelled: reply.cut,
        retries: exchange.retries,
        status: reply.status,
        first_byte_ms: timing.first_byte.map(|time| time.as_secs_f64() * 1e3),
        tpot_ms: timing.tpot_ms(judgement.completion_tokens),
        itl_us: timing.itl_us(),
        why: Vec::new(),
        calls: (0..lines).map(record).collect(),
    }
}

fn timestamp(clock: Clock, elapsed: Duration) -> String {
    let micros = clock.unix_micros(elapsed);
    jiff::Timestamp::from_microsecond(micros).map_or_else(|_| String::new(), |time| time.to_string())
}

/// The product's own samples of a Prometheus page, without their prefix; labels are summed, buckets left out.
fn samples(page: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    for line in page.lines() {
        let Some((name, value)) = line.strip_prefix("toolstorm_").and_then(|line| line.rsplit_once(' ')) else {
            continue;
        };
        let name = name.split('{').next().unwrap_or(name);
        if let (Ok(value), false) = (value.parse::<f64>(), name.ends_with("_bucket"))
            && value.is_finite()
        {
            *samples.entry(name.to_owned()).or_default() += value;
        }
    }
    samples
}

/// The result folder's name: `20260729T101530Z-quick-1a2b3c`.
pub fn folder_name(clock: Clock, name: &str, id: &str) -> String {
    let second = clock.timestamp().strftime("%Y%m%dT%H%M%SZ");
    format!("{second}-{}-{id}", evidence::file_name(name))
}

/// What each probe found first, of what `GET /stats` says; a page that cannot be read is told in their place.
fn findings(page: std::result::Result<Option<Value>, String>) -> Vec<String> {
    match page {
        Ok(page) => {
            let findings = page.as_ref().and_then(|page| page["findings"].as_array());
            findings.into_iter().flatten().filter_map(|line| Some(line.as_str()?.to_owned())).collect()
        }
        Err(error) => vec![format!("what the probes found first could not be read: {error}")],
    }
}

/// The name of the log of a launch's server.
pub fn log_name(arm: &str, repetition: u32) -> String {
    format!("server-{}-{repetition}.log", evidence::file_name(arm))
}

/// Where the evidence of a session lies.
pub fn evidence_folder(result: &Path, arm: &str, launch: u32, session: u64) -> PathBuf {
    evidence::folder(result, arm, launch, session)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_over_labels() {
        let page = "# HELP x\ntoolstorm_race_hits_total{layer=\"1\"} 2\ntoolstorm_race_hits_total{layer=\"2\"} 3\n\
            toolstorm_overlap_share 0.25\ntoolstorm_step_bucket{le=\"1\"} 9\nother_thing 4\n";
        let samples = samples(page);
        assert_eq!(samples.get("race_hits_total"), Some(&5.0));
        assert_eq!(samples.get("overlap_share"), Some(&0.25));
        assert_eq!(samples.len(), 2);
    }
}
