//! Bad input: a clear error with a cure and exit code 2, never a panic and never a default.

use insta::assert_snapshot;

use crate::context::TestContext;

/// What a command says on stderr when it is used wrongly.
fn complaint(context: &TestContext, arguments: &[&str]) -> String {
    let ran = context.run(arguments);
    assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{}", ran.stderr);
    ran.stderr.trim_end().to_owned()
}

#[test]
fn files_name_their_line_and_the_nearest_key() {
    let context = TestContext::new();
    context.write("typo.toml", "name = \"x\"\nscenario = \"agentic\"\nsesions = 3\n");
    assert_snapshot!(complaint(&context, &["matrix", "typo.toml"]).lines().next().unwrap(), @"error: typo.toml:3: unknown key `sesions`");
    context.write("range.toml", "name = \"x\"\nrounds = [7, 3]\n");
    assert_snapshot!(complaint(&context, &["run", "range.toml"]), @"error: range.toml:2: the range [7, 3] is empty");
    context.write("share.toml", "name = \"x\"\nstream = 1.5\n");
    assert_snapshot!(complaint(&context, &["run", "share.toml"]), @"error: share.toml: `stream` is 1.5, not a share between 0 and 1");
    context.write("twins.toml", "name = \"x\"\nscenario = \"agentic\"\n[[arm]]\nname = \"a\"\n[[arm]]\nname = \"a\"\n");
    assert_snapshot!(complaint(&context, &["matrix", "twins.toml"]), @"error: twins.toml: two arms are called `a`");
    let missing = complaint(&context, &["run", "nothing.toml"]);
    assert!(
        missing.starts_with("error: no such file: nothing.toml\nhint: give a path, or one of: agentic, quick, "),
        "{missing}"
    );
}

