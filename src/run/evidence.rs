//! What a person needs to believe a failure: the exact bytes, the dictated text, where they part, who else was there.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use similar::{ChangeTag, TextDiff};

use super::why::Why;
use crate::{
    clock::Clock,
    drive::Exchange,
    error::{Error, Result},
    validate::{CallJudgement, Verdict, parity::Form},
};

/// The folder of a session's evidence inside the result folder: `evidence/baseline-0-s017`.
pub(super) fn folder(result: &Path, arm: &str, launch: u32, session: u64) -> PathBuf {
    result.join("evidence").join(format!("{}-{launch}-s{session:03}", file_name(arm)))
}

/// Moves what lies in a launch's evidence of sessions that are `void` out of the way, and loses none of it.
pub(super) fn set_aside(result: &Path, arm: &str, launch: u32, void: impl Fn(u64) -> bool, clock: Clock) -> Result<()> {
    let evidence = result.join("evidence");
    if !evidence.is_dir() {
        return Ok(());
    }
    let failed = |error: std::io::Error| Error::usage(format!("{}: {error}", evidence.display()));
    let stamp = clock.timestamp().strftime("evidence-before-%Y%m%dT%H%M%SZ").to_string();
    let prefix = format!("{}-{launch}-s", file_name(arm));
    for entry in std::fs::read_dir(&evidence).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let session = name.to_str().and_then(|name| name.strip_prefix(&prefix)?.parse().ok());
        if session.is_some_and(&void) {
            // Another resume may have begun in this second.
            let asides = std::iter::once(stamp.clone()).chain((2..).map(|number| format!("{stamp}-{number}")));
            let Some(aside) = asides.map(|aside| result.join(aside)).find(|aside| !aside.join(&name).exists()) else {
                continue;
            };
            std::fs::create_dir_all(&aside).map_err(failed)?;
            std::fs::rename(evidence.join(&name), aside.join(&name)).map_err(failed)?;
        }
    }
    Ok(())
}

/// `name` as a file name.
pub(super) fn file_name(name: &str) -> String {
    let plain = |letter: char| if letter.is_ascii_alphanumeric() || "-_.=@".contains(letter) { letter } else { '_' };
    name.chars().map(plain).collect()
}

/// Writes the evidence of one exchange; `form` is given where it asked a turn again in another form.
pub(super) fn write(
    result: &Path,
    arm: &str,
    launch: u32,
    lockstep: bool,
    exchange: &Exchange,
    form: Option<Form>,
    why: Option<&Why>,
) -> Result<()> {
    let folder = folder(result, arm, launch, exchange.session);
    let mark = form.map_or_else(String::new, |form| format!("{}-", form.as_str()));
    let stem = |suffix: &str| folder.join(format!("round-{:02}-{mark}{suffix}", exchange.turn.round));
    let put = |path: PathBuf, bytes: &[u8]| {
        std::fs::write(&path, bytes).map_err(|error| Error::usage(format!("{}: {error}", path.display())))
    };
    std::fs::create_dir_all(&folder).map_err(|error| Error::usage(format!("{}: {error}", folder.display())))?;
    put(stem("request.json"), &exchange.turn.body)?;
    put(stem("response.bin"), &exchange.reply.body)?;
    // Raw text is searched, not judged: there is no verdict that a replay could compare with.
    if form == Some(Form::Raw) {
        return Ok(());
    }
    let lines = why.map_or(&[][..], |why| &why.lines);
    let mut text = diff(exchange);
    if !lines.is_empty() {
        let _ = write!(text, "\nwhy, by the race log\n  {}\n", lines.join("\n  "));
    }
    put(stem("diff.txt"), text.as_bytes())?;
    if let Some(log) = why.and_then(|why| why.log.as_ref()) {
        put(stem("races.json"), format!("{log:#}\n").as_bytes())?;
    }
    // A race needs its neighbours: under lockstep the whole launch comes again, byte for byte.
    let load = lockstep && form.is_none() && exchange.judgement.verdict == Verdict::Corrupted;
    let replay = format!("toolstorm replay {}{}", folder.display(), if load { " --load" } else { "" });
    let about = about(&replay, arm, launch, exchange, form, lines);
    put(stem("verdict.json"), format!("{about:#}\n").as_bytes())
}

