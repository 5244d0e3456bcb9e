//! One session in flight: a pure state machine from judgements to the next request.

use std::{sync::Arc, time::Duration};

use serde_json::{Map, Value, json};

use super::SessionEnd;
use crate::{
    scenario::{Choice, Dictated, Poisoned, Round, Scenario, Session, Style},
    validate::{
        CallJudgement, Canaries, Expectation, ExpectedCall, Judgement, ToolChoice, Tools, Verdict, parity::Form,
    },
};

/// What every request of a launch has.
#[derive(Debug, Clone)]
pub struct Common {
    /// The model asked.
    pub model: String,
    /// Further members of the body.
    pub extra_body: Map<String, Value>,
    /// Every nonce of the launch.
    pub canaries: Arc<Canaries>,
    /// Whether arguments must match byte for byte: the built-in engine copies.
    pub exact: bool,
}

/// A request and what its response must be.
#[derive(Debug, Clone)]
pub struct Turn {
    /// Number of the round.
    pub round: u32,
    /// The body.
    pub body: Vec<u8>,
    /// Whether it asks for a stream.
    pub stream: bool,
    /// Cut the response after so many output events.
    pub cancel_after: Option<u64>,
    /// Pause before sending.
    pub think: Duration,
    /// Engine steps before it is served, under lockstep.
    pub think_steps: u64,
    /// SHA-256 of each dictated line.
    pub expected_sha256: Vec<String>,
    /// The argument texts as they were dictated.
    pub dictated: Vec<String>,
    /// What the judge needs.
    pub expectation: Expectation,
}

/// What a session does next.
#[derive(Debug)]
pub enum Step {
    /// Send this.
    Send(Box<Turn>),
    /// It is over.
    End(SessionEnd),
}

/// One session in flight.
#[derive(Debug)]
pub struct Conversation {
    session: Session,
    scenario: Arc<Scenario>,
    common: Arc<Common>,
    tools: Tools,
    history: Vec<Value>,
    round: usize,
    cancelled: bool,
    poisoned: bool,
    end: Option<SessionEnd>,
}

impl Conversation {
    /// A session before its first request.
    pub fn new(session: Session, scenario: Arc<Scenario>, common: Arc<Common>) -> Self {
        let tools = Tools::new(session.tools.clone());
        let history = vec![json!({"role": "system", "content": session.system})];
        Self { session, scenario, common, tools, history, round: 0, cancelled: false, poisoned: false, end: None }
    }

    /// The session's nonce.
    pub fn nonce(&self) -> &str {
        &self.session.nonce
    }

    /// Whether a call was corrupted already.
    pub fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// Rounds that were answered.
    pub fn rounds(&self) -> u32 {
        self.round as u32
    }

    /// The next request, or the end.
    pub fn next(&self) -> Step {
        if let Some(end) = self.end {
            return Step::End(end);
        }
        let Some(round) = self.session.rounds.get(self.round) else {
            return Step::End(if self.poisoned { SessionEnd::Corrupted } else { SessionEnd::Complete });
        };
        Step::Send(Box::new(Turn {
            round: self.round as u32,
            body: self.body(),
            stream: round.stream,
            cancel_after: round.cancel_after.filter(|_| !self.cancelled),
            think: round.think,
            think_steps: round.think_steps,
            expected_sha256: round.calls.iter().map(Dictated::sha256).collect(),
            dictated: texts(&round.calls),
            expectation: self.expectation(round),
        }))
    }

    /// The turn of the round numbered `round` with a recorded body in the place of its own.
    pub fn recorded(&self, round: u32, stream: bool, body: Vec<u8>) -> Option<Turn> {
        let spec = self.session.rounds.get(round as usize)?;
        Some(Turn {
            round,
            body,
            stream,
            cancel_after: None,
            think: Duration::ZERO,
            think_steps: 0,
            expected_sha256: spec.calls.iter().map(Dictated::sha256).collect(),
            dictated: texts(&spec.calls),
            expectation: self.expectation(spec),
        })
    }

    /// The argument texts that the round numbered `round` dictates.
    pub fn dictated(&self, round: u32) -> Vec<String> {
        self.session.rounds.get(round as usize).map_or_else(Vec::new, |round| texts(&round.calls))
    }

    /// `turn` in another form: the same messages, no cancel and no pause.
    pub fn again(turn: &Turn, form: Form) -> Turn {
        let mut body: Map<String, Value> = serde_json::from_slice(&turn.body).expect("a conversation wrote the body");
        let stream = form == Form::Streamed;
        body.insert("stream".into(), json!(stream));
        if stream {
            body.insert("stream_options".into(), json!({"include_usage": true}));
        } else {
            body.shift_remove("stream_options");
        }
        let mut expectation = turn.expectation.clone();
        if form == Form::Raw {
            body.insert("tool_choice".into(), json!("none"));
            expectation.tool_choice = ToolChoice::None;
            expectation.calls = None;
        }
        let body = serde_json::to_vec(&body).expect("JSON values can be written");
        Turn { body, stream, cancel_after: None, think: Duration::ZERO, think_steps: 0, expectation, ..turn.clone() }
    }