#[test]
fn unreadable_files_do_not_hide_the_others() {
    let context = TestContext::new();
    context.write("empty", "");
    context.write("cut.json", r#"{"choices":[{"message":{"content":"<tool_call>"},"finish_reason":"stop"}]}"#);
    let ran = context.run(&["validate", "nowhere", "empty", "cut.json", "--json"]);
    assert_eq!(ran.code, 1, "{}{}", ran.stdout, ran.stderr);
    assert!(ran.stderr.contains("error: cannot read nowhere: "), "{}", ran.stderr);
    assert!(ran.stderr.contains("error: empty: the file is empty"), "{}", ran.stderr);
    assert_eq!(ran.json()["oracle"], "form", "nobody said which tools there were");
}

#[test]
fn variables_are_checked_before_anything_starts() {
    let context = TestContext::new();
    assert_snapshot!(complaint(&context, &["run", "agentic", "--env", "TOOLSTORM_MAX_BATHC=1", "--dry-run"]), @r"
    error: arm `agentic`: unknown variable TOOLSTORM_MAX_BATHC
    hint: did you mean TOOLSTORM_MAX_BATCH? largest batch
    ");
    assert_snapshot!(complaint(&context, &["run", "agentic", "--env", "SGLANG_DSV4_BF16_INDEXK=1"]), @r"
    error: arm `agentic`: unknown variable SGLANG_DSV4_BF16_INDEXK
    hint: did you mean SGLANG_DSV4_BF16_INDEX_K? keep index keys in bf16 instead of fp8
    ");
    let matrix = "name = \"m\"\nscenario = \"agentic\"\n[env]\nTOOLSTORM_DEVICE = \"sim\"\n";
    let bisect = |bad: &str| format!("{matrix}[bisect]\ngood = {{ }}\nbad = {{ {bad} }}\n");
    context.write("bad.toml", &bisect("TOOLSTORM_BUCKETS = \"x\""));
    assert_snapshot!(complaint(&context, &["bisect", "bad.toml"]), @r"
    error: arm `bad`: `x` is no value of TOOLSTORM_BUCKETS
    hint: it takes fine, coarse or sizes: 1,8,64; unset means `fine`
    ");
    context.write("seed.toml", &bisect("TOOLSTORM_SEED = \"2\""));
    assert_snapshot!(complaint(&context, &["bisect", "seed.toml"]), @r"
    error: arm `bad` sets TOOLSTORM_SEED, which every launch sets itself
    hint: leave it out; launch seeds follow from --seed, lockstep from --lockstep
    ");
    let url = "[target]\nkind = \"url\"\nbase_url = \"http://127.0.0.1:9\"\n";
    context.write("url.toml", &bisect("A = \"1\"").replace("[env]\nTOOLSTORM_DEVICE = \"sim\"\n", url));
    let reachless = complaint(&context, &["bisect", "url.toml"]);
    assert!(reachless.starts_with("error: `env` is set, but the target is a url"), "{reachless}");
    let both = complaint(&context, &["run", "agentic", "--env", "A=1", "--base-url", "http://127.0.0.1:9"]);
    assert!(both.contains("cannot be used with"), "{both}");

    // What an arm sets goes over what its server would inherit.
    context.write("m.toml", matrix);
    let dry = |name: &str| context.command(&["matrix", "m.toml", "--dry-run"]).env(name, "rocm").output().unwrap();
    assert_eq!(dry("TOOLSTORM_DEVICE").status.code(), Some(0));
    let inherited = dry("TOOLSTORM_BUCKETS");
    let said = String::from_utf8_lossy(&inherited.stderr);
    assert!(inherited.status.code() == Some(2) && said.contains("which servers inherit: `rocm`"), "{said}");
    assert!(!context.path("results").exists());
}

#[test]
fn flags_that_make_no_sense_are_refused() {
    let context = TestContext::new();
    assert_snapshot!(complaint(&context, &["matrix", "quick", "--partition", "slice:5/4"]), @r"
    error: `slice:5/4` is no partition
    hint: write `slice:1/4`: part 1 of 4
    ");
    assert_snapshot!(complaint(&context, &["matrix", "quick", "--export-json", "a", "--export-csv", "a"]), @r"
    error: two reports are to be written to a
    hint: give every --export-… its own path
    ");
    assert_snapshot!(complaint(&context, &["matrix", "quick", "--warmup", "3s"]), @r"
    error: lockstep counts sessions: --duration, --warmup and --ramp go by time
    hint: leave it out, or give --no-lockstep
    ");
    assert_snapshot!(complaint(&context, &["run", "agentic", "--arrival", "poisson"]), @r"
    error: open arrivals need a rate
    hint: give --rate, in sessions a second
    ");
    assert_snapshot!(complaint(&context, &["bisect", "bisect-overlap", "--jobs", "8"]), @r"
    error: --jobs 8: a bisection runs at most 4 probes side by side
    hint: leave --jobs out, or ask for --jobs 4
    ");
    assert_snapshot!(complaint(&context, &["plan", "gate", "--probe", "--bug-rate", "2"]), @r"
    error: a bug in 2 of the sessions is none
    hint: a rate lies between 0 and 1
    ");
    for (command, flags) in
        [("bisect", ["--export-json", "x"]), ("bisect", ["--until", "decided"]), ("plan", ["--resume", "x"])]
    {
        let said = complaint(&context, &[&[command, "bisect-overlap"], &flags[..]].concat());
        assert!(said.contains(&format!("`{command}` has no use for it")), "{said}");
    }
    let both = complaint(&context, &["plan", "gate", "--probe", "--dry-run"]);
    assert!(both.contains("'--dry-run'"), "{both}");
    assert!(!context.path("results").exists(), "what is refused sends nothing");
    assert_snapshot!(complaint(&context, &["run", "agentic", "--extra-body", "[1]"]), @"error: --extra-body is no JSON object: invalid type: sequence, expected a map at line 1 column 0");
    assert_snapshot!(complaint(&context, &["report", "."]), @r"
    error: . is no result folder: it has no manifest.json
    hint: give a folder that `run` or `matrix` wrote, for example results/…
    ");
    assert_snapshot!(complaint(&context, &["replay", "baseline-0-s001"]), @r"
    error: no evidence is called `baseline-0-s001`
    hint: give a folder below a result's evidence/, or a name that some result in results has
    ");
}

#[test]
fn a_dry_run_sends_nothing_and_prints_the_plan() {
    let context = TestContext::new();
    let ran = context.run(&["matrix", "seed-table", "--dry-run", "--json", "--seed", "a5652dd9"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let plan = ran.json();
    assert_eq!(plan["arms"].as_array().unwrap().len(), 12);
    assert_eq!(plan["arms"][7]["concurrency"], 1);
    assert!(!context.path("results").exists());
}

#[test]
fn git_bisect_gets_its_own_codes() {
    let context = TestContext::new();
    let ran = context.run(&["run", "agentic", "--base-url", "http://127.0.0.1:9", "--git-bisect-codes", "--quiet"]);
    assert_eq!(ran.code, 125, "{}", ran.stderr);
    for command in ["run", "matrix", "bisect", "plan"] {
        let ran = context.run(&[command, "nowhere", "--git-bisect-codes"]);
        assert!(ran.code == 125 && ran.stderr.contains("no such file: nowhere"), "{}", ran.stderr);
    }
    assert_eq!(context.run(&["matrix", "quick", "--sessions", "x", "--git-bisect-codes"]).code, 125);
}
