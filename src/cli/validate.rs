//! `toolstorm validate`: recorded responses, classified offline.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::{
    error::{Error, Result},
    exit,
    report::terminal::Console,
    validate::{
        Judgement, ToolChoice, Tools, Verdict, judge,
        record::{self, Record},
    },
};

/// Arguments of `validate`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Response bodies, event-stream transcripts, case files, or JSON lines of records; `-` reads standard input
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The request's tools: a JSON array, or an object with `tools`; for files that hold none
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// The request's `tool_choice`, for files that hold none: auto, none, required or a function's name
    #[arg(long, value_name = "CHOICE")]
    tool_choice: Option<String>,
    /// Call markup beside the built-in families; may be repeated
    #[arg(long = "markup", value_name = "TEXT")]
    markup: Vec<String>,
}

/// Runs `validate`: one JSON line a response, and the gate as the exit code.
pub(super) fn run(args: &Args, console: Console) -> Result<u8> {
    let tools = args.tools.as_deref().map(read_tools).transpose()?;
    let mut code = exit::PASS;
    let mut unreadable = false;
    for path in &args.files {
        let records = match records(path) {
            Ok(records) => records,
            Err(error) => {
                console.fail(&error);
                unreadable = true;
                continue;
            }
        };
        for mut record in records {
            complete(&mut record, args, tools.as_ref());
            let judgement = judge(&record.observation(), &record.expectation);
            let line = line(&record, &judgement);
            console.emit(&line);
            console.say(line.to_string());
            code = worse(code, judgement.verdict);
        }
    }
    // As for a run: a failure outweighs what could not be read, which outweighs what could not be judged.
    Ok(if unreadable && code != exit::FAIL { exit::USAGE } else { code })
}

/// The records of a file. They are called after it, and so are errors, which get the whole path instead.
fn records(path: &Path) -> Result<Vec<Record>> {
    let name = path.file_stem().map_or_else(|| path.to_string_lossy(), |stem| stem.to_string_lossy());
    record::read(&name, &read_file(path)?).map_err(|error| {
        let message = error.to_string();
        let message = message.strip_prefix(&format!("{name}: ")).unwrap_or(&message);
        let renamed = Error::usage(message).within(path.display());
        match error.cure() {
            Some(cure) => renamed.hint(cure),
            None => renamed,
        }
    })
}

/// Adds what the flags say to a record that does not say it itself.
fn complete(record: &mut Record, args: &Args, tools: Option<&Tools>) {
    let expectation = &mut record.expectation;
    if let Some(tools) = tools.filter(|_| expectation.tools_unknown) {
        expectation.tools = tools.clone();
        expectation.tools_unknown = false;
    }
    if let Some(choice) = args.tool_choice.as_deref().filter(|_| expectation.tool_choice == ToolChoice::Auto) {
        let word = Value::String(choice.to_owned());
        expectation.tool_choice =
            record::tool_choice(Some(&word)).unwrap_or_else(|_| ToolChoice::Named(choice.to_owned()));
    }
    expectation.extra_markup.extend(args.markup.iter().cloned());
}

/// Corruption fails the gate; what could not be judged leaves it undecided.
fn worse(code: u8, verdict: Verdict) -> u8 {
    match verdict {
        Verdict::Corrupted => exit::FAIL,
        Verdict::Transport | Verdict::Refused | Verdict::Incomplete if code == exit::PASS => exit::INCONCLUSIVE,
        _ => code,
    }
}

fn line(record: &Record, judgement: &Judgement) -> Value {
    let calls: Vec<Value> = judgement
        .calls
        .iter()
        .map(|call| {
            let name = (!call.name.is_empty()).then_some(&call.name);
            let mut shown = json!({ "name": name, "verdict": call.verdict, "class": call.class });
            if let Some(detail) = &call.detail {
                shown["detail"] = json!(detail);
            }
            shown
        })
        .collect();
    json!({
        "id": record.id,
        "verdict": judgement.verdict,
        "class": judgement.class,
        "calls": calls,
        "quirks": judgement.quirks,
        "oracle": record.expectation.oracle(),
        "finish_reason": judgement.finish_reason,
        "detail": judgement.detail,
    })
}

fn read_file(path: &Path) -> Result<Vec<u8>> {
    let read = if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut std::io::stdin().lock(), &mut bytes).map(|_| bytes)
    } else {
        std::fs::read(path)
    };
    read.map_err(|error| Error::usage(format!("cannot read {}: {error}", path.display())))
}

fn read_tools(path: &Path) -> Result<Tools> {
    let bytes = read_file(path)?;
    let within = |error: Error| error.within(path.display());
    let value: Value =
        serde_json::from_slice(&bytes).map_err(|error| within(Error::usage(format!("no JSON: {error}"))))?;
    let values = match value {
        Value::Array(values) => values,
        Value::Object(mut map) => match map.remove("tools") {
            Some(Value::Array(values)) => values,
            _ => return Err(within(Error::usage("no array `tools`"))),
        },
        _ => return Err(within(Error::usage("an array of tools is wanted"))),
    };
    let tools = Tools::new(values);
    tools.check().map_err(within)?;
    Ok(tools)
}
