#!/bin/bash
# Captures graphs of a three-stream decode layer on a GPU, with mistakes and without, and measures which go wrong; then
# `toolstorm hazards --launch` on a server of such graphs.
#
#   OUT=DIR tests/gpu_hazards.sh [BINARY]   on a machine with a GPU, torch (with triton) and cuda-bindings; the last part
#                                           needs the toolstorm binary
#   tests/gpu_hazards.sh check DIR [BINARY] anywhere: unpacks DIR/captures.tar.gz and compares the analyser's verdicts
set -eu
cd "$(dirname "$0")/.."

if [ "${1:-}" = check ]; then
    folder=$2
    binary=${3:-target/debug/toolstorm}
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    tar xzf "$folder/captures.tar.gz" -C "$work"
    python3 tests/hazards/gpu/check.py "$binary" "$work/captures" || failed=1
    echo "--- behind a server's back: seven graphs of one pool, exported by sitecustomize alone"
    "$binary" hazards "$work"/launch/*.json | tail -20 || true
    exit "${failed:-0}"
fi

binary=${1:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/modules" "$work/results/captures" "$work/results/launch"
cp src/hazard/sitecustomize.py "$work/modules/"
cp src/hazard/torch_capture.py "$work/modules/toolstorm_capture.py"
export PYTHONUNBUFFERED=1
exporting() { PYTHONPATH="$work/modules${PYTHONPATH:+:$PYTHONPATH}" "$@"; }

{
    python3 -c 'import torch, cuda.bindings; print(torch.__version__, cuda.bindings.__version__)' || true
    exporting timeout "${LAYER:-170}" python3 tests/hazards/gpu/decode_layer.py "$work/results/captures" ||
        echo "decode_layer failed: $?"
    if [ -n "$binary" ]; then
        timeout "${LAUNCH:-120}" python3 tests/hazards/gpu/launch.py "$binary" "$work/results/server" ||
            echo "launch failed: $?"
    fi
    TOOLSTORM_CAPTURE_DIR="$work/results/launch" exporting timeout "${PLAIN:-60}" python3 tests/hazards/gpu/decode_layer.py \
        --plain || echo "plain failed: $?"
} 2>&1 | tee "$work/results/log.txt"

if [ ! -e "$work/results/captures/expectations.json" ]; then
    # The run was cut short: keep what the log tells of each case.
    python3 - "$work/results" <<'PY'
import json, sys
lines = [line for line in open(f"{sys.argv[1]}/log.txt") if line.startswith("{")]
json.dump({"device": "?", "torch": "?", "cases": [json.loads(l) for l in lines]},
          open(f"{sys.argv[1]}/captures/expectations.json", "w"))
PY
fi
cp "$work/results/log.txt" "$OUT/log.txt"
tar czf "$OUT/captures.tar.gz" -C "$work/results" .
