//! One session: everything that is sent and expected, fixed before the first request.

use std::time::Duration;

use rand::RngExt;
use serde_json::Value;

use super::{
    Content, Parity, Scenario, Style,
    dictate::{self, Dictated, Wish},
    fill, tool,
};
use crate::{
    error::{Error, Result},
    seed::Seed,
};

/// One session of a workload.
#[derive(Debug, Clone, PartialEq)]
pub struct Session {
    /// Its number, from 0, in start order.
    pub number: u64,
    /// Its nonce, which every argument object carries.
    pub nonce: String,
    /// The system message.
    pub system: String,
    /// The `tools` array of its requests.
    pub tools: Vec<Value>,
    /// Tools of other families.
    pub foreign_tools: Vec<String>,
    /// Its rounds.
    pub rounds: Vec<Round>,
}

/// One round of a session.
#[derive(Debug, Clone, PartialEq)]
pub struct Round {
    /// The user's turn.
    pub user: String,
    /// The calls that it dictates; empty for a task.
    pub calls: Vec<Dictated>,
    /// What the tools answer, one text a call.
    pub results: Vec<String>,
    /// Whether the request asks for a stream.
    pub stream: bool,
    /// Cancel the request after so many output events, then send it again.
    pub cancel_after: Option<u64>,
    /// Pause before the request.
    pub think: Duration,
    /// Engine steps before the request, under lockstep.
    pub think_steps: u64,
}

/// The nonce of the session numbered `session` in the workload of `seed`: 40 random bits, in letters that nobody
/// mistakes for each other.
pub fn nonce(seed: Seed, session: u64) -> String {
    const LETTERS: &[u8; 32] = b"abcdefghjkmnpqrstuvwxyz234567890";
    let mut rng = seed.fork("nonce").index(session).rng();
    (0..8).map(|_| char::from(LETTERS[rng.random_range(0..32)])).collect()
}

impl Scenario {
    /// The session numbered `number` of the workload of `seed`.
    pub fn session(&self, seed: Seed, number: u64) -> Result<Session> {
        let mut rng = seed.fork("session").index(number).rng();
        let offered = tool::offer(&mut rng, number, self.tools as usize);
        let tools: Vec<_> = offered.iter().map(tool::Tool::definition).collect();
        let nonce = nonce(seed, number);
        let count = self.rounds.draw(&mut rng) as u32;
        let first = self.context.draw(&mut rng);
        let tool_bytes: u64 = tools.iter().map(|tool| tool.to_string().len() as u64).sum();
        let mut rounds = Vec::with_capacity(count as usize);
        let mut size = first.max(tool_bytes);
        for number in 0..count {
            let turn =
                if number == 0 { 0 } else { self.growth.draw(&mut rng).min(self.max_context.saturating_sub(size)) };
            let user = turn - turn / 2;
            rounds.push(self.round(&mut rng, &offered, &nonce, number, user)?);
            if let Some(before) = number.checked_sub(1) {
                let calls = rounds[before as usize].calls.len().max(1) as u64;
                let bytes = (turn / 2 / calls) as usize;
                rounds[before as usize].results = (0..calls).map(|_| self.filler(&mut rng, bytes)).collect();
            }
            size += turn + self.answer.1;
        }
        let system = self.filler(&mut rng, first.saturating_sub(tool_bytes) as usize);
        Ok(Session {
            number,
            system: format!("You answer with tool calls. {system}"),
            tools,
            foreign_tools: tool::foreign(number),
            nonce,
            rounds,
        })
    }

    fn filler(&self, rng: &mut rand_pcg::Pcg64Mcg, bytes: usize) -> String {
        fill::filler(rng, bytes, self.run_bytes as usize)
    }

    fn round(
        &self,
        rng: &mut rand_pcg::Pcg64Mcg,
        tools: &[tool::Tool],
        nonce: &str,
        number: u32,
        bytes: u64,
    ) -> Result<Round> {
        let prose = self.filler(rng, bytes as usize);
        let (user, calls) = match self.style {
            Style::Dictated => {
                let wish = Wish {
                    tools,
                    content: &self.content,
                    answer: self.answer,
                    calls: fill::pick(rng, &self.calls),
                    nonce,
                    round: number,
                };
                let calls = dictate::dictate(rng, &wish).map_err(|error| error.within(&self.name))?;
                (format!("{prose}\n{}", dictate::turn(&calls)), calls)
            }
            Style::Task => {
                let tool = &tools[rng.random_range(0..tools.len())];
                let subject = fill::text(rng, Content::Ascii, 24);
                (format!("{prose}\n{}", tool.task(&format!("0-{number}-{nonce}"), &subject)), Vec::new())
            }
        };
        let cancelled = rng.random_bool(self.cancel);
        let stream = rng.random_bool(self.stream) || cancelled;
        Ok(Round {
            user,
            results: vec!["ok".into(); calls.len().max(1)],
            calls,
            stream,
            cancel_after: cancelled.then(|| self.cancel_after.draw(rng)),
            think: Duration::from_millis(if number == 0 { 0 } else { self.think_ms.draw(rng) }),
            think_steps: self.think_steps.draw(rng),
        })
    }

