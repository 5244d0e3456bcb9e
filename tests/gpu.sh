#!/bin/sh
# Everything that needs a GPU, in one call: conformance, the engine's arms, step times, kernel benches, a manifest.
# Usage: tests/gpu.sh FOLDER [CONFORMANCE [TOOLSTORM]]
#   FOLDER        takes the outputs, as committed under results/
#   CONFORMANCE   a built `cargo test --test conformance` binary; without it, cargo builds one
#   TOOLSTORM     a built toolstorm; without it, cargo builds one where it builds the other
# Python with torch, triton and cuda-bindings is needed for the benches only. Clocks are left as they are.
set -u
out=$1
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
suite=${2:-}
server=${3:-}
if [ -z "$suite" ]; then
  suite=$(cd "$here" && cargo test --test conformance --no-run 2>&1 | sed -n 's/.*conformance.*(\(.*\)).*/\1/p')
  suite=$here/$suite
  (cd "$here" && cargo build --release)
  server=$here/target/release/toolstorm
fi

{
  date -u +%FT%TZ
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit --format=csv
  uname -r
  echo "commit ${COMMIT:-$(git -C "$here" rev-parse HEAD 2>/dev/null)}"
  (cd "$here/kernels" && sha256sum ./*)
} > "$out/manifest.txt" 2>&1

failed=0
step() {
  name=$1
  limit=$2
  shift 2
  echo "== $name"
  echo "$name: $*" >> "$out/manifest.txt"
  timeout "$limit" "$@" > "$out/$name" 2>&1
  code=$?
  tail -n 90 "$out/$name"
  echo "$name: exit code $code" | tee -a "$out/manifest.txt"
  [ "$code" = 0 ] || failed=1
}
test_of() { step "$1" "$2" "$suite" --ignored --nocapture --test-threads 1 --exact "$3"; }

test_of conformance.txt 60 both_backends_compute_the_same
test_of hazards.txt 40 engine::captures_have_the_hazards_of_their_traces
test_of steps.txt 100 engine::steps_cost
PYTHONUNBUFFERED=1 step kernels.txt 100 python3 "$here/benches/gpu/kernels.py" "$out/kernels.json" 10,20,2 8,16,4
if [ -n "$server" ]; then
  # The canary reads every page from the host twice a step: minutes on a GPU. Its arm stays out of the table here.
  awk 'BEGIN { RS = ""; ORS = "\n\n" } !/name = "canary"/' "$here/scenarios/seed-table.toml" > "$out/table.toml"
  step table.txt 150 "$server" matrix "$out/table.toml" --output-dir "$out/table" --export-json "$out/table.json" \
    --export-markdown "$out/table.md" --export-csv "$out/table.csv"
  step curve.txt 90 "$server" run agentic --sessions 80 --concurrency 2,8,16,32,64,128 --env SGLANG_DSV4_BF16_INDEX_K=1 \
    --env TOOLSTORM_MAX_BATCH=128 --output-dir "$out/curve" --export-json "$out/curve.json" --export-markdown "$out/curve.md"
fi
PYTHONUNBUFFERED=1 step torch_step.txt 40 python3 "$here/benches/gpu/step.py"
test_of arms.txt "${ARMS:-90}" engine::arms_answer_dictated_calls
# Each tool runs until its limit; what it had checked by then is in its output.
for tool in memcheck racecheck initcheck synccheck; do
  command -v compute-sanitizer > /dev/null || break
  step "$tool.txt" "${SANITIZE:-60}" compute-sanitizer --tool "$tool" "$suite" --ignored --nocapture --test-threads 1 \
    --exact both_backends_compute_the_same
done
nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv >> "$out/manifest.txt" 2>&1
exit $failed
