//! The self-check's own ground truth against the judge, and against a judge that lacks a rule.

use std::{sync::Arc, time::Duration};

use toolstorm::{
    clock::Clock,
    drive::Turn,
    seed::Seed,
    selfcheck::{End, KINDS, Load, Mix, Outcome, Score, Script, play},
    validate::{
        Class, Ending, Expectation, ExpectedCall, Judgement, Mask, Observation, Tools, judge_masked,
        record::tool_choice,
    },
};

const PER_CLASS: u64 = 120;

/// What the judge is told about a script.
fn expectation(script: &Script) -> Expectation {
    let calls = script.dictated.as_ref().map(|calls| {
        let expected = |call: &toolstorm::selfcheck::Dictated| ExpectedCall {
            name: call.name.clone(),
            arguments: call.arguments.clone(),
            text: None,
        };
        calls.iter().map(expected).collect()
    });
    Expectation {
        tools: Tools::new(script.tools.clone()),
        tool_choice: tool_choice(Some(&script.tool_choice.into())).unwrap_or_default(),
        calls,
        own_canary: Some(script.canary.clone()),
        foreign_canaries: script.foreign_canaries.clone(),
        foreign_tools: script.foreign_tools.clone(),
        ..Expectation::default()
    }
}

/// The judgement of a script without a network.
fn judge(script: &Script, mask: Mask) -> Judgement {
    let expectation = expectation(script);
    let ending = match script.response.end {
        End::Clean => Ending::Eof,
        End::Reset => Ending::Reset,
        End::Stall => Ending::Stall,
    };
    let body = script.response.body();
    let observation = Observation {
        http_status: script.response.status,
        content_type: Some(script.response.content_type),
        stream: script.stream,
        body: &body,
        ending,
    };
    judge_masked(&observation, &expectation, mask)
}

fn outcome(judgement: &Judgement) -> Outcome {
    let verdict = serde_json::to_value(judgement.verdict).unwrap_or_default();
    Outcome { verdict: verdict.as_str().unwrap_or_default().to_owned(), class: judgement.class.to_string() }
}

#[test]
fn every_generated_fault_gets_its_class() {
    let mut wrong = Vec::new();
    for kind in KINDS {
        for session in 0..PER_CLASS {
            let script = Script::of_class(Seed(11), session, kind.truth.class).unwrap();
            let judgement = judge(&script, Mask::default());
            if judgement.class.as_str() != kind.truth.class {
                let body = String::from_utf8_lossy(&script.response.body()).chars().take(3000).collect::<String>();
                wrong.push(format!("{} judged {}: {:?}\n{body}", kind.truth.class, judgement.class, judgement.detail));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong, the first:\n{}", wrong.len(), wrong[..wrong.len().min(6)].join("\n---\n"));
}

#[test]
fn no_intact_answer_is_called_anything_else() {
    let mut faulty = 0;
    for session in 0..3000 {
        let script = Script::new(Seed(5), session, 0, Mix { faulty_permille: 0 });
        let judgement = judge(&script, Mask::default());
        faulty += u32::from(judgement.quirks.is_empty());
        assert_eq!(judgement.class, Class::Ok, "{:?}\n{}", judgement, String::from_utf8_lossy(&script.response.body()));
        assert_eq!(judgement.calls.len(), script.dictated.unwrap().len());
    }
    assert!(faulty > 100, "the intact answers never came without a quirk");
}

/// The network adds nothing: the client hands the judge every byte and the right end of the body.
#[test]
fn the_harness_finds_every_fault_over_http() {
    let mix = Mix { faulty_permille: 600 };
    let load = Load {
        sessions: 150,
        concurrency: 64,
        rounds: 2,
        seed: Seed(2),
        mix,
        // Long enough for a busy machine; each stalled answer waits this long, all at once.
        stall: Duration::from_secs(5),
    };
    let ask = |script: &Script, round: u32| Turn {
        round,
        body: b"{}".to_vec(),
        stream: script.stream,
        cancel_after: None,
        think: Duration::ZERO,
        think_steps: 0,
        expected_sha256: Vec::new(),
        dictated: Vec::new(),
        expectation: expectation(script),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let played = runtime.block_on(play(load, Clock::start(), Arc::new(ask))).unwrap();
    assert_eq!(played.score.responses(), 300);
    assert!(played.score.faulty() > 100);
    assert!(played.score.is_perfect(), "{:#?}", played.mistakes);
}

#[test]
fn a_judge_without_any_one_rule_fails_the_selfcheck() {
    for &class in Class::ALL.iter().filter(|&&class| !matches!(class, Class::Ok | Class::NoCall)) {
        let mut score = Score::default();
        for session in 0..40 {
            let script = Script::of_class(Seed(3), session, class.as_str()).unwrap();
            score.add(script.truth, outcome(&judge(&script, Mask::without(class))));
        }
        assert!(!score.is_perfect(), "nothing noticed that the rule of {class} was off");
        let script = Script::of_class(Seed(3), 0, class.as_str()).unwrap();
        assert_eq!(judge(&script, Mask::default()).class, class);
    }
}