    /// Refuses values that no session can be made from.
    pub(crate) fn check(&self) -> Result<()> {
        let share = |key: &str, value: f64| {
            let fits = (0.0..=1.0).contains(&value);
            if fits { Ok(()) } else { Err(Error::usage(format!("`{key}` is {value}, not a share between 0 and 1"))) }
        };
        share("stream", self.stream)?;
        share("cancel", self.cancel)?;
        let positive = |key: &str, fits: bool, want: &str| {
            if fits { Ok(()) } else { Err(Error::usage(format!("`{key}` must be {want}"))) }
        };
        positive("rounds", self.rounds.0 >= 1 && self.rounds.1 <= 1000, "between 1 and 1000")?;
        positive("tools", (1..=7).contains(&self.tools), "between 1 and 7")?;
        positive("calls", !self.calls.is_empty() && self.calls.iter().all(|n| (1..=4).contains(n)), "1 to 4 a round")?;
        positive("content", !self.content.is_empty(), "a list with at least one kind")?;
        positive("context", self.context.1 <= 10_000_000 && self.growth.1 <= 10_000_000, "at most 10 MB")?;
        positive("run_bytes", self.run_bytes <= fill::RUN_PERIOD as u64, &format!("at most {}", fill::RUN_PERIOD))?;
        positive("max_context", self.max_context <= 100_000_000, "at most 100 MB")?;
        positive("answer", self.answer.1 <= 1_000_000, "at most 1 MB")?;
        positive("think_ms", self.think_ms.1 <= 86_400_000, "at most a day")?;
        positive("think_steps", self.think_steps.1 <= 1_000_000, "at most 1000000")?;
        positive("max_tokens", (1..=10_000_000).contains(&self.max_tokens), "between 1 and 10000000")?;
        positive("markup", !self.markup.iter().any(String::is_empty), "texts that are not empty")?;
        if self.parity != Parity::Off && self.style != Style::Dictated {
            return Err(Error::usage("`parity` compares dictated calls, and the style is `task`")
                .hint("leave out `parity`, or set `style = \"dictated\"`"));
        }
        let fits = self.cancel_after.0 >= 1 && self.cancel_after.1 <= 10_000_000;
        positive("cancel_after", fits, "between 1 and 10000000")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::Range;

    fn rich() -> Scenario {
        use Content::{Ascii, Empty, Escaped, Escapes, Nested, Numbers, Unicode};
        Scenario {
            calls: vec![1, 1, 2, 4],
            answer: Range(60, 240),
            content: vec![Ascii, Unicode, Escaped, Escapes, Nested, Numbers, Empty],
            ..Scenario::default()
        }
    }

    #[test]
    fn a_session_depends_on_seed_and_number_alone() {
        let scenario = rich();
        let late = scenario.session(Seed(1), 40).unwrap();
        assert_eq!(late, scenario.session(Seed(1), 40).unwrap());
        assert_ne!(late.rounds, scenario.session(Seed(2), 40).unwrap().rounds);
        assert_ne!(late.nonce, scenario.session(Seed(1), 41).unwrap().nonce);
    }

    #[test]
    fn sizes_stay_inside_what_the_file_says() {
        let scenario = rich();
        let mut parallel = 0;
        for number in 0..60 {
            let session = scenario.session(Seed(5), number).unwrap();
            assert!((3..=7).contains(&session.rounds.len()));
            let tools: usize = session.tools.iter().map(|tool| tool.to_string().len()).sum();
            assert!((1400..9100).contains(&(session.system.len() + tools)), "{}", session.system.len() + tools);
            for round in &session.rounds {
                parallel += usize::from(round.calls.len() > 1);
                assert_eq!(round.results.len(), round.calls.len());
                assert!(round.user.ends_with(&dictate::turn(&round.calls)));
                assert!(round.calls.iter().all(|call| call.line.contains(&session.nonce)));
            }
        }
        assert!(parallel > 20, "only {parallel} rounds had parallel calls");
    }
}
