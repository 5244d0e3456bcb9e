//! The rules, one a class, in the order of the taxonomy: two tables, one for calls and one for responses.

use serde_json::Value;

use super::{
    CallJudgement, Class, Ending, Expectation, ExpectedCall, Judgement, Observation, Quirk, ToolChoice, Verdict,
    arguments::{Arguments, strings},
    assemble::{Answer, Slot, Unusable},
    degenerate,
    markup::{self, Hit, Kind},
    name::{self, Pieces},
    oracle::{self, Delivered, Pairing},
    tools::Tool,
};

/// Classes whose rules are off. A judge without one of its rules must be caught by its own self-check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mask(u64);

impl Mask {
    /// Every rule but that of `class`.
    pub fn without(class: Class) -> Self {
        Self(1 << class as u64)
    }

    fn allows(self, class: Class) -> bool {
        self.0 & (1 << class as u64) == 0
    }
}

/// One call, with all that the rules ask about.
struct Call<'a> {
    slot: &'a Slot,
    name: std::borrow::Cow<'a, str>,
    pieces: Pieces,
    arguments: Arguments<'a>,
    tool: Option<&'a Tool>,
    partner: Option<&'a ExpectedCall>,
    /// The delivered arguments are the dictated ones.
    intact: bool,
    id_shared: bool,
    /// Another call of the response carries a name and arguments.
    beside_full: bool,
}

impl Call<'_> {
    /// Whether a key or string of the dictated arguments is like this: then it is no evidence of damage.
    fn dictates(&self, is_like: impl Fn(&str) -> bool) -> bool {
        let like =
            |partner: &ExpectedCall| strings(&partner.arguments, &mut |text| is_like(text).then_some(())).is_some();
        self.partner.is_some_and(like)
    }
}

/// The response around the calls.
struct Case<'a> {
    observation: &'a Observation<'a>,
    expectation: &'a Expectation,
    answer: &'a Answer,
    missing: Vec<&'a ExpectedCall>,
    marker: Option<Hit>,
}

