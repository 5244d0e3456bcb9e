//! Every recorded failure shape gets the verdict, the class, the calls and the quirks that it is labelled with.

use std::{collections::BTreeSet, fs, path::Path};

use serde_json::{Value, json};
use toolstorm::validate::{
    Judgement, Reader, judge, judge_answer,
    record::{self, Record},
};

/// A case: the record and the labels.
pub(crate) struct Case {
    pub(crate) record: Record,
    label: Value,
    split_at: Vec<usize>,
}

pub(crate) fn all() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    let cases: Vec<Case> = paths
        .iter()
        .map(|path| {
            let bytes = fs::read(path).unwrap();
            let value: Value = serde_json::from_slice(&bytes).unwrap();
            let record = record::read(&path.to_string_lossy(), &bytes).unwrap().remove(0);
            let split_at = value.pointer("/transport/split_at").and_then(Value::as_array).cloned().unwrap_or_default();
            let split_at = split_at.iter().map(|at| at.as_u64().unwrap() as usize).collect();
            Case { record, label: label(&value), split_at }
        })
        .collect();
    assert!(cases.len() >= 137, "only {} cases", cases.len());
    cases
}

/// The labels of a case in the shape of [`outcome`].
fn label(value: &Value) -> Value {
    let list = |key: &str| value.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
    let quirks: BTreeSet<String> = list("quirks").iter().map(|quirk| quirk.as_str().unwrap().to_owned()).collect();
    json!({ "verdict": value["verdict"], "class": value["class"], "calls": list("calls"), "quirks": quirks })
}

pub(crate) fn outcome(judgement: &Judgement) -> Value {
    let calls: Vec<Value> = judgement
        .calls
        .iter()
        .map(|call| {
            let name = (!call.name.is_empty()).then_some(&call.name);
            json!({ "name": name, "verdict": call.verdict, "class": call.class })
        })
        .collect();
    json!({
        "verdict": judgement.verdict,
        "class": judgement.class,
        "calls": calls,
        "quirks": judgement.quirks.iter().map(|quirk| quirk.as_str().to_owned()).collect::<BTreeSet<_>>(),
    })
}

/// The judgement of a case whose body comes in these pieces.
pub(crate) fn judge_pieces<'a>(record: &Record, pieces: impl Iterator<Item = &'a [u8]>) -> Judgement {
    let mut reader = Reader::new(record.stream);
    pieces.for_each(|piece| reader.feed(piece));
    judge_answer(&record.observation(), &record.expectation, &reader.finish())
}

#[test]
fn every_case_is_judged_as_labelled() {
    let mut wrong = Vec::new();
    for case in all() {
        let judgement = judge(&case.record.observation(), &case.record.expectation);
        if outcome(&judgement) != case.label {
            let (got, wanted) = (outcome(&judgement), &case.label);
            wrong.push(format!("{}\n  got    {got}\n  wanted {wanted}\n  {:?}", case.record.id, judgement.detail));
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_chunking_gives_the_same_judgement() {
    let mut splits = 0;
    for case in all() {
        let body = case.record.body.as_slice();
        let whole = judge(&case.record.observation(), &case.record.expectation);
        for size in (1..=17).chain([64, 255, 1021]) {
            assert_eq!(judge_pieces(&case.record, body.chunks(size)), whole, "{} by {size}", case.record.id);
        }
        for at in (0..=body.len()).step_by(7).chain(case.split_at.iter().copied()) {
            let (head, tail) = body.split_at(at);
            assert_eq!(judge_pieces(&case.record, [head, tail].into_iter()), whole, "{} at {at}", case.record.id);
            splits += 1;
        }
    }
    assert!(splits > 10_000, "only {splits} splits");
}