    fn expectation(&self, round: &Round) -> Expectation {
        let expected = round.calls.iter().map(|call| ExpectedCall {
            name: call.name.clone(),
            arguments: call.arguments.clone(),
            text: self.common.exact.then(|| call.text.clone()),
        });
        Expectation {
            tools: self.tools.clone(),
            tool_choice: self.choice(),
            calls: (self.scenario.style == Style::Dictated).then(|| expected.collect()),
            own_canary: Some(self.session.nonce.clone()),
            foreign_tools: self.session.foreign_tools.clone(),
            canaries: Some(Arc::clone(&self.common.canaries)),
            extra_markup: self.scenario.markup.clone(),
            ..Expectation::default()
        }
    }

    /// Takes note of a response that the harness itself cut: the same request follows, uncut.
    pub fn cancel(&mut self) {
        self.cancelled = true;
    }

    /// Takes note of a judged response.
    pub fn absorb(&mut self, judgement: &Judgement) {
        match judgement.verdict {
            Verdict::Valid => self.answer(judgement),
            Verdict::Corrupted => self.damage(judgement),
            // What follows a corruption is its consequence and not counted a second time.
            _ if self.poisoned => self.end = Some(SessionEnd::Corrupted),
            Verdict::Transport => self.end = Some(SessionEnd::Transport),
            Verdict::Refused => self.end = Some(SessionEnd::Refused),
            Verdict::Incomplete => self.end = Some(SessionEnd::Incomplete),
        }
    }

    fn damage(&mut self, judgement: &Judgement) {
        self.poisoned = true;
        match self.scenario.poisoned {
            Poisoned::Stop => {
                self.end = Some(SessionEnd::Corrupted);
                self.round += 1;
            }
            Poisoned::Continue => self.answer(judgement),
            Poisoned::Substitute => {
                let calls = &self.session.rounds[self.round].calls;
                let calls: Vec<_> = calls.iter().map(|call| (None, call.name.clone(), call.text.clone())).collect();
                self.advance(&calls, "");
            }
        }
    }

    fn answer(&mut self, judgement: &Judgement) {
        let part = |call: &CallJudgement| (call.id.clone(), call.name.clone(), call.arguments.clone());
        let calls: Vec<_> = judgement.calls.iter().map(part).collect();
        self.advance(&calls, &judgement.content);
    }

    /// Appends the turn, the answer and what the tools say to the history.
    fn advance(&mut self, calls: &[(Option<String>, String, String)], content: &str) {
        let round = &self.session.rounds[self.round];
        self.history.push(json!({"role": "user", "content": round.user}));
        let mut answer = Map::new();
        answer.insert("role".into(), json!("assistant"));
        answer.insert(
            "content".into(),
            if content.is_empty() && !calls.is_empty() { Value::Null } else { json!(content) },
        );
        let id = |place: usize, id: &Option<String>| match id {
            Some(id) if !id.is_empty() => id.clone(),
            _ => format!("call_{}_{place}", self.round),
        };
        let results: Vec<_> = calls
            .iter()
            .enumerate()
            .map(|(place, (given, _, _))| {
                let content = round.results.get(place).map_or("", String::as_str);
                json!({"role": "tool", "tool_call_id": id(place, given), "content": content})
            })
            .collect();
        if !calls.is_empty() {
            let calls: Vec<_> = calls
                .iter()
                .enumerate()
                .map(|(place, (given, name, arguments))| {
                    json!({"id": id(place, given), "type": "function",
                        "function": {"name": name, "arguments": arguments}})
                })
                .collect();
            answer.insert("tool_calls".into(), Value::Array(calls));
        }
        self.history.push(Value::Object(answer));
        self.history.extend(results);
        self.round += 1;
        self.cancelled = false;
    }

    fn choice(&self) -> ToolChoice {
        match (self.scenario.tool_choice, self.scenario.style) {
            (Choice::Required, _) | (_, Style::Task) => ToolChoice::Required,
            (Choice::Auto, Style::Dictated) => ToolChoice::Auto,
        }
    }

