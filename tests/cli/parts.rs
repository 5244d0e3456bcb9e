//! Runs in parts, and the parts joined.

use crate::{
    context::{TestContext, lines},
    scripted::Scripted,
};

#[test]
fn joined_partitions_are_the_whole_run() {
    let (context, server) = (TestContext::new(), Scripted::faithful());
    let mut names = Vec::new();
    for part in ["slice:1/2", "slice:2/2"] {
        let ran = context.load(&server.url, &["--partition", part, "--max-upper", "0.9"]);
        let summary = ran.json();
        assert_eq!(summary["arms"][0]["sessions_judged"].as_u64(), Some(3), "{}", ran.stderr);
        names.push(summary["result_dir"].as_str().unwrap().to_owned());
    }
    let ran = context.run(&["merge", &names[0], &names[1], "--json", "--output-dir", "joined"]);
    let joined = ran.json();
    assert_eq!((ran.code, &joined["verdict"]), (0, &"pass".into()), "{joined}");
    assert_eq!(joined["arms"][0]["sessions_judged"].as_u64(), Some(6), "{}", ran.stderr);
    let calls = lines(&context.path(joined["result_dir"].as_str().unwrap()).join("calls.jsonl"));
    let sessions: Vec<_> = calls.iter().map(|call| call["session"].as_u64().unwrap()).collect();
    assert_eq!(sessions, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);

    let half = context.run(&["merge", &names[1], "--json", "--output-dir", "half"]);
    assert!(half.stderr.contains("slice:1/2 is not among"), "{}", half.stderr);
    let summary = half.json();
    assert_eq!((half.code, &summary["arms"][0]["verdict"]), (3, &"inconclusive".into()), "{summary}");
    assert!(summary["reason"].as_str().unwrap().contains("3 of 6 sessions were not driven"), "{summary}");
    // What is missing can be driven after all.
    let name = summary["result_dir"].as_str().unwrap();
    let whole = context.load(&server.url, &["--max-upper", "0.9", "--resume", name]);
    assert_eq!((whole.code, &whole.json()["arms"][0]["sessions_judged"]), (0, &6.into()), "{}", whole.stderr);

    let twice = context.run(&["merge", &names[0], &names[0]]);
    assert_eq!(twice.code, 2);
    assert!(twice.stderr.contains("given twice"), "{}", twice.stderr);
}
