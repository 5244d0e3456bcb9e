//! Kinds of failure that no recorded case shows: the same damage in other clothes.

use serde_json::{Value, json};
use toolstorm::validate::{Class, record};

/// Tools, one required string each, and one that takes nothing.
fn tools() -> Value {
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    json!([
        tool(
            "get_weather",
            json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"], "additionalProperties": false})
        ),
        tool("server_time", json!({"type": "object", "properties": {}})),
    ])
}

fn judge(case: &Value) -> (Class, Vec<Class>, Vec<String>) {
    let bytes = serde_json::to_vec(case).unwrap();
    let record = record::read("sibling", &bytes).unwrap().remove(0);
    let judgement = toolstorm::validate::judge(&record.observation(), &record.expectation);
    let calls = judgement.calls.iter().map(|call| call.class).collect();
    (judgement.class, calls, judgement.quirks.iter().map(ToString::to_string).collect())
}

/// A unary answer with this message and finish reason.
fn unary(message: Value, finish: Value, context: Value) -> (Class, Vec<Class>, Vec<String>) {
    let body = json!({"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": finish}]});
    judge(&json!({"body": body.to_string(), "stream": false, "tools": tools(), "context": context}))
}

/// A unary answer with one call.
fn call(name: &str, arguments: Value) -> Class {
    let message = json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}]});
    unary(message, json!("tool_calls"), json!({})).0
}

fn content(text: &str) -> Class {
    unary(json!({"role": "assistant", "content": text}), json!("stop"), json!({})).0
}

/// A stream of these deltas.
fn stream(deltas: &[Value], finish: &Value, tail: &str) -> (Class, Vec<Class>, Vec<String>) {
    let frame = |delta: &Value, finish: &Value| {
        format!("data: {}\n\n", json!({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))
    };
    let mut body: String = deltas.iter().map(|delta| frame(delta, &Value::Null)).collect();
    if !finish.is_null() {
        body += &frame(&json!({}), finish);
    }
    judge(&json!({"body": body + tail, "stream": true, "tools": tools()}))
}

fn entry(index: u64, id: &str, name: &str, arguments: &str) -> Value {
    json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]})
}

const DONE: &str = "data: [DONE]\n\n";
const LYON: &str = "{\"city\": \"Lyon\"}";

#[test]
fn markup_of_every_family_leaks() {
    for text in [
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get_weather\">",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nLyon\n</parameter>\n</function>\n</tool_call>",
        "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Lyon</parameter>\n</invoke>",
        "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Lyon\"}}]",
        "<|python_tag|>get_weather(city=\"Lyon\")",
        "[get_weather(city=\"Lyon\")]",
        "get_weather\n{\"city\": \"Lyon\"}",
        "```json\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Lyon\"}}\n```",
        "<|start|>assistant<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{\"city\":\"Lyon\"}<|call|>",
        "<|tool_call>call:get_weather{city:<|\"|>Lyon<|\"|>}<tool_call|>",
        "<start_function_call>call:get_weather{city:<escape>Lyon<escape>}<end_function_call>",
        "functools[{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Lyon\"}}]",
        "<TOOLCALL>[{\"name\": \"get_weather\", \"arguments\": {}}]</TOOLCALL>",
        "<|tool_call|>[{\"name\": \"get_weather\", \"arguments\": {}}]",
        "<function_calls><invoke name=\"get_weather\">",
        "I call it now: <tool_cal",
    ] {
        assert_eq!(content(text), Class::MarkupLeak, "{text}");
    }
    for text in [
        "Use `cmd [OPTIONS] [ARGS]...` and x < y.",
        "A JSON example: {\"name\": \"get_weather\", \"arguments\": {}} is how one calls it.",
        "<think>hm</think> It is mild.",
        "# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |",
    ] {
        assert_eq!(content(text), Class::NoCall, "{text}");
    }
}