type CallRule = fn(&Case<'_>, &Call<'_>) -> Option<String>;
type CaseRule = fn(&Case<'_>) -> Option<String>;

/// What a call is called: the first rule that finds something.
const CALL_RULES: &[(Class, CallRule)] = &[
    (Class::CrossSession, foreign_call),
    (Class::Degenerate, degenerate_call),
    (Class::PhantomCall, phantom_call),
    (Class::OrphanDelta, orphan_delta),
    (Class::CallMerged, call_merged),
    (Class::ArgsDuplicated, |_, call| call.arguments.repeated()),
    (Class::NameMissing, name_missing),
    (Class::NameMangled, name_mangled),
    (Class::ArgsWrongShape, |_, call| call.arguments.wrong_shape()),
    (Class::EncodingDamage, encoding_damage),
    (Class::ArgsExtraText, |_, call| call.arguments.extra()),
    (Class::ArgsTruncated, |_, call| call.arguments.truncated()),
    (Class::ArgsMalformed, |_, call| call.arguments.malformed()),
    (Class::ArgsLost, args_lost),
    (Class::MarkupResidue, residue_in_call),
    (Class::TypeStringified, type_stringified),
    (Class::SchemaViolation, schema_violation),
    (Class::ValueAltered, value_altered),
    (Class::LateDelta, |_, call| call.slot.late.then(|| "call deltas came after the finish reason".to_owned())),
    (Class::IdInvalid, id_invalid),
    (Class::ModelUnknownTool, unknown_tool),
];

/// Verdicts on a response that come before its calls are looked at.
const EARLY_RULES: &[(Class, CaseRule)] = &[
    (Class::StreamStalled, stream_stalled),
    (Class::HttpError, no_response),
    (Class::ServerRefused, |case| status(case, |status| matches!(status, 429 | 503 | 529))),
    (Class::RequestRejected, |case| status(case, |status| (400..500).contains(&status) && status != 429)),
    (Class::HttpError, |case| status(case, |status| !(200..300).contains(&status))),
];

/// Verdicts by which nothing is known about the calls.
const TRANSPORT_RULES: &[(Class, CaseRule)] = &[
    (Class::ErrorPayload, error_payload),
    (Class::BadEnvelope, bad_envelope),
    (Class::BadFrame, bad_frame),
    (Class::StreamTruncated, stream_truncated),
];

/// Answers that were ended early.
const ENDED_RULES: &[(Class, CaseRule)] =
    &[(Class::LengthCutoff, length_cutoff), (Class::Aborted, aborted), (Class::ModelRefusal, model_refusal)];

/// Answers without a call.
const NO_CALL_RULES: &[(Class, CaseRule)] =
    &[(Class::MarkupLeak, markup_leak), (Class::CallLost, call_absent), (Class::EmptyResponse, empty_response)];

/// Answers whose calls are intact.
const CASE_RULES: &[(Class, CaseRule)] = &[(Class::CallLost, call_missing), (Class::MarkupResidue, residue_in_text)];

fn first(rules: &[(Class, CaseRule)], mask: Mask, case: &Case<'_>) -> Option<(Class, String)> {
    let mut found = rules.iter().filter(|(class, _)| mask.allows(*class));
    found.find_map(|(class, rule)| Some((*class, rule(case)?)))
}

/// The verdict that a class belongs to.
pub fn verdict(class: Class) -> Verdict {
    match class {
        Class::Ok | Class::NoCall | Class::ModelUnknownTool => Verdict::Valid,
        Class::HttpError
        | Class::StreamStalled
        | Class::ErrorPayload
        | Class::BadEnvelope
        | Class::BadFrame
        | Class::StreamTruncated => Verdict::Transport,
        Class::ServerRefused | Class::RequestRejected | Class::ModelRefusal => Verdict::Refused,
        Class::LengthCutoff | Class::Aborted => Verdict::Incomplete,
        _ => Verdict::Corrupted,
    }
}

/// Judges a reassembled answer.
pub fn judge(observation: &Observation<'_>, expectation: &Expectation, answer: &Answer, mask: Mask) -> Judgement {
    let marker = find_marker(expectation, answer);
    let mut case = Case { observation, expectation, answer, missing: Vec::new(), marker };
    let mut judgement = blank_judgement(answer);
    if let Some(found) = first(EARLY_RULES, mask, &case) {
        judgement.quirks.clear();
        return close(judgement, Some(found));
    }
    let (calls, missing, reordered) = read_calls(expectation, answer);
    case.missing = missing;
    judgement.calls = calls.iter().map(|call| judge_call(&case, call, mask)).collect();
    let decided = decide(&case, &judgement.calls, mask);
    let class = decided.as_ref().map_or(Class::Ok, |(class, _)| *class);
    if !matches!(verdict(class), Verdict::Valid | Verdict::Corrupted) {
        judgement.calls.clear();
    }
    collect_quirks(&case, &calls, reordered, class, &mut judgement);
    close(judgement, decided)
}

/// The class of a response whose transport and status are in order.
fn decide(case: &Case<'_>, calls: &[CallJudgement], mask: Mask) -> Option<(Class, String)> {
    let of_class = |class: Class| {
        let call = calls.iter().find(|call| call.class == class)?;
        Some((class, call.detail.clone().unwrap_or_default()))
    };
    let on = |class: Class, rule: CaseRule| mask.allows(class).then(|| Some((class, rule(case)?))).flatten();
    of_class(Class::CrossSession)
        .or_else(|| on(Class::CrossSession, foreign_text))
        .or_else(|| first(TRANSPORT_RULES, mask, case))
        .or_else(|| of_class(Class::Degenerate))
        .or_else(|| on(Class::Degenerate, degenerate_text))
        .or_else(|| first(ENDED_RULES, mask, case))
        .or_else(|| {
            if calls.is_empty() {
                return first(NO_CALL_RULES, mask, case).or_else(|| Some((Class::NoCall, String::new())));
            }
            let broken = CALL_RULES.iter().filter(|(class, _)| verdict(*class) == Verdict::Corrupted);
            let mut classes = broken.map(|(class, _)| *class);
            classes
                .find_map(of_class)
                .or_else(|| first(CASE_RULES, mask, case))
                .or_else(|| of_class(Class::ModelUnknownTool))
        })
}

fn blank_judgement(answer: &Answer) -> Judgement {
    Judgement {
        verdict: Verdict::Valid,
        class: Class::Ok,
        detail: None,
        calls: Vec::new(),
        quirks: answer.quirks.clone(),
        finish_reason: answer.finish.clone(),
        content: answer.content.as_str().to_owned(),
        completion_tokens: answer.completion_tokens,
    }
}

fn close(mut judgement: Judgement, found: Option<(Class, String)>) -> Judgement {
    let (class, detail) = found.unwrap_or((Class::Ok, String::new()));
    judgement.class = class;
    judgement.verdict = verdict(class);
    judgement.detail = (!detail.is_empty()).then_some(detail);
    judgement
}

fn judge_call(case: &Case<'_>, call: &Call<'_>, mask: Mask) -> CallJudgement {
    let mut rules = CALL_RULES.iter().filter(|(class, _)| mask.allows(*class));
    let found = rules.find_map(|(class, rule)| Some((*class, rule(case, call)?)));
    let (class, detail) = match found {
        Some((class, detail)) => (class, Some(detail)),
        None => (Class::Ok, None),
    };
    CallJudgement {
        name: call.name.clone().into_owned(),
        id: call.slot.id.clone(),
        arguments: call.arguments.text.to_owned(),
        verdict: verdict(class),
        class,
        detail,
    }
}

/// Reads the slots of an answer and pairs them with the dictated calls.
fn read_calls<'a>(expectation: &'a Expectation, answer: &'a Answer) -> (Vec<Call<'a>>, Vec<&'a ExpectedCall>, bool) {
    let declared = |name: &str| expectation.tools.get(name).is_some();
    let mut calls: Vec<Call<'a>> = Vec::with_capacity(answer.slots.len());
    for slot in &answer.slots {
        let (name, pieces) = name::assemble(slot, declared);
        let tool = expectation.tools.get(&name);
        let arguments = Arguments::read(slot);
        let id_shared = false;
        calls.push(Call {
            slot,
            name,
            pieces,
            arguments,
            tool,
            partner: None,
            intact: false,
            id_shared,
            beside_full: false,
        });
    }
    mark_shared_ids(&mut calls);
    let full = calls.iter().filter(|call| !call.name.is_empty() && !call.arguments.blank).count();
    for call in &mut calls {
        call.beside_full = full > usize::from(!call.name.is_empty() && !call.arguments.blank);
    }
    let Some(dictated) = &expectation.calls else { return (calls, Vec::new(), false) };
    let delivered: Vec<Delivered<'_>> = calls
        .iter()
        .map(|call| Delivered { name: &call.name, value: call.arguments.value(), blank: is_empty(call) })
        .collect();
    let pairing = Pairing::new(&delivered, dictated);
    for (call, partner) in calls.iter_mut().zip(&pairing.partners) {
        call.partner = *partner;
        call.intact = partner.is_some_and(|partner| {
            partner.name == call.name
                && call.arguments.object().is_some_and(|value| oracle::is_equal(&value, &partner.arguments))
        });
    }
    (calls, pairing.missing, pairing.reordered)
}

