//! The files of a result, and the commands that read them.

use std::time::Duration;

use crate::{
    context::{TestContext, lines, read},
    scripted::{Act, Scripted},
};

fn damaged(context: &TestContext) {
    let server = Scripted::start(|request| match request.number {
        2 => Act::Damage(|text| text.replacen("\"ref\": \"0-", "\"ref\": \"7-", 1)),
        _ => Act::Answer(Duration::ZERO),
    });
    let ran = context.load(&server.url, &["--concurrency", "1", "--export-csv", "copy/arms.csv"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
}

#[test]
fn every_file_is_there_and_says_the_same() {
    let context = TestContext::new();
    damaged(&context);
    let result = context.result();
    let file = |name: &str| read(&result.join(name));
    let calls = lines(&result.join("calls.jsonl"));
    assert_eq!(calls.iter().filter(|call| call["verdict"] == "corrupted").count(), 1);
    assert!(calls.iter().all(|call| call["nonce"].as_str().is_some_and(|nonce| nonce.len() == 8)));
    let junit = file("junit.xml");
    assert!(junit.contains("failures=\"1\"") && junit.contains("1 of 6 corrupted"), "{junit}");
    assert!(file("summary.md").contains("| agentic | 1 | 6 | 1 |"), "{}", file("summary.md"));
    assert!(file("report.html").contains("value_altered"));
    assert!(file("latency.hlog").contains("Tag=agentic.0.e2el"));
    assert_eq!(file("summary.csv"), read(&context.path("copy/arms.csv")));
    let mut table = csv::Reader::from_reader(file("summary.csv").as_bytes().to_vec().leak() as &[u8]);
    let headers = table.headers().unwrap().clone();
    let row = table.records().next().unwrap().unwrap();
    let cell = |name: &str| &row[headers.iter().position(|header| header == name).unwrap()];
    assert_eq!((cell("sessions_corrupted"), cell("calls_corrupted"), cell("verdict")), ("1", "1", "fail"));
}

#[test]
fn the_summary_meets_its_schema() {
    let context = TestContext::new();
    damaged(&context);
    let schema = serde_json::from_str(include_str!("../../docs/schemas/summary.schema.json")).unwrap();
    let mut summary: serde_json::Value = serde_json::from_str(&read(&context.result().join("summary.json"))).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let complaints: Vec<_> = validator.iter_errors(&summary).map(|error| error.to_string()).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    summary["arms"][0]["sessions_corupted"] = 1.into();
    assert!(!validator.is_valid(&summary));
}

#[test]
fn evidence_shows_where_the_texts_part_and_replays_offline() {
    let context = TestContext::new();
    damaged(&context);
    let evidence = std::fs::read_dir(context.result().join("evidence")).unwrap().next().unwrap().unwrap().path();
    let diff = read(&evidence.join("round-00-diff.txt"));
    assert!(diff.contains("[-0-]{+7+}") && diff.contains("they part here"), "{diff}");
    let name = evidence.file_name().unwrap().to_str().unwrap();
    let ran = context.run(&["replay", name, "--recorded"]);
    assert_eq!(ran.code, 1, "{}", ran.stderr);
    assert!(ran.stdout.contains("value_altered"), "{}", ran.stdout);

    let healthy = Scripted::faithful();
    let again = context.run(&["replay", name, "--base-url", &healthy.url]);
    assert_eq!(again.code, 0, "{}{}", again.stdout, again.stderr);
    let sent = healthy.seen.lock().unwrap();
    let recorded: serde_json::Value = serde_json::from_str(&read(&evidence.join("round-00-request.json"))).unwrap();
    assert_eq!(sent[0].body, recorded);
    drop(sent);

    // From inside, where the path as typed has no parents.
    let mut inside = context.command(&["replay", ".", "--recorded"]);
    assert_eq!(inside.current_dir(&evidence).output().unwrap().status.code(), Some(1));
    std::fs::write(evidence.join("round-00-request.json"), "[1]").unwrap();
    let broken = context.run(&["replay", name, "--base-url", &healthy.url]);
    assert!(broken.code == 2 && broken.stderr.contains("no JSON object"), "{}", broken.stderr);
}

#[test]
fn a_manifest_that_nobody_wrote_is_refused() {
    let context = TestContext::new();
    damaged(&context);
    let manifest = context.result().join("manifest.json");
    let name = context.result().display().to_string();
    let sound = read(&manifest);
    for (from, to, said) in [
        ("\"toolstorm-manifest/1\"", "\"toolstorm-manifest/9\"", "its schema is"),
        ("\"partition\": null", "\"partition\": { \"part\": 0, \"of\": 0 }", "is no partition"),
    ] {
        assert!(sound.contains(from), "{sound}");
        std::fs::write(&manifest, sound.replace(from, to)).unwrap();
        for command in ["report", "merge"] {
            let ran = context.run(&[command, &name]);
            assert!(ran.code == 2 && ran.stderr.contains(said), "{command}: {}", ran.stderr);
        }
    }
}

#[test]
fn a_report_is_a_function_of_the_journal() {
    let context = TestContext::new();
    damaged(&context);
    let result = context.result();
    let names =
        ["summary.json", "summary.csv", "summary.md", "junit.xml", "report.html", "latency.hlog", "calls.jsonl"];
    let before = names.map(|name| read(&result.join(name)));
    for name in names {
        std::fs::remove_file(result.join(name)).unwrap();
    }
    let ran = context.run(&["report", result.to_str().unwrap()]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for (name, before) in names.iter().zip(before) {
        let after = read(&result.join(name)).replace(result.to_str().unwrap(), "results");
        let path = result.strip_prefix(context.path("")).unwrap().to_str().unwrap();
        assert_eq!(after, before.replace(path, "results"), "{name}");
    }
    assert!(ran.stdout.contains("1 value_altered"), "{}", ran.stdout);
    assert_eq!(context.run(&["gate", result.to_str().unwrap()]).code, 1);
}

#[test]
fn history_lists_past_runs_by_arm() {
    let context = TestContext::new();
    damaged(&context);
    damaged(&context);
    std::fs::create_dir(context.path("results/broken")).unwrap();
    context.write("results/broken/manifest.json", "{");
    context.write("results/broken/summary.json", "{");
    let ran = context.run(&["history", "--json"]);
    assert!(ran.stderr.contains("results/broken is left out"), "{}", ran.stderr);
    let trends = ran.json();
    let points = trends["trends"][0]["points"].as_array().unwrap();
    assert_eq!(points.len(), 2);
    assert!(points.iter().all(|point| point["sessions_corrupted"] == 1));
    assert_eq!(trends["trends"][0]["drifts"], false);
}

#[test]
fn a_page_that_leaves_failures_out_says_so() {
    let context = TestContext::new();
    let altered = || Act::Damage(|text| text.replacen("\"ref\": \"0-", "\"ref\": \"7-", 1));
    let server = Scripted::start(move |_| altered());
    let arguments = ["--concurrency", "8", "--sessions", "61", "--rounds", "1"];
    context.run(&[&["run", "agentic", "--base-url", &server.url, "--quiet"], &arguments[..]].concat());
    let page = read(&context.result().join("report.html"));
    assert!(page.contains("The first 60 of 61 failures"), "{page}");
    assert_eq!(page.matches("<span class=\"dim\">dictated </span>").count(), 60);
    // A page that holds all of them says nothing.
    let context = TestContext::new();
    damaged(&context);
    assert!(!read(&context.result().join("report.html")).contains("The first"));
}