#[test]
fn arguments_are_told_apart() {
    for (arguments, class) in [
        (json!(LYON), Class::Ok),
        (json!(" {\"city\":\"Lyon\"}\n"), Class::Ok),
        (json!("{\"city\": \"Lyon\", \"days\": 3.0}"), Class::Ok),
        (json!("{\"\\u0063ity\": \"Ly\\u006fn\"}"), Class::Ok),
        (json!("{}"), Class::ArgsLost),
        (json!("   "), Class::ArgsLost),
        (json!("null"), Class::ArgsLost),
        (json!({}), Class::ArgsWrongShape),
        (json!([{"city": "Lyon"}]), Class::ArgsWrongShape),
        (json!("\"Lyon\""), Class::ArgsWrongShape),
        (json!("42"), Class::ArgsWrongShape),
        (json!("{\"city\": \"Lyon\"}{\"city\": \"Lyon\"}"), Class::ArgsDuplicated),
        (json!("{\"city\": \"Lyon\"}\n{\"city\": \"Oslo\"}"), Class::CallMerged),
        (json!("{\"city\": \"Lyon\"}{\"city\": "), Class::CallMerged),
        (json!("{\"city\": \"Lyon\"}\"Lyon\"}"), Class::ArgsDuplicated),
        (json!("{\"city\": \"Lyon\"}}"), Class::ArgsExtraText),
        (json!("```json\n{\"city\": \"Lyon\"}\n```"), Class::ArgsExtraText),
        (json!("{\"city\": \"Lyon\"}</tool_call>"), Class::ArgsExtraText),
        (json!("{"), Class::ArgsTruncated),
        (json!("{\"city\": \"Lyon\\"), Class::ArgsTruncated),
        (json!("{\"city\": tru"), Class::ArgsTruncated),
        (json!("{\"city\": \"Lyon\",}"), Class::ArgsMalformed),
        (json!("{\"city\": \"Lyon\", \"city\": \"Oslo\"}"), Class::ArgsMalformed),
        (json!("{\"city\": Infinity}"), Class::ArgsMalformed),
        (json!("{city: \"Lyon\"}"), Class::ArgsMalformed),
        (json!("{\"city\": \"Lyon\"} // done"), Class::ArgsExtraText),
        (json!("city\", \"x\": {\"n\": 3}}"), Class::ArgsMalformed),
        (json!("{\"city\": \"a\\u0000b\u{1}\"}"), Class::ArgsMalformed),
        (json!("{\"city\": \"Ly\\ufffdn\"}"), Class::EncodingDamage),
        (json!("{\"city\": \"\\ude00\"}"), Class::EncodingDamage),
        (json!("{\"city\": \"Lyon\", \"days\": \"3\"}"), Class::TypeStringified),
        (json!("{\"city\": \"Lyon\", \"days\": \"three\"}"), Class::SchemaViolation),
        (json!("{\"city\": 5}"), Class::SchemaViolation),
        (json!("{\"city\": \"Lyon</parameter>\"}"), Class::MarkupResidue),
        (json!("{\"city\": \"Lyon<|im_end|>\"}"), Class::MarkupResidue),
        (json!("{\"city\": \"Лyon\"}"), Class::Degenerate),
    ] {
        assert_eq!(call("get_weather", arguments.clone()), class, "{arguments}");
    }
    for arguments in [json!("{}"), json!(""), json!(" \n"), json!("null"), Value::Null] {
        assert_eq!(call("server_time", arguments.clone()), Class::Ok, "{arguments}");
    }
}

#[test]
fn names_are_told_apart() {
    for name in
        ["get_weather<|channel|>", "get_weather:0", "default_api.get_weather", "get_weathe", "null", " get_weather"]
    {
        assert_eq!(call(name, json!(LYON)), Class::NameMangled, "{name}");
    }
    for name in ["getWeather", "get-weather", "weather", "get_forecast"] {
        assert_eq!(call(name, json!(LYON)), Class::ModelUnknownTool, "{name}");
    }
    assert_eq!(call("", json!(LYON)), Class::NameMissing);
}

