#!/bin/sh
# Everything that needs a GPU, in one call of less than ten minutes: conformance, the engine's arms over HTTP, load, step
# times, kernel benches, the sanitizers, a manifest. The most valuable steps come first, since the last ones get what time
# is left.
# Usage: [ONLY="STEP..."] [BUDGET=SECONDS] tests/gpu.sh FOLDER [CONFORMANCE [TOOLSTORM]]
#   FOLDER        takes the outputs, as committed under results/
#   CONFORMANCE   a built `cargo test --test conformance` binary; without it, cargo builds one
#   TOOLSTORM     a built toolstorm; without it, cargo builds one where it builds the other
#   ONLY          names of the steps to take, as in `conformance.txt table.txt`; without it, all
#   BUDGET        after so many seconds nothing more is started (550)
# Python with torch, triton and cuda-bindings is needed for the benches only. Clocks are left as they are.
set -u
out=$1
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
suite=${2:-}
server=${3:-}
if [ -z "$suite" ]; then
  suite=$(cd "$here" && cargo test --release --test conformance --no-run 2>&1 | sed -n 's/.*conformance.*(\(.*\)).*/\1/p')
  suite=$here/$suite
  server=$here/target/release/toolstorm
fi
end=$(($(date +%s) + ${BUDGET:-550}))

{
  date -u +%FT%TZ
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit --format=csv
  uname -r
  echo "commit ${COMMIT:-$(git -C "$here" rev-parse HEAD 2>/dev/null)}"
  (cd "$here/kernels" && sha256sum ./*)
} >> "$out/manifest.txt" 2>&1

failed=0
step() {
  name=$1
  limit=$2
  shift 2
  [ -z "${ONLY:-}" ] || case " $ONLY " in *" $name "*) ;; *) return ;; esac
  left=$((end - $(date +%s)))
  if [ "$left" -lt 5 ]; then
    echo "$name: no time left" | tee -a "$out/manifest.txt"
    failed=1
    return
  fi
  [ "$left" -ge "$limit" ] || limit=$left
  echo "== $name"
  began=$(date +%s)
  LIMIT=$limit timeout "$limit" "$@" > "$out/$name" 2>&1
  code=$?
  tail -n "${TAIL:-90}" "$out/$name"
  echo "$name: exit code $code after $(($(date +%s) - began)) s: $*" >> "$out/manifest.txt"
  echo "$name: exit code $code"
  [ "$code" = 0 ] || failed=1
}
test_of() { step "$1" "$2" "$suite" --ignored --nocapture --test-threads 1 --exact "$3"; }
sanitize() {
  command -v compute-sanitizer > /dev/null || return
  step "$1.txt" "$2" "$here/tests/gpu_sanitize.sh" "$1" "$suite"
}
matrix() {
  [ -n "$server" ] || return
  step "$1.txt" "$2" "$server" matrix "$3" --output-dir "$out/$1" --export-json "$out/$1.json" \
    --export-markdown "$out/$1.md" --export-csv "$out/$1.csv"
}

test_of conformance.txt 60 both_backends_compute_the_same
matrix table 150 "$here/scenarios/seed-table.toml"
matrix load 60 "$here/tests/gpu_load.toml"
sanitize initcheck 60
test_of steps.txt 100 engine::steps_cost
PYTHONUNBUFFERED=1 step kernels.txt 100 python3 "$here/benches/gpu/kernels.py" "$out/kernels.json"
test_of hazards.txt 40 engine::captures_have_the_hazards_of_their_traces
PYTHONUNBUFFERED=1 step torch_step.txt 40 python3 "$here/benches/gpu/step.py"
PYTHONUNBUFFERED=1 step gemm.txt 40 python3 "$here/benches/gpu/gemm.py"
if command -v ncu > /dev/null; then
  step ops.csv 25 ncu --clock-control none --cache-control none --csv --metrics gpu__time_duration.sum,launch__grid_size \
    "$suite" --ignored --exact engine::steps_for_a_profiler
  step ops.md 10 python3 "$here/benches/gpu/step_table.py" "${COPY_GB_S:-4276}" "$out/ops.csv"
fi
for tool in memcheck racecheck synccheck; do sanitize "$tool" "${SANITIZE:-45}"; done
if [ -n "$server" ]; then
  step curve.txt 60 "$server" run agentic --sessions 80 --concurrency 2,8,16,32,64,128 --env SGLANG_DSV4_BF16_INDEX_K=1 \
    --env TOOLSTORM_MAX_BATCH=128 --max-corruption 80 --max-upper 1 --output-dir "$out/curve" --export-json "$out/curve.json" --export-markdown "$out/curve.md"
fi
test_of arms.txt "${ARMS:-60}" engine::arms_answer_dictated_calls
nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw --format=csv >> "$out/manifest.txt" 2>&1
exit $failed