fn about(replay: &str, arm: &str, launch: u32, exchange: &Exchange, form: Option<Form>, why: &[String]) -> Value {
    let (turn, reply, judgement) = (&exchange.turn, &exchange.reply, &exchange.judgement);
    let dictated = turn.expectation.calls.iter().flatten();
    let dictated: Vec<_> = dictated.map(|call| json!({"name": call.name, "arguments": call.arguments})).collect();
    let calls: Vec<_> = judgement.calls.iter().map(call).collect();
    json!({
        "arm": arm,
        "launch": launch,
        "session": exchange.session,
        "round": turn.round,
        "verdict": judgement.verdict,
        "class": judgement.class,
        "detail": judgement.detail,
        "after_corruption": exchange.after_corruption,
        "stream": turn.stream,
        "parity": form,
        "http_status": reply.status,
        "content_type": reply.content_type,
        "ending": format!("{:?}", reply.ending).to_lowercase(),
        "transport": reply.note,
        "nonce": exchange.nonce,
        "dictated": dictated,
        "calls": calls,
        "content": judgement.content,
        "finish_reason": judgement.finish_reason,
        "quirks": judgement.quirks,
        "neighbours": exchange.neighbours,
        "ttft_ms": exchange.timing.ttft_ms(),
        "e2el_ms": exchange.timing.e2el_ms(),
        "why": why,
        "replay": replay,
    })
}

fn call(call: &CallJudgement) -> Value {
    json!({"id": call.id, "name": call.name, "arguments": call.arguments, "verdict": call.verdict,
        "class": call.class, "detail": call.detail})
}

/// Dictated and came, one above the other, with the place where they part.
fn diff(exchange: &Exchange) -> String {
    let mut text = String::new();
    let judgement = &exchange.judgement;
    let _ = writeln!(text, "{}: {}", judgement.class, judgement.detail.as_deref().unwrap_or("no detail"));
    let dictated: Vec<_> = exchange.turn.expectation.calls.iter().flatten().collect();
    for place in 0..dictated.len().max(judgement.calls.len()) {
        let came = judgement.calls.get(place);
        let wanted = dictated.get(place).map_or_else(String::new, |call| {
            let spelt = exchange.turn.dictated.get(place).map(String::as_str);
            format!(
                "{} {}",
                call.name,
                nearer(spelt, call.arguments.to_string(), came.map_or("", |came| &came.arguments))
            )
        });
        let came_text = came.map_or_else(String::new, |call| format!("{} {}", call.name, call.arguments));
        let _ = writeln!(text, "\ncall {place}: {}", came.map_or("absent", |call| call.class.as_str()));
        if let Some(detail) = came.and_then(|call| call.detail.as_deref()) {
            let _ = writeln!(text, "          {detail}");
        }
        part(&mut text, &wanted, &came_text);
    }
    if !judgement.content.is_empty() {
        let _ = writeln!(text, "\ncontent   {}", visible(&judgement.content));
    }
    text
}

/// The dictated arguments in the spelling that `came` follows longer: as they were dictated, or without blanks, since a
/// server may write the same value anew.
fn nearer(spelt: Option<&str>, compact: String, came: &str) -> String {
    let shared = |text: &str| text.bytes().zip(came.bytes()).take_while(|(a, b)| a == b).count();
    match spelt {
        Some(spelt) if shared(spelt) >= shared(&compact) => spelt.to_owned(),
        _ => compact,
    }
}

/// Characters of a text that are compared one by one.
const WINDOW: usize = 2000;

