#!/usr/bin/env bash
# Has clients that nobody here wrote talk to the server: the official `openai` package, in a virtual environment.
# Builds the binary where there is none; TOOLSTORM names another one. Needs python3 with venv and a package index.
set -euo pipefail
cd "$(dirname "$0")/../.."

binary="${TOOLSTORM:-}"
if [ -z "$binary" ]; then
    cargo build --locked
    binary="${CARGO_TARGET_DIR:-target}/debug/toolstorm"
fi

environment="${CARGO_TARGET_DIR:-target}/clients-venv"
requirements=tests/clients/requirements.txt
if ! cmp -s "$requirements" "$environment/requirements.txt"; then
    rm -rf "$environment"
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check -r "$requirements"
    cp "$requirements" "$environment/requirements.txt"
fi
exec "$environment/bin/python" tests/clients/openai_client.py "$binary"