    fn body(&self) -> Vec<u8> {
        let round = &self.session.rounds[self.round];
        let mut messages = self.history.clone();
        messages.push(json!({"role": "user", "content": round.user}));
        let mut body = Map::new();
        body.insert("model".into(), json!(self.common.model));
        body.insert("messages".into(), Value::Array(messages));
        body.insert("tools".into(), json!(self.session.tools));
        let choice = if self.choice() == ToolChoice::Required { "required" } else { "auto" };
        body.insert("tool_choice".into(), json!(choice));
        body.insert("temperature".into(), json!(0));
        body.insert("max_tokens".into(), json!(self.scenario.max_tokens));
        body.insert("stream".into(), json!(round.stream));
        if round.stream {
            body.insert("stream_options".into(), json!({"include_usage": true}));
        }
        body.extend(self.common.extra_body.clone());
        serde_json::to_vec(&body).expect("JSON values can be written")
    }
}

/// The argument texts of dictated calls.
fn texts(calls: &[Dictated]) -> Vec<String> {
    calls.iter().map(|call| call.text.clone()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{seed::Seed, validate::Class};

    fn conversation(poisoned: Poisoned) -> Conversation {
        let scenario = Scenario { poisoned, rounds: crate::scenario::Range(3, 3), ..Scenario::default() };
        let session = scenario.session(Seed(1), 0).unwrap();
        let common =
            Common { model: "m".into(), extra_body: Map::new(), canaries: Arc::new(Canaries::new()), exact: true };
        Conversation::new(session, Arc::new(scenario), Arc::new(common))
    }

    fn judged(verdict: Verdict, turn: &Turn) -> Judgement {
        let expected = &turn.expectation.calls.as_ref().unwrap()[0];
        let call = CallJudgement {
            name: expected.name.clone(),
            id: None,
            arguments: if verdict == Verdict::Valid { expected.text.clone().unwrap() } else { "{\"ref\": \"x".into() },
            verdict,
            class: Class::Ok,
            detail: None,
        };
        Judgement {
            verdict,
            class: Class::Ok,
            detail: None,
            calls: vec![call],
            quirks: BTreeSet::new(),
            finish_reason: None,
            content: String::new(),
            completion_tokens: None,
        }
    }

    fn send(conversation: &Conversation) -> Box<Turn> {
        match conversation.next() {
            Step::Send(turn) => turn,
            Step::End(end) => panic!("the session ended: {end:?}"),
        }
    }

    fn messages(turn: &Turn) -> Vec<Value> {
        let body: Value = serde_json::from_slice(&turn.body).unwrap();
        body["messages"].as_array().unwrap().clone()
    }

    #[test]
    fn a_clean_session_resends_its_history_and_completes() {
        let mut conversation = conversation(Poisoned::Stop);
        for round in 0..3 {
            let turn = send(&conversation);
            assert_eq!(turn.round, round);
            assert_eq!(messages(&turn).len() as u32, 2 + 3 * round);
            conversation.absorb(&judged(Verdict::Valid, &turn));
        }
        assert!(matches!(conversation.next(), Step::End(SessionEnd::Complete)));
        assert_eq!(conversation.rounds(), 3);
    }

    #[test]
    fn a_poisoned_session_stops_substitutes_or_goes_on() {
        let mut stopped = conversation(Poisoned::Stop);
        let turn = send(&stopped);
        stopped.absorb(&judged(Verdict::Corrupted, &turn));
        assert!(matches!(stopped.next(), Step::End(SessionEnd::Corrupted)));

        for (policy, kept) in [(Poisoned::Substitute, false), (Poisoned::Continue, true)] {
            let mut conversation = conversation(policy);
            let turn = send(&conversation);
            conversation.absorb(&judged(Verdict::Corrupted, &turn));
            assert!(conversation.is_poisoned());
            let next = send(&conversation);
            let came = messages(&next)[2]["tool_calls"][0]["function"]["arguments"].as_str().unwrap().to_owned();
            assert_eq!(came == "{\"ref\": \"x", kept);
            conversation.absorb(&Judgement { verdict: Verdict::Refused, ..judged(Verdict::Valid, &next) });
            assert!(matches!(conversation.next(), Step::End(SessionEnd::Corrupted)));
        }
    }

    #[test]
    fn a_cancelled_request_is_sent_again_uncut() {
        let mut conversation = conversation(Poisoned::Stop);
        conversation.session.rounds[0].cancel_after = Some(3);
        let first = send(&conversation);
        assert_eq!(first.cancel_after, Some(3));
        conversation.cancel();
        let second = send(&conversation);
        assert_eq!((second.cancel_after, second.round), (None, 0));
        assert_eq!(first.body, second.body);
    }

    #[test]
    fn infrastructure_ends_a_session_under_its_own_name() {
        for (verdict, end) in
            [(Verdict::Transport, SessionEnd::Transport), (Verdict::Incomplete, SessionEnd::Incomplete)]
        {
            let mut conversation = conversation(Poisoned::Stop);
            let turn = send(&conversation);
            conversation.absorb(&judged(verdict, &turn));
            assert!(matches!(conversation.next(), Step::End(other) if other == end));
        }
    }
}