/// Both texts, a mark under the first difference, and the differences in brackets.
fn part(text: &mut String, wanted: &str, came: &str) {
    let (wanted, came) = (visible(wanted), visible(came));
    let _ = writeln!(text, "dictated  {wanted}\ncame      {came}");
    if wanted == came {
        return;
    }
    let shared = wanted.chars().zip(came.chars()).take_while(|(a, b)| a == b).count();
    let _ = writeln!(text, "          {}^ they part here, after {shared} characters", " ".repeat(shared));
    let _ = write!(text, "changes   ");
    // A difference costs the product of the lengths: of long texts only where they part is compared.
    let window = |text: &str| text.chars().skip(shared.saturating_sub(WINDOW / 8)).take(WINDOW).collect::<String>();
    let (wanted, came) = (window(&wanted), window(&came));
    let mut open = ChangeTag::Equal;
    for change in TextDiff::from_chars(wanted.as_str(), came.as_str()).iter_all_changes() {
        if change.tag() != open {
            text.push_str(closing(open));
            open = change.tag();
            text.push_str(match open {
                ChangeTag::Delete => "[-",
                ChangeTag::Insert => "{+",
                ChangeTag::Equal => "",
            });
        }
        text.push_str(change.value());
    }
    text.push_str(closing(open));
    text.push('\n');
}

fn closing(tag: ChangeTag) -> &'static str {
    match tag {
        ChangeTag::Delete => "-]",
        ChangeTag::Insert => "+}",
        ChangeTag::Equal => "",
    }
}

/// Control characters as escapes, so that each text stays on its line.
fn visible(text: &str) -> String {
    text.chars()
        .flat_map(|letter| {
            if letter.is_control() { letter.escape_debug().to_string() } else { letter.to_string() }
                .chars()
                .collect::<Vec<_>>()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_aside_twice_in_a_second_lies_in_two_places() {
        let result = tempfile::tempdir().unwrap();
        let at = |session: u64| folder(result.path(), "a", 1, session);
        let clock = Clock::start();
        for _ in 0..2 {
            for session in [3, 4] {
                std::fs::create_dir_all(at(session)).unwrap();
                std::fs::write(at(session).join("verdict.json"), "{}").unwrap();
            }
            set_aside(result.path(), "a", 1, |session| session == 3, clock).unwrap();
            assert!(!at(3).exists() && at(4).exists());
        }
        let places = std::fs::read_dir(result.path()).unwrap().map(|entry| entry.unwrap().path());
        let kept = places.filter(|place| place.join("a-1-s003/verdict.json").exists()).count();
        assert_eq!(kept, 2);
    }

    #[test]
    fn the_dictated_text_is_spelt_as_the_one_that_came() {
        let (spelt, compact) = ("{\"ref\": \"abc\"}", "{\"ref\":\"abc\"}");
        assert_eq!(nearer(Some(spelt), compact.into(), "{\"ref\": \"aXc\"}"), spelt);
        assert_eq!(nearer(Some(spelt), compact.into(), "{\"ref\":\"aXc\"}"), compact);
        assert_eq!(nearer(None, compact.into(), ""), compact);
    }

    #[test]
    fn the_mark_stands_under_the_first_difference() {
        let mut text = String::new();
        part(&mut text, "order_lookup {\"ref\": \"abc\"}", "order_lookup {\"ref\": \"aXc\"}");
        let lines: Vec<_> = text.lines().collect();
        let mark = lines[2].find('^').unwrap();
        assert_eq!((&lines[0][mark..=mark], &lines[1][mark..=mark]), ("b", "X"));
        assert!(lines[3].contains("a[-b-]{+X+}c"), "{}", lines[3]);
    }

    #[test]
    fn long_texts_are_compared_where_they_part() {
        let mut text = String::new();
        part(
            &mut text,
            &format!("{}b{}", "x".repeat(300_000), "y".repeat(40)),
            &format!("{}a{}", "x".repeat(300_000), "z".repeat(900_000)),
        );
        let changes = text.lines().last().unwrap();
        assert!(changes.starts_with("changes   x") && changes.contains("x[-b"), "{changes}");
        assert!(changes.len() < 2 * WINDOW);
    }

    #[test]
    fn arm_names_become_plain_file_names() {
        assert_eq!(file_name("a/b@concurrency=1,x y"), "a_b@concurrency=1_x_y");
    }
}