fn mark_shared_ids(calls: &mut [Call<'_>]) {
    let mut seen: std::collections::BTreeMap<&str, usize> = std::collections::BTreeMap::new();
    let mut shared = Vec::new();
    for (position, call) in calls.iter().enumerate() {
        let Some(id) = &call.slot.id else { continue };
        if let Some(earlier) = seen.insert(id, position) {
            shared.extend([earlier, position]);
        }
    }
    for position in shared {
        calls[position].id_shared = true;
    }
}

/// Nothing where something is required: no text, or an empty object.
fn is_empty(call: &Call<'_>) -> bool {
    let nothing = call.arguments.value().and_then(Value::as_object).is_some_and(serde_json::Map::is_empty);
    call.arguments.blank || nothing
}

// The response's rules.

fn stream_stalled(case: &Case<'_>) -> Option<String> {
    let stalled = case.observation.ending == Ending::Stall && !case.answer.done;
    stalled.then(|| format!("silence after {} events, with the connection open", case.answer.events))
}

fn no_response(case: &Case<'_>) -> Option<String> {
    let none = case.observation.ending == Ending::NoResponse || case.observation.http_status == 0;
    none.then(|| "no response".to_owned())
}

fn status(case: &Case<'_>, matches: impl Fn(u16) -> bool) -> Option<String> {
    let status = case.observation.http_status;
    matches(status).then(|| format!("status {status}: {}", super::assemble::excerpt(case.observation.body)))
}

fn error_payload(case: &Case<'_>) -> Option<String> {
    if let Some(Unusable::Error(message)) = &case.answer.unusable {
        return Some(message.clone());
    }
    let failed = case.answer.finish.as_deref().is_some_and(|reason| reason.eq_ignore_ascii_case("error"));
    (failed && !rejects_call(case.answer)).then(|| "the finish reason is `error`".to_owned())
}

fn bad_envelope(case: &Case<'_>) -> Option<String> {
    let Some(Unusable::Envelope(message)) = &case.answer.unusable else { return None };
    // A body that was cut off by the peer says nothing about the envelope.
    let kind = case.observation.content_type.map(|kind| format!(" ({kind})")).unwrap_or_default();
    (case.observation.ending != Ending::Reset).then(|| format!("{message}{kind}"))
}

fn bad_frame(case: &Case<'_>) -> Option<String> {
    match &case.answer.unusable {
        Some(Unusable::Frame(message)) => Some(message.clone()),
        _ => None,
    }
}

fn stream_truncated(case: &Case<'_>) -> Option<String> {
    let answer = case.answer;
    if case.observation.ending == Ending::Reset && !answer.done {
        return Some("the connection was reset inside the body".to_owned());
    }
    let open = answer.stream && answer.finish.is_none() && !answer.done;
    let stray = answer.stray_line.as_ref().map(|line| format!("; unread line {line}")).unwrap_or_default();
    let events = answer.events;
    open.then(|| format!("the stream ended after {events} events with neither finish_reason nor [DONE]{stray}"))
}

fn finished(case: &Case<'_>, reasons: &[&str]) -> Option<String> {
    let reason = case.answer.finish.as_deref()?;
    let known = reasons.iter().any(|known| reason.eq_ignore_ascii_case(known));
    known.then(|| format!("the finish reason is `{reason}`"))
}

const LENGTH: [&str; 5] = ["length", "max_tokens", "max_length", "token_limit", "model_length"];
const ABORT: [&str; 6] = ["abort", "aborted", "cancel", "cancelled", "canceled", "timeout"];
const REFUSAL: [&str; 8] = [
    "content_filter",
    "safety",
    "refusal",
    "content_filtered",
    "sensitive",
    "prohibited_content",
    "recitation",
    "blocklist",
];
const COMPLETE: [&str; 10] = [
    "stop",
    "tool_calls",
    "tool_call",
    "tool_use",
    "function_call",
    "end_turn",
    "eos",
    "eos_token",
    "stop_sequence",
    "eos_token_id",
];

fn length_cutoff(case: &Case<'_>) -> Option<String> {
    finished(case, &LENGTH)
}

fn aborted(case: &Case<'_>) -> Option<String> {
    finished(case, &ABORT)
}

fn model_refusal(case: &Case<'_>) -> Option<String> {
    finished(case, &REFUSAL).or_else(|| case.answer.refusal.then(|| "the refusal field is filled".to_owned()))
}

/// Whether the server says that it made a call and threw it away.
fn rejects_call(answer: &Answer) -> bool {
    let reasons = [&answer.finish, &answer.native_finish];
    reasons.iter().filter_map(|reason| reason.as_deref()).any(|reason| {
        let reason = reason.to_ascii_lowercase();
        (reason.contains("malformed") || reason.contains("invalid") || reason.contains("unexpected"))
            && (reason.contains("call") || reason.contains("tool") || reason.contains("function"))
    })
}

fn markup_leak(case: &Case<'_>) -> Option<String> {
    if let Some(hit) = case.marker.as_ref().filter(|hit| hit.kind == Kind::Call) {
        return Some(format!("{} markup in the text: {}", hit.family, hit.marker));
    }
    if case.expectation.prompt_asks_for_markup {
        return None;
    }
    let tools = &case.expectation.tools;
    let content = case.answer.content.as_str();
    let text = if content.trim().is_empty() { case.answer.reasoning.as_str() } else { content };
    let bare = markup::is_bare_call(text, |name| tools.get(name).is_some());
    bare.then(|| "the whole text is a call of a declared tool".to_owned())
}

fn call_absent(case: &Case<'_>) -> Option<String> {
    if case.answer.legacy_call {
        return Some("the call came in the deprecated function_call field".to_owned());
    }
    if rejects_call(case.answer) {
        return Some("the server says that it rejected a call of its own".to_owned());
    }
    if finished(case, &["tool_calls", "tool_call", "tool_use", "function_call"]).is_some() {
        return Some("the finish reason announces calls, none came".to_owned());
    }
    match (&case.expectation.tool_choice, case.missing.first()) {
        (ToolChoice::Required, _) => Some("tool_choice required, and no call came".to_owned()),
        (ToolChoice::Named(name), _) => Some(format!("tool_choice names `{name}`, and no call came")),
        (_, Some(wanted)) => Some(format!("the dictated call of `{}` did not come", wanted.name)),
        (_, None) => None,
    }
}

fn empty_response(case: &Case<'_>) -> Option<String> {
    let empty = case.answer.content.as_str().trim().is_empty();
    empty.then(|| "neither content nor a call".to_owned())
}

fn call_missing(case: &Case<'_>) -> Option<String> {
    if let Some(wanted) = case.missing.first() {
        return Some(format!("the dictated call of `{}` did not come", wanted.name));
    }
    let ToolChoice::Named(name) = &case.expectation.tool_choice else { return None };
    let came = case.answer.slots.iter().any(|slot| slot.names.concat().contains(name.as_str()));
    (!came).then(|| format!("tool_choice names `{name}`, and another tool was called"))
}

fn residue_in_text(case: &Case<'_>) -> Option<String> {
    let hit = case.marker.as_ref()?;
    Some(format!("{} markup beside the calls: {}", hit.family, hit.marker))
}

fn find_marker(expectation: &Expectation, answer: &Answer) -> Option<Hit> {
    if expectation.prompt_asks_for_markup {
        return None;
    }
    let texts = [answer.content.as_str(), answer.reasoning.as_str()];
    let hits = texts.iter().filter_map(|text| markup::find(text, &expectation.extra_markup));
    hits.min_by_key(|hit| hit.kind)
}

fn degenerate_text(case: &Case<'_>) -> Option<String> {
    let texts = [case.answer.content.as_str(), case.answer.reasoning.as_str()];
    texts.iter().find_map(|text| degenerate::find(text, false)).map(|found| found.detail)
}

fn foreign_text(case: &Case<'_>) -> Option<String> {
    let answer = case.answer;
    let texts = [answer.content.as_str(), answer.reasoning.as_str(), answer.error.as_deref().unwrap_or_default()];
    texts.iter().find_map(|text| foreign_canary(case.expectation, text))
}

/// Another session's canary in `text`.
fn foreign_canary(expectation: &Expectation, text: &str) -> Option<String> {
    if text.is_empty() {
        return None;
    }
    let own = expectation.own_canary.as_deref();
    let listed = expectation.foreign_canaries.iter().find(|canary| {
        !canary.is_empty() && own.is_none_or(|own| !own.contains(canary.as_str())) && text.contains(canary.as_str())
    });
    let found = listed.cloned().or_else(|| expectation.canaries.as_ref()?.find(text, own))?;
    Some(format!("{found} belongs to another session"))
}

// The calls' rules.

fn foreign_call(case: &Case<'_>, call: &Call<'_>) -> Option<String> {
    if call.tool.is_none() {
        let foreign = case.expectation.foreign_tools.iter().find(|tool| !tool.is_empty() && call.name.contains(*tool));
        if let Some(tool) = foreign {
            return Some(format!("the tool `{tool}` belongs to another session"));
        }
    }
    if call.intact {
        return None;
    }
    let search = |text: &str| foreign_canary(case.expectation, text);
    let mut found = search(call.arguments.text).or_else(|| search(&call.name));
    if found.is_none() && call.arguments.text.contains('\\') {
        found = match &call.arguments.document {
            Ok(document) => strings(&document.value, &mut |text| search(text)),
            Err(_) => search(&call.arguments.unescaped()),
        };
    }
    found.or_else(|| search(call.slot.id.as_deref().unwrap_or_default()))
}

fn degenerate_call(_: &Case<'_>, call: &Call<'_>) -> Option<String> {
    if call.intact || call.arguments.blank {
        return None;
    }
    let text = call.arguments.text;
    if let Some(found) = degenerate::find_blank_loop(text) {
        return Some(found);
    }
    let search = |text: &str| {
        let found = degenerate::find(text, true)?;
        let dictated = call.dictates(|text| text.contains(found.stretch));
        (!dictated).then_some(found.detail)
    };
    match &call.arguments.document {
        Ok(document) => strings(&document.value, &mut |text| search(text))
            .or_else(|| degenerate::find_loop(text, 64).map(|found| found.detail)),
        Err(_) => search(&call.arguments.unescaped()),
    }
}

fn phantom_call(case: &Case<'_>, call: &Call<'_>) -> Option<String> {
    if case.expectation.tool_choice == ToolChoice::None {
        return Some("a call under tool_choice none".to_owned());
    }
    if call.name.is_empty() && call.arguments.blank && call.beside_full {
        return Some("an extra call that carries nothing".to_owned());
    }
    let extra = case.expectation.calls.is_some() && call.partner.is_none();
    if !extra {
        return None;
    }
    if is_empty(call) {
        return Some("an extra call without arguments".to_owned());
    }
    (call.tool.is_some() && call.arguments.value().is_some()).then(|| "a call that was not dictated".to_owned())
}

fn orphan_delta(case: &Case<'_>, call: &Call<'_>) -> Option<String> {
    let orphan = case.answer.stream && call.slot.id.is_none() && call.name.is_empty() && !call.slot.name_sent;
    orphan.then(|| "no delta ever named the call that these arguments belong to".to_owned())
}

fn call_merged(_: &Case<'_>, call: &Call<'_>) -> Option<String> {
    if call.slot.id_conflict {
        return Some("two ids came for one position".to_owned());
    }
    if call.pieces == Pieces::TwoNames {
        return Some("two tool names came for one position".to_owned());
    }
    call.arguments.merged()
}

fn name_missing(_: &Case<'_>, call: &Call<'_>) -> Option<String> {
    call.name.is_empty().then(|| "the function name never came".to_owned())
}

fn name_mangled(case: &Case<'_>, call: &Call<'_>) -> Option<String> {
    if call.slot.name_not_text {
        return Some(format!("the name is no string but {}", call.name));
    }
    if call.pieces == Pieces::Conflict {
        return Some(format!("the name came in pieces that contradict each other: {:?}", call.slot.names));
    }
    if call.tool.is_some() {
        return None;
    }
    let declared: Vec<&str> = case.expectation.tools.compiled().iter().map(|tool| tool.name.as_str()).collect();
    name::damage(&call.name, &declared)
}

fn encoding_damage(_: &Case<'_>, call: &Call<'_>) -> Option<String> {
    if call.intact && call.slot.arguments.damage().is_none() {
        return None;
    }
    if call.slot.arguments.damage().is_none() && call.dictates(|text| text.contains(char::REPLACEMENT_CHARACTER)) {
        return None;
    }
    call.arguments.encoding()
}

fn args_lost(_: &Case<'_>, call: &Call<'_>) -> Option<String> {
    let required = call.tool.is_some_and(|tool| !tool.allows_empty);
    (required && is_empty(call)).then(|| "no arguments, though the tool requires some".to_owned())
}

fn residue_in_call(case: &Case<'_>, call: &Call<'_>) -> Option<String> {
    if call.intact || case.expectation.prompt_asks_for_markup {
        return None;
    }
    let extra = &case.expectation.extra_markup;
    let hit = strings(call.arguments.value()?, &mut |text| {
        let hit = markup::find(text, extra)?;
        let same = |dictated: &str| markup::find(dictated, extra).is_some_and(|found| found.marker == hit.marker);
        (!call.dictates(same)).then_some(hit)
    })?;
    Some(format!("{} markup in the arguments: {}", hit.family, hit.marker))
}

fn type_stringified(_: &Case<'_>, call: &Call<'_>) -> Option<String> {
    let value = call.arguments.value()?;
    let path = call.tool?.stringified(value)?;
    Some(format!("{path} came as a string that holds the right type"))
}

fn schema_violation(_: &Case<'_>, call: &Call<'_>) -> Option<String> {
    call.tool?.violation(&call.arguments.object()?)
}

fn value_altered(_: &Case<'_>, call: &Call<'_>) -> Option<String> {
    let partner = call.partner.filter(|_| !call.intact)?;
    call.tool?;
    if call.name != partner.name {
        return Some(format!("`{}` was called instead of `{}`", call.name, partner.name));
    }
    Some(oracle::difference(&call.arguments.object()?, &partner.arguments))
}

fn id_invalid(_: &Case<'_>, call: &Call<'_>) -> Option<String> {
    if call.slot.id.is_none() {
        return Some("the call has no id to answer to".to_owned());
    }
    call.id_shared.then(|| "another call of the response has the same id".to_owned())
}

fn unknown_tool(case: &Case<'_>, call: &Call<'_>) -> Option<String> {
    let unknown = call.tool.is_none() && !case.expectation.tools_unknown;
    unknown.then(|| format!("nobody declared `{}`", call.name))
}

// Deviations that the verdict tolerates.

fn collect_quirks(case: &Case<'_>, calls: &[Call<'_>], reordered: bool, class: Class, judgement: &mut Judgement) {
    let answer = case.answer;
    let usable = matches!(verdict(class), Verdict::Valid | Verdict::Corrupted);
    let quirks = &mut judgement.quirks;
    if verdict(class) == Verdict::Transport {
        quirks.clear();
        return;
    }
    let mut note = |condition: bool, quirk: Quirk| {
        if condition {
            quirks.insert(quirk);
        }
    };
    let intact_call = judgement.calls.iter().any(|call| call.verdict == Verdict::Valid);
    let is = |reasons: &[&str]| finished(case, reasons).is_some();
    note(usable && intact_call && verdict(class) == Verdict::Valid && is(&["stop"]), Quirk::FinishStop);
    note(usable && answer.finish.is_none(), Quirk::FinishMissing);
    note(answer.stream && answer.finish.is_some() && !answer.done, Quirk::DoneMissing);
    let known = is(&COMPLETE) || is(&LENGTH) || is(&ABORT) || is(&REFUSAL) || is(&["error"]);
    note(usable && answer.finish.is_some() && !known && !rejects_call(answer), Quirk::FinishUnknown);
    note(reordered, Quirk::CallsReordered);
    if !usable {
        return;
    }
    for call in calls {
        let slot = call.slot;
        note(
            slot.name_resent && call.pieces != Pieces::Fragments || resends_name(slot, call.pieces),
            Quirk::NameResent,
        );
        note(call.pieces == Pieces::Fragments && call.tool.is_some(), Quirk::NameFragmented);
        note(slot.late_name, Quirk::LateName);
        note(answer.stream && slot.id_blank && slot.id.is_some(), Quirk::IdBlank);
        note(slot.id_resent, Quirk::IdResent);
        let allowed = call.tool.is_some_and(|tool| tool.allows_empty);
        note(call.arguments.blank && allowed, Quirk::EmptyArgsForNoArgTool);
        let rewritten =
            call.partner.and_then(|partner| partner.text.as_ref()).is_some_and(|text| text != call.arguments.text);
        note(call.intact && rewritten, Quirk::ArgsReserialized);
    }
    note(answer.stream && !is_dense(&answer.slots), Quirk::IndexNotDense);
    let damage = answer.content.damage();
    note(damage == Some(super::text::Damage::SplitPair), Quirk::SurrogatesSplit);
    note(answer.content.as_str().contains(char::REPLACEMENT_CHARACTER), Quirk::ContentReplacementChar);
    let stray = case.marker.as_ref().is_some_and(|hit| hit.kind == Kind::Turn) && calls.is_empty();
    note(stray, Quirk::ContentTemplateToken);
}

/// A whole name that came again behind another piece.
fn resends_name(slot: &Slot, pieces: Pieces) -> bool {
    pieces == Pieces::Whole && slot.names.len() > 1
}

fn is_dense(slots: &[Slot]) -> bool {
    let mut indices: Vec<i64> = slots.iter().filter_map(|slot| slot.index).collect();
    indices.sort_unstable();
    indices.iter().enumerate().all(|(position, &index)| index == position as i64)
}
