#!/usr/bin/env bash
# Has the `command` target start a server that nobody here wrote: `fakellm` from PyPI, in a virtual environment. It
# answers with prose where a call is dictated, so every session must be judged, and judged corrupted.
# Builds the binary where there is none; TOOLSTORM names another one. Needs python3 with venv and a package index.
set -euo pipefail
cd "$(dirname "$0")/../.."

binary="${TOOLSTORM:-}"
if [ -z "$binary" ]; then
    cargo build --locked
    binary="${CARGO_TARGET_DIR:-target}/debug/toolstorm"
fi

environment="$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")/mock-server-venv"
if [ ! -x "$environment/bin/fakellm" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check fakellm==0.3.5
fi

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
(cd "$folder" && "$environment/bin/fakellm" init >/dev/null)
cat >"$folder/mock.toml" <<TOML
name = "mock"
scenario = "agentic"
sessions = 8
concurrency = 4
rounds = [1, 1]
[target]
kind = "command"
model = "gpt-4o-mini"
command = ["$environment/bin/fakellm", "serve", "--port", "{port}", "--config", "$folder/fakellm.yaml"]
ready = { path = "/openapi.json", timeout = "1m" }
[[arm]]
name = "mock"
expect = "corrupt"
TOML
"$binary" matrix "$folder/mock.toml" --output-dir "$folder/results" --json >"$folder/summary.json"
python3 - "$folder/summary.json" <<'PYTHON'
import json, sys
arm = json.load(open(sys.argv[1]))["arms"][0]
assert arm["launches_failed"] == 0 and arm["sessions_judged"] == 8, arm
assert arm["sessions_corrupted"] == 8, arm["classes"]
print("mock server:", arm["sessions_judged"], "sessions judged,", arm["classes"])
PYTHON