#[test]
fn deltas_are_assembled_as_servers_send_them() {
    let whole = |deltas: &[Value]| stream(deltas, &json!("tool_calls"), DONE);
    let resent = [entry(0, "a", "get_weather", "{\"city\":"), entry(0, "a", "get_weather", "\"Lyon\"}")];
    assert_eq!(whole(&resent), (Class::Ok, vec![Class::Ok], vec!["name_resent".to_owned(), "id_resent".to_owned()]));
    let two_ids = [entry(0, "a", "get_weather", LYON), entry(0, "b", "get_weather", "{\"city\": \"Oslo\"}")];
    assert_eq!(whole(&two_ids).0, Class::CallMerged);
    let twice = [entry(0, "a", "get_weather", LYON), entry(0, "", "", LYON)];
    assert_eq!(whole(&twice).0, Class::ArgsDuplicated);
    let orphan =
        [entry(0, "a", "get_weather", LYON), json!({"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]})];
    assert_eq!(whole(&orphan).1, [Class::Ok, Class::OrphanDelta]);
    let no_id = [json!({"tool_calls": [{"index": 0, "function": {"name": "get_weather", "arguments": LYON}}]})];
    assert_eq!(whole(&no_id).0, Class::IdInvalid);
    let opener_only = [
        json!({"tool_calls": [{"id": "a", "function": {"name": "get_weather", "arguments": ""}}]}),
        json!({"tool_calls": [{"index": 0, "function": {"arguments": LYON}}]}),
    ];
    assert_eq!(whole(&opener_only).0, Class::Ok);
    let string_index =
        [json!({"tool_calls": [{"index": "0", "id": "a", "function": {"name": "get_weather", "arguments": LYON}}]})];
    assert_eq!(whole(&string_index), (Class::Ok, vec![Class::Ok], vec![]));
    let object = [
        json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "get_weather", "arguments": {"city": "Lyon"}}}]}),
    ];
    assert_eq!(whole(&object).0, Class::ArgsWrongShape);
}

#[test]
fn streams_end_in_many_ways() {
    let good = [entry(0, "a", "get_weather", LYON)];
    let end = |finish: Value, tail: &str| stream(&good, &finish, tail);
    assert_eq!(end(json!("tool_calls"), ""), (Class::Ok, vec![Class::Ok], vec!["done_missing".to_owned()]));
    assert_eq!(end(json!("tool_calls"), "data: [DONE]"), (Class::Ok, vec![Class::Ok], vec![]));
    assert_eq!(end(Value::Null, "").0, Class::StreamTruncated);
    assert_eq!(end(json!("MAX_TOKENS"), DONE).0, Class::LengthCutoff);
    assert_eq!(end(json!("cancelled"), DONE).0, Class::Aborted);
    assert_eq!(end(json!("SAFETY"), DONE).0, Class::ModelRefusal);
    assert_eq!(end(json!("error"), DONE).0, Class::ErrorPayload);
    assert_eq!(
        end(json!("tool_calls"), "data: {\"type\":\"error\",\"error\":{\"message\":\"x\"}}\n\n").0,
        Class::ErrorPayload
    );
    assert_eq!(
        end(json!("tool_calls"), "event: ping\ndata: {\"type\": \"ping\"}\n\ndata: [DONE]\n\n").2,
        ["unknown_event"]
    );
    assert_eq!(end(json!("tool_calls"), "data: {\"choices\":[{]}\n\n").0, Class::BadFrame);
    assert_eq!(end(json!("tool_calls"), "data: ping\n\ndata: [DONE]\n\n").2, ["nonjson_keepalive"]);
    assert_eq!(stream(&[], &Value::Null, DONE).0, Class::EmptyResponse);
    assert_eq!(stream(&[], &Value::Null, ": ping\n\n").0, Class::StreamTruncated);
}

#[test]
fn envelopes_that_are_none() {
    let body = |body: &str, stream: bool| judge(&json!({"body": body, "stream": stream, "tools": tools()})).0;
    let anthropic = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"role\":\"assistant\"}}\n\n\
        event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    assert_eq!(body(anthropic, true), Class::BadEnvelope);
    assert_eq!(body("{\"error\": {\n\"message\": \"x\"}\n}", true), Class::ErrorPayload);
    assert_eq!(body("{\"object\":\"error\",\"message\":\"x\",\"code\":400}", false), Class::ErrorPayload);
    assert_eq!(body("{\"detail\":\"Internal error\"}", false), Class::ErrorPayload);
    assert_eq!(body("upstream connect error or disconnect", true), Class::BadEnvelope);
    assert_eq!(body("", false), Class::BadEnvelope);
    assert_eq!(body("{\"id\":\"x\"}", false), Class::BadEnvelope);
    assert_eq!(body("data: [DONE]\n\n", false), Class::BadEnvelope);
}

#[test]
fn statuses_are_told_apart() {
    for (status, class) in [
        (500, Class::HttpError),
        (502, Class::HttpError),
        (302, Class::HttpError),
        (0, Class::HttpError),
        (429, Class::ServerRefused),
        (503, Class::ServerRefused),
        (400, Class::RequestRejected),
        (404, Class::RequestRejected),
    ] {
        assert_eq!(judge(&json!({"body": "x", "http_status": status, "tools": []})).0, class, "{status}");
    }
}
