#!/bin/sh
# The conformance suite under one tool of compute-sanitizer, each case once, in shards side by side.
# Usage: [LIMIT=SECONDS] tests/gpu_sanitize.sh TOOL CONFORMANCE
# A shard that has not ended shortly before the limit is stopped; what it had checked by then is in its output.
# Failed calls of the driver are not reported: the engine checks each, and asks for kernels that a device may not have.
set -u
shards=6
limit=$((${LIMIT:-600} - 4))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for shard in $(seq 0 $((shards - 1))); do
  (
    CONFORMANCE_REPETITIONS=1 CONFORMANCE_SHARD=$shard/$shards timeout "$limit" compute-sanitizer --tool "$1" \
      --report-api-errors no --error-exitcode 9 "$2" --ignored --nocapture --test-threads 1 --exact both_backends_compute_the_same
    echo "shard $shard of $shards: exit code $?"
  ) > "$work/$shard" 2>&1 &
done
wait
cat "$work"/*
[ "$(grep -c '^shard .*: exit code 0$' "$work"/* | grep -c ':1$')" = "$shards" ]
