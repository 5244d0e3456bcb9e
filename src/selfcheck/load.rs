//! The scripts at full concurrency, through the same client and judge as any run.

use std::{sync::Arc, time::Duration};

use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet};

use super::{Mix, Outcome, Score, Script, serve};
use crate::{
    clock::Clock,
    drive::{self, Client, Endpoint, Limits, Turn},
    error::{Error, Result},
    seed::Seed,
};

/// How much is played.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Sessions in all.
    pub sessions: u64,
    /// Sessions at once.
    pub concurrency: usize,
    /// Rounds of each session.
    pub rounds: u32,
    /// Seed of every script.
    pub seed: Seed,
    /// Share of faulty answers.
    pub mix: Mix,
    /// Silence inside a body after which it counts as stalled.
    pub stall: Duration,
}

/// What came of it.
#[derive(Debug, Clone, Default)]
pub struct Played {
    /// Truth against judgement.
    pub score: Score,
    /// Time in all.
    pub wall: Duration,
    /// Time spent judging, over all threads.
    pub judging: Duration,
    /// Bytes of bodies.
    pub bytes: u64,
    /// A line for each of the first mistakes.
    pub mistakes: Vec<String>,
}

/// Makes the request of a script: the caller knows what the judge wants to know.
pub type Ask = dyn Fn(&Script, u32) -> Turn + Send + Sync;

/// Serves the scripts on a free port of this machine and drives them all.
pub async fn play(load: Load, clock: Clock, ask: Arc<Ask>) -> Result<Played> {
    let unbound = |error: std::io::Error| Error::usage(format!("cannot listen on 127.0.0.1: {error}"));
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(unbound)?;
    let address = listener.local_addr().map_err(unbound)?;
    let server = tokio::spawn(serve(listener, load.seed, load.mix));
    let endpoint = Endpoint { base_url: format!("http://{address}"), api_key: None };
    let patient = Duration::from_mins(5);
    let limits = Limits { connect: patient, first_byte: patient, stall: load.stall, total: patient, cuts: false };
    let client = Client::new(endpoint, limits, clock)?;
    let places = Arc::new(Semaphore::new(load.concurrency));
    let start = clock.elapsed();
    let mut sessions = JoinSet::new();
    for session in 0..load.sessions {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
        let (client, ask) = (client.clone(), Arc::clone(&ask));
        sessions.spawn(async move {
            let played = one(load, session, &client, clock, &*ask).await;
            drop(place);
            played
        });
    }
    let mut whole = Played::default();
    while let Some(played) = sessions.join_next().await {
        whole.merge(played.map_err(|error| Error::incomplete(format!("a session of the self-check died: {error}")))?);
    }
    whole.wall = clock.elapsed().saturating_sub(start);
    server.abort();
    Ok(whole)
}

/// The rounds of one session.
async fn one(load: Load, session: u64, client: &Client, clock: Clock, ask: &Ask) -> Played {
    let mut played = Played::default();
    for round in 0..load.rounds {
        let script = Script::new(load.seed, session, u64::from(round), load.mix);
        let turn = ask(&script, round);
        let (reply, _) = client.send(&turn, session).await;
        let start = clock.elapsed();
        let judgement = drive::judge(&turn, &reply);
        played.judging += clock.elapsed().saturating_sub(start);
        played.bytes += reply.body.len() as u64;
        let verdict = format!("{:?}", judgement.verdict).to_lowercase();
        let outcome = Outcome { verdict, class: judgement.class.to_string() };
        if outcome.class != script.truth.class {
            let detail = judgement.detail.unwrap_or_default();
            let truth = script.truth.class;
            played
                .mistakes
                .push(format!("session {session} round {round}: {truth} judged {}: {detail}", outcome.class));
        }
        played.score.add(script.truth, outcome);
    }
    played
}

impl Played {
    fn merge(&mut self, other: Self) {
        const SHOWN: usize = 20;
        self.score.merge(other.score);
        self.judging += other.judging;
        self.bytes += other.bytes;
        self.mistakes.extend(other.mistakes);
        self.mistakes.truncate(SHOWN);
    }

    /// How many times this load the judge alone could follow on one core.
    pub fn headroom(&self) -> Option<f64> {
        let judging = self.judging.as_secs_f64();
        (judging > 0.0).then(|| self.wall.as_secs_f64() / judging)
    }
}
