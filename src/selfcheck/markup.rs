//! A call as the model families write it, before any parser has seen it.

use rand::seq::IndexedRandom;
use rand_pcg::Pcg64Mcg;
use serde_json::Value;

type Writer = fn(&str, &Value) -> String;

const WRITERS: &[Writer] =
    &[dsml, hermes, qwen_coder, glm, kimi, minimax, mistral, llama, harmony, deepseek, python_tag, anthropic, bare];

/// A call in one of the families' markup.
pub(super) fn write(rng: &mut Pcg64Mcg, name: &str, arguments: &Value) -> String {
    WRITERS.choose(rng).map_or_else(String::new, |writer| writer(name, arguments))
}

fn members(arguments: &Value, write: impl Fn(&str, &str) -> String) -> String {
    let map = arguments.as_object().into_iter().flatten();
    map.map(|(key, value)| write(key, &value.as_str().map_or_else(|| value.to_string(), str::to_owned))).collect()
}

fn dsml(name: &str, arguments: &Value) -> String {
    let inner = members(arguments, |key, value| {
        format!("<｜DSML｜parameter name=\"{key}\" string=\"true\">{value}</｜DSML｜parameter>\n")
    });
    format!("<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"{name}\">\n{inner}</｜DSML｜invoke>\n</｜DSML｜tool_calls>")
}

fn hermes(name: &str, arguments: &Value) -> String {
    format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
}

fn qwen_coder(name: &str, arguments: &Value) -> String {
    let inner = members(arguments, |key, value| format!("<parameter={key}>\n{value}\n</parameter>\n"));
    format!("<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
}

fn glm(name: &str, arguments: &Value) -> String {
    let inner = members(arguments, |key, value| format!("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"));
    format!("<tool_call>{name}\n{inner}</tool_call>")
}

fn kimi(name: &str, arguments: &Value) -> String {
    format!(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}\
         <|tool_call_end|><|tool_calls_section_end|>"
    )
}

fn minimax(name: &str, arguments: &Value) -> String {
    let inner = members(arguments, |key, value| format!("<parameter name=\"{key}\">{value}</parameter>\n"));
    format!("<minimax:tool_call>\n<invoke name=\"{name}\">\n{inner}</invoke>\n</minimax:tool_call>")
}

fn mistral(name: &str, arguments: &Value) -> String {
    format!("[TOOL_CALLS]{name}[ARGS]{arguments}")
}

fn llama(name: &str, arguments: &Value) -> String {
    format!("<function={name}>{arguments}</function>")
}

fn harmony(name: &str, arguments: &Value) -> String {
    format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>")
}

fn deepseek(name: &str, arguments: &Value) -> String {
    format!(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
}

fn python_tag(name: &str, arguments: &Value) -> String {
    format!("<|python_tag|>{{\"name\": \"{name}\", \"parameters\": {arguments}}}")
}

fn anthropic(name: &str, arguments: &Value) -> String {
    let inner = members(arguments, |key, value| format!("<parameter name=\"{key}\">{value}</parameter>\n"));
    format!("<function_calls>\n<invoke name=\"{name}\">\n{inner}</invoke>\n</function_calls>")
}

fn bare(name: &str, arguments: &Value) -> String {
    format!("{{\"name\": \"{name}\", \"parameters\": {arguments}}}")
}
