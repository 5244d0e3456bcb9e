//! What `--help` shows below the options: examples, each of which parses, and what the exit code says.

macro_rules! examples {
    ($($name:ident: $codes:literal, [$($does:literal => $line:literal),+ $(,)?];)+) => {
        $(pub(super) const $name: &str = concat!(
            "Examples:\n", $("  ", $line, "\n      ", $does, "\n",)+ "\nExit code: ", $codes
        );)+
        #[cfg(test)]
        pub(super) const LINES: &[&str] = &[$($($line,)+)+];
    };
}

examples! {
    RUN: "0 passed, 1 corrupted, 2 bad usage or no server, 3 inconclusive or interrupted", [
        "one configuration of the built-in engine, the same every time" =>
            "toolstorm run agentic --env SGLANG_DSV4_BF16_INDEX_K=1 --concurrency 64 --lockstep",
        "any OpenAI-compatible server, at rising concurrency" =>
            "toolstorm run agentic --base-url http://host:8000/v1 --model NAME --concurrency 8,32,128",
        "go on with a run that was interrupted" =>
            "toolstorm run agentic --resume results/20261130T085730Z-agentic-93dec7",
    ];
    MATRIX: "0 every arm met what is expected of it, 1 one did not, 2 bad usage or no server, 3 inconclusive or interrupted", [
        "a fault, seen and cured in half a minute" => "toolstorm matrix quick",
        "what would run, without running it" => "toolstorm matrix scenarios/sglang.toml --dry-run",
        "a nightly run with its reports" =>
            "toolstorm matrix nightly.toml --export-html report.html --export-junit report.xml",
        "stop each arm as soon as it is decided" => "toolstorm matrix quick --until decided",
    ];
    GATE: "0 passed, 1 failed, 2 bad usage, 3 inconclusive", [
        "no corrupted session in an arm, at most 1 % at the bound" => "toolstorm gate results/RUN --max-upper 0.01",
        "as a step of `git bisect run`" => "toolstorm gate results/RUN --git-bisect-codes",
    ];
    COMPARE: "0 compared, 2 bad usage", [
        "two runs of the same sessions" => "toolstorm compare results/BEFORE results/AFTER",
        "two arms of one run" => "toolstorm compare results/RUN:baseline results/RUN:overlap-off",
    ];
    BISECT: "0 found, 2 bad usage or an end that cannot run, 3 undecided", [
        "which variable breaks it" => "toolstorm bisect scenarios/bisect-overlap.toml",
        "with a limit to what it may cost" => "toolstorm bisect scenarios/bisect-overlap.toml --max-sessions 2000",
    ];
    PLAN: "0 planned, 2 bad usage", [
        "how long it takes, from a short run of every arm" => "toolstorm plan quick --probe",
        "how many sessions show a bug of 1 %" => "toolstorm plan quick --bug-rate 0.01",
    ];
    HAZARDS: "0 none, 1 hazards, 2 bad usage or nothing captured, 3 not every graph could be judged", [
        "the built-in engine as its environment configures it" => "toolstorm hazards",
        "every arm of a matrix" => "toolstorm hazards --matrix quick",
        "captures of a PyTorch program, with a page to look at" =>
            "toolstorm hazards --capture out.json --export-html hazards.html",
        "the graphs of a server, without touching its code" =>
            "toolstorm hazards --launch --ready http://127.0.0.1:8000/health -- python -m my_server --port 8000",
        "the exporter, to import it yourself" => "toolstorm hazards exporter",
    ];
    SERVE: "0 stopped, 1 a failed self-test, 2 bad usage", [
        "the engine as a server" => "toolstorm serve --port 8000",
        "its variables, as a page" => "toolstorm serve --list-variables",
    ];
    SELFCHECK: "0 every planted fault found and nothing else, 1 otherwise", [
        "as many sessions at once as the real run has" => "toolstorm selfcheck --concurrency 512 --sessions 5000",
    ];
    REPLAY: "0 no corruption, 1 corruption, 2 bad usage", [
        "judge the recorded bytes again" => "toolstorm replay results/RUN/evidence/SESSION --recorded",
        "the whole launch again: the same bytes" => "toolstorm replay results/RUN/evidence/SESSION --load",
        "what the failing session asked, ten times, of another server" =>
            "toolstorm replay results/RUN/evidence/SESSION --base-url http://host:8000/v1 --times 10",
    ];
    VALIDATE: "0 clean, 1 corrupted, 2 unreadable, 3 cut off or refused", [
        "one response against its tools" => "toolstorm validate response.json --tools tools.json",
        "a recorded event stream" => "toolstorm validate round-03-response.bin --tools tools.json",
        "an event stream from a pipe" => "toolstorm validate - --tool-choice required",
    ];
    REPORT: "0 written, 2 bad usage", [
        "the page of a finished run" => "toolstorm report results/RUN --export-html report.html",
    ];
    HISTORY: "0 shown, 2 bad usage", [
        "has a nightly rate drifted?" => "toolstorm history results --name nightly",
    ];
    MERGE: "0 joined, 2 bad usage", [
        "four machines, one run" => "toolstorm merge part-1 part-2 part-3 part-4",
    ];
}
