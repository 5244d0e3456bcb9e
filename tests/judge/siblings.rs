//! Kinds of failure that no recorded case shows: the same damage in other clothes.

use serde_json::{Value, json};
use toolstorm::validate::{Class, Ending, Expectation, Observation, Tools, record};

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
    for name in [json!(5), json!(true), json!({"value": "get_weather"}), json!(["get_weather"])] {
        let function = json!({"name": name, "arguments": "{\"city\": \"Rome\"}"});
        let message = json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "c1", "type": "function", "function": function}]});
        assert_eq!(unary(message, json!("tool_calls"), json!({})).0, Class::NameMangled, "{name}");
    }
    for name in
        ["get_weather<|channel|>", "get_weather:0", "default_api.get_weather", "get_weathe", "null", " get_weather"]
    {
        assert_eq!(call(name, json!(LYON)), Class::NameMangled, "{name}");
    }
    for name in [
        "get_weather\n",
        "get_weather>",
        "get_weather{\"city\"",
        "get_weatherget_weather",
        "get_weather<｜tool▁sep｜>",
        "et_weather",
        "functions.get_weather:0",
        "\"get_weather\"",
        "get_weather()",
        "undefined",
        "get weather",
        "gеt_weather",
    ] {
        assert_eq!(call(name, json!(LYON)), Class::NameMangled, "{name}");
    }
    for name in ["getWeather", "multi_tool_use.parallel", "tool", "assistant", "get-weather", "weather", "get_forecast"]
    {
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

/// Every family again, as servers without the right parser pass it on; and calls that only a cover hides.
#[test]
fn calls_leak_in_many_clothes() {
    for text in [
        "<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>get_weather\n```json\n{\"city\":\"Lyon\"}\n```<|tool▁call▁end|>",
        "<|START_ACTION|>[{\"tool_call_id\":\"0\",\"tool_name\":\"get_weather\",\"parameters\":{\"city\":\"Lyon\"}}]<|END_ACTION|>",
        "<|action_start|><|plugin|>\n{\"name\":\"get_weather\",\"parameters\":{\"city\":\"Lyon\"}}<|action_end|>",
        "<tool_calls>[{\"name\":\"get_weather\",\"arguments\":{}}]</tool_calls>",
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>get_weather",
        "<seed:tool_call><function=get_weather><parameter=city>Lyon</parameter></function></seed:tool_call>",
        "<|python_start|>[get_weather(city=\"Lyon\")]<|python_end|>",
        "<function=get_weather>{\"city\": \"Lyon\"}</function>",
        "[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{\"city\":\"Lyon\"}",
        "get_weather{\"city\": \"Lyon\"}",
        "[{\"name\":\"get_weather\",\"arguments\":{\"city\":\"Lyon\"}}]",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\":\"Lyon\"}<|tool_call_end|><|tool_calls_section_end|>",
        "get_weather\n<arg_key>city</arg_key>\n<arg_value>Lyon</arg_value>\n</tool_call>",
        ">>>get_weather\n{\"city\": \"Lyon\"}",
        "<|from|>assistant\n<|recipient|>get_weather\n<|content|>{\"city\":\"Lyon\"}",
        "assistantcommentary to=functions.get_weather json{\"city\":\"Lyon\"}",
        "```tool_code\nget_weather(city=\"Lyon\")\n```",
        "<function_calls>\nget_weather(city=\"Lyon\")\n</function_calls>",
        "<|tool_call_start|>[get_weather(city=\"Lyon\")]<|tool_call_end|>",
        "✿FUNCTION✿: get_weather\n✿ARGS✿: {\"city\": \"Lyon\"}",
        "Thought: I need it.\nAction: get_weather\nAction Input: {\"city\": \"Lyon\"}",
        "<tools>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Lyon\"}}\n</tools>",
        "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Lyon\"}}<|eom_id|>",
        "{\"type\": \"function\", \"name\": \"get_weather\", \"parameters\": {\"city\": \"Lyon\"}}",
        "<|im_start|>assistant\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Lyon\"}}<|im_end|>",
        "</think>\n\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Lyon\"}}",
        "<think>\nLyon it is.\n</think>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Lyon\"}}",
        "<tool_use>\n<name>get_weather</name>\n<arguments>{\"city\": \"Lyon\"}</arguments>\n</tool_use>",
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>",
        "<|tool_call|>call: get_weather",
        "[AVAILABLE_TOOLS][{\"type\": \"function\"}][/AVAILABLE_TOOLS][TOOL_CALLS]",
        "<start_function_call>call:get_weather{city:<escape>Lyon<escape>}",
        "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"city\" string=\"true\">Lyon</｜DSML｜parameter>",
        "<||DSML||invoke name=\"get_weather\">",
        "Let me look.\n\n<tool_call>",
        "<tool_call",
        "<｜tool▁ca",
        "{\"tool_calls\": [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Lyon\"}}]}",
        "{\"function_call\": {\"name\": \"get_weather\", \"arguments\": \"{\\\"city\\\": \\\"Lyon\\\"}\"}}",
        "{\"get_weather\": {\"city\": \"Lyon\"}}",
        "print(get_weather(city=\"Lyon\"))",
        "default_api.get_weather(city=\"Lyon\")",
        "get_weather(\"Lyon\")",
    ] {
        assert_eq!(content(text), Class::MarkupLeak, "{text}");
    }
    for (message, finish) in [
        (json!({"content": null, "reasoning_content": "So.<|channel|>commentary to=functions.get_weather"}), "stop"),
        (json!({"content": "ok", "reasoning": "<tool_call>\n{\"name\""}), "stop"),
        (json!({"content": "<tool_call>", "tool_calls": []}), "tool_calls"),
    ] {
        assert_eq!(unary(message.clone(), json!(finish), json!({})).0, Class::MarkupLeak, "{message}");
    }
    let letters: Vec<_> = "<｜DSML｜invoke".chars().map(|letter| json!({"content": letter.to_string()})).collect();
    assert_eq!(stream(&letters, &json!("stop"), DONE).0, Class::MarkupLeak);
}

#[test]
fn ordinary_answers_are_called_nothing() {
    for text in [
        "| a | b |\n|---|---|---|---|---|---|---|---|---|---|\n| 1 | 2 |",
        "Title\n============================================================\nText.",
        "--------------------------------------------------------------------------------\nDone.",
        "Use std::vec<std::vec<int>> and a[i][j] << 3 || b.",
        "1. Item number 1 of the list.\n2. Item number 2 of the list.\n3. Item number 3 of the list.\n4. Item number 4 of the list.\n5. Item number 5 of the list.\n6. Item number 6 of the list.\n7. Item number 7 of the list.\n8. Item number 8 of the list.\n9. Item number 9 of the list.\n10. Item number 10 of the list.\n11. Item number 11 of the list.\n12. Item number 12 of the list.\n13. Item number 13 of the list.\n14. Item number 14 of the list.\n15. Item number 15 of the list.\n16. Item number 16 of the list.\n17. Item number 17 of the list.\n18. Item number 18 of the list.\n19. Item number 19 of the list.\n20. Item number 20 of the list.\n21. Item number 21 of the list.\n22. Item number 22 of the list.\n23. Item number 23 of the list.\n24. Item number 24 of the list.\n25. Item number 25 of the list.\n26. Item number 26 of the list.\n27. Item number 27 of the list.\n28. Item number 28 of the list.\n29. Item number 29 of the list.\n30. Item number 30 of the list.\n31. Item number 31 of the list.\n32. Item number 32 of the list.\n33. Item number 33 of the list.\n34. Item number 34 of the list.\n35. Item number 35 of the list.\n36. Item number 36 of the list.\n37. Item number 37 of the list.\n38. Item number 38 of the list.\n39. Item number 39 of the list.",
        "aGVsbG8gd29ybGQgdGhpcyBpcyBiYXNlNjQgZW5jb2RlZCB0ZXh0IHRoYXQgaXMgbG9uZw==",
        "sha256: e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "Привет, OpenAI и Wi-Fi! 日本語text と µm, Δx, naïve café.",
        "Run <python_path>/bin/pip install x.",
        "The key is 00000000-0000-0000-0000-000000000000.",
        "1,000,000,000,000,000,000 is a quintillion.",
        "Wait... what?! No!!! Really?",
        "def f(x):\n        return x\n\n\n\nclass A:\n                pass",
        "Row row row your boat.",
        "https://example.com/a/b/c/d/e/f/g/h/i/j?x=1&y=2",
        "The function get_weather takes a city; call it as get_weather(city=\"Lyon\") when you like.",
        "Action items:\n- one\n- two",
        "10101010101010101 is binary.",
        "Math: $\\frac{a}{b}$ and \\[x^2\\]",
        "Температура в Lyon’е 5°C; β-carotene, α-helix; ﬁne; 東京Tower.",
        "```rust\nfn main() { let v: Vec<Option<u8>> = vec![]; }\n```",
        "No 不 yes.",
        "Er sagte: „Ja“ – und «non».",
        "🎉🎉🎉 Done! 🎉🎉🎉",
        "👩‍👩‍👧‍👦 family",
        "x = [[0, 0, 0], [0, 0, 0]]",
        "AAArgh! Zzzzz…",
        "Call it as get_weather(city) when you like.",
        "{\"answer\": {\"city\": \"Lyon\"}}",
        "<think>get_weather?</think> No need.",
        "……………………………………………………………………………………………………………………………………………………………………",
    ] {
        assert_eq!(content(text), Class::NoCall, "{text}");
    }
    for text in [
        "the the the the the the the the the the",
        &"!".repeat(60),
        &"\n".repeat(3000),
        &"I will. ".repeat(9),
        &"ĠtheĠtheĠthe".repeat(10),
        &"Okay, ".repeat(20),
        &"，".repeat(100),
    ] {
        assert_eq!(content(text), Class::Degenerate, "{text}");
    }
}

#[test]
fn torn_arguments_are_told_apart() {
    let blanks = format!("{{\"city\": \"Lyon\"{}", " ".repeat(600));
    let loops = format!("{{\"city\":\"{}\"}}", "Lyon ".repeat(12));
    assert_eq!(call("get_weather", json!(blanks)), Class::Degenerate);
    assert_eq!(call("get_weather", json!(loops)), Class::Degenerate);
    for (arguments, class) in [
        ("{\"city\":\"Lyon\"}\0", Class::ArgsExtraText),
        ("\u{feff}{\"city\":\"Lyon\"}", Class::ArgsExtraText),
        ("{\"city\":\"Lyon\"}}", Class::ArgsExtraText),
        ("{\"city\":\"Lyon\"]", Class::ArgsMalformed),
        ("{\"city\":\"Lyon\" \"days\":3}", Class::ArgsMalformed),
        ("{\"city\":\"Lyon\",\"days\":03}", Class::ArgsMalformed),
        ("{\"city\":\"Lyon\",\"days\":+3}", Class::ArgsMalformed),
        ("{\"city\":\"Lyon\",\"days\":3.}", Class::ArgsMalformed),
        ("{\"city\":\"Lyon\",\"days\":.5}", Class::ArgsMalformed),
        ("{\"city\":\"Lyon\",\"days\":0x1F}", Class::ArgsMalformed),
        ("{\"city\":\"Lyon\",\"days\":3", Class::ArgsTruncated),
        ("{\"city\":\"Ly", Class::ArgsTruncated),
        ("{\"city\":\"Lyon\",\"da", Class::ArgsTruncated),
        ("{\"city\":\"Lyon\",", Class::ArgsTruncated),
        ("{\"city\":\"Lyon\",\"days\":-", Class::ArgsTruncated),
        ("{\"city\":\"\\u00e", Class::ArgsTruncated),
        ("\"{\\\"city\\\": \\\"Lyon\\\"}\"", Class::ArgsWrongShape),
        ("{\"city\":\"a\",\"\\u0063ity\":\"b\"}", Class::ArgsMalformed),
        ("{\"city\":\"\\uD83D\\uDE00\"}", Class::Ok),
        ("{\"city\":\"a\tb\"}", Class::ArgsMalformed),
        ("None", Class::ArgsMalformed),
        ("undefined", Class::ArgsMalformed),
        ("[]", Class::ArgsWrongShape),
        ("{\"city\":\"Lyon\",\"days\":\"3\"}", Class::TypeStringified),
        ("{\"city\":\"Lyon\",\"days\":\"null\"}", Class::SchemaViolation),
        ("{\"city\":\"Lyon\",\"days\":[3]}", Class::SchemaViolation),
        ("{\"city\":\"Lyon\",\"days\":3.5}", Class::SchemaViolation),
        ("{\"city\":null}", Class::SchemaViolation),
        ("{\"city\":[\"Lyon\"]}", Class::SchemaViolation),
        ("{\"city\":\"Lyon</arg_value>\"}", Class::MarkupResidue),
        ("{\"city\":\"Lyon<｜tool▁call▁end｜>\"}", Class::MarkupResidue),
        ("{\"city\":\"Lyon\",\"days<|im_end|>\":3}", Class::MarkupResidue),
        ("{\"city\":\"<parameter=city>Lyon\"}", Class::MarkupResidue),
        ("{\"city\":\"Lyon[TOOL_CALLS]\"}", Class::MarkupResidue),
        ("{\"city\":\"Lyon\"}</tool_call>", Class::ArgsExtraText),
        ("{\"city\":\"Lyon\"</tool_call>", Class::ArgsTruncated),
        ("{\"city\":\"Lyon\"}\n```", Class::ArgsExtraText),
        ("```json\n{\"city\":\"Lyon\"}\n```", Class::ArgsExtraText),
        ("city=\"Lyon\"", Class::ArgsMalformed),
        ("{\"city\":\"Lyon\"}{\"city\"", Class::CallMerged),
        ("{\"city\":\"Lyon\"}, {\"city\":\"Oslo\"}", Class::CallMerged),
        ("{\"city\":\"Ly{\"city\":\"Lyon\"}", Class::ArgsDuplicated),
        ("{}{\"city\":\"Lyon\"}", Class::CallMerged),
        ("{\"city\":\"L\\yon\"}", Class::ArgsMalformed),
        ("{\\\"city\\\":\\\"Lyon\\\"}", Class::ArgsMalformed),
        ("{\"city\":\"\\ud83d\"}", Class::EncodingDamage),
        ("{\"city\":\"\\udc00x\"}", Class::EncodingDamage),
        ("{\"arguments\": {\"city\":\"Lyon\"}}", Class::SchemaViolation),
        ("{\"name\":\"get_weather\",\"arguments\":{\"city\":\"Lyon\"}}", Class::SchemaViolation),
        ("{'city': 'Lyon'}", Class::ArgsMalformed),
        ("{“city”: “Lyon”}", Class::ArgsMalformed),
        ("{\"city\":\"Lyon\",}", Class::ArgsMalformed),
        ("{\"city\":undefined}", Class::ArgsMalformed),
        ("{\"city\"", Class::ArgsTruncated),
        ("}", Class::ArgsMalformed),
        ("{\"city\":\"Lyon\"/*c*/}", Class::ArgsMalformed),
        ("{\"city\":\"L{\"city\":\"Lyo{\"city\":\"Lyon\"}", Class::ArgsDuplicated),
        ("{\"city\":{\"city\":\"Lyon\"}", Class::ArgsDuplicated),
        ("{\"city\":\"Lyon\" oops <tool_call>", Class::ArgsMalformed),
    ] {
        assert_eq!(call("get_weather", json!(arguments)), class, "{arguments}");
    }
    for arguments in [json!(5), json!(true), json!([])] {
        assert_eq!(call("get_weather", arguments.clone()), Class::ArgsWrongShape, "{arguments}");
    }
}

#[test]
fn the_oracle_outranks_appearances() {
    let dictated = |city: &str| json!({"expect_calls": [{"name": "get_weather", "arguments": {"city": city}}]});
    let came = |city: &str, wanted: &str| {
        let arguments = json!({"city": city}).to_string();
        let call = json!({"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}});
        unary(json!({"content": null, "tool_calls": [call]}), json!("tool_calls"), dictated(wanted)).0
    };
    let flood = "!".repeat(60);
    for wanted in ["Lyon", "<tool_call>x</tool_call>", flood.as_str(), "a\u{fffd}b"] {
        assert_eq!(came(wanted, wanted), Class::Ok, "{wanted}");
    }
    for (city, class) in [
        ("lyon", Class::ValueAltered),
        ("LyÃ´n", Class::ValueAltered),
        ("Lyon ", Class::ValueAltered),
        ("LyonLyon", Class::ValueAltered),
        ("", Class::ValueAltered),
        ("Lуon", Class::Degenerate),
        ("Lyon<|im_end|>", Class::MarkupResidue),
    ] {
        assert_eq!(came(city, "Lyon"), class, "{city}");
    }
    assert_eq!(unary(json!({"content": "It is sunny."}), json!("stop"), dictated("Lyon")).0, Class::CallLost);
}

/// Bytes that are no UTF-8 inside a call, cut between frames or not, and the line ends of the standard.
#[test]
fn bytes_are_damage_and_line_ends_are_not() {
    let frame = |delta: Value, finish: Value| {
        format!("data: {}\n\n", json!({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))
    };
    let whole = |pieces: &[&[u8]]| {
        let mut body = frame(entry(0, "a", "get_weather", "{\"city\": \"L"), Value::Null).into_bytes();
        for piece in pieces {
            let text = frame(entry(0, "", "", "@@"), Value::Null);
            let (head, tail) = text.split_once("@@").unwrap();
            body.extend([head.as_bytes(), piece, tail.as_bytes()].concat());
        }
        body.extend((frame(json!({}), json!("tool_calls")) + DONE).into_bytes());
        let observation =
            Observation { http_status: 200, content_type: None, stream: true, body: &body, ending: Ending::Eof };
        let expectation =
            Expectation { tools: Tools::new(tools().as_array().unwrap().clone()), ..Expectation::default() };
        toolstorm::validate::judge(&observation, &expectation).class
    };
    assert_eq!(whole(&["yôn\\\"}".as_bytes()]), Class::Ok);
    for pieces in [
        &[b"\xe9yon\\\"}".as_slice()][..],
        &[b"\xe2\x82", b"\xac\\\"}"],
        &[b"\xed\xa0\xbd\xed\xb8\x80\\\"}"],
        &[b"\xff\\\"}"],
    ] {
        assert_eq!(whole(pieces), Class::EncodingDamage, "{pieces:?}");
    }
    let good = frame(entry(0, "a", "get_weather", LYON), Value::Null) + &frame(json!({}), json!("tool_calls")) + DONE;
    for body in [
        good.replace('\n', "\r"),
        good.replace('\n', "\r\n"),
        format!("\u{feff}{good}"),
        format!("id: 1\nretry: 5\n: hello\n{good}"),
        good.replace("data: ", "data:"),
    ] {
        assert_eq!(judge(&json!({"body": body, "stream": true, "tools": tools()})).0, Class::Ok, "{body:?}");
    }
}
