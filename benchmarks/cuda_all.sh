#!/usr/bin/env bash
# Checks and measures everything that wants a GPU, on a machine with one, in under 8 minutes.
#
#   benchmarks/cuda_all.sh                what the card shows, goals and all
#   benchmarks/cuda_all.sh speed kernels  only the parts whose names begin so
#   benchmarks/cuda_all.sh --smoke        tiny shapes on the CPU: do the scripts work?
#
# Needs torch, triton and transformers, and the packages that `deploy/bundle --dev` collects elsewhere (found in
# dist/bundle or dist/bundle.tar.gz, or name their folder in PYTHONPATH). No Ray, no network.
# Results: JSON per part and summary.md in $OUT (default benchmarks/results/cuda), logs in $OUT/logs, and all of it in
# $OUT/results.tar.gz, which is written again after each part. What was measured before an end by force is kept, and so
# are results of parts that this run does not measure.
# Exit status: 1 something failed, 2 a goal was missed, 0 neither. A part that fails or hangs stops no other one.
set -uo pipefail
cd "$(dirname "$0")/.."

smoke='' only=()
for argument in "$@"; do
  case "$argument" in
    --smoke) smoke=1 ;;
    -*) echo "benchmarks/cuda_all.sh: unknown option $argument" >&2; exit 64 ;;
    *) only+=("$argument") ;;
  esac
done

OUT=${OUT:-benchmarks/results/cuda}
TOTAL_S=${TOTAL_S:-465}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}
[ ! -d dist/bundle ] && [ -f dist/bundle.tar.gz ] && tar -xzf dist/bundle.tar.gz -C dist
[ -d dist/bundle ] && PYTHONPATH="$PWD/dist/bundle${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH="${PYTHONPATH:-}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export KVRELAY_CACHE=${KVRELAY_CACHE:-$scratch/cache}
common=(--out "$OUT" --device cuda)
big=(qwen3-8b llama-3.1-8b qwen3-0.6b)
formats=(bf16 fp8)
if [ -n "$smoke" ]; then
  common=(--out "$OUT" --device cpu --smoke)
  big=(tiny) formats=(bf16)
fi
mkdir -p "$OUT/logs"
parts=()

# Imports everything that the parts and the processes that they start need: a package that does not fit the machine's
# own ones fails here, in seconds.
if ! "$PYTHON" -m benchmarks.cuda.preflight; then
  echo "benchmarks/cuda_all.sh: the packages do not fit together; see above" >&2
  exit 1
fi

archive() { # what there is so far, as one file: complete or the one before
  # Written elsewhere: tar takes a folder in which a file appears for one that changes, and fails.
  tar -czf "$scratch/results" -C "$OUT" --exclude=results.tar.gz --exclude=.results . \
    && mv "$scratch/results" "$OUT/.results" && mv "$OUT/.results" "$OUT/results.tar.gz"
}

part() { # part NAME BUDGET_S MODULE ARGUMENTS...: NAME is its result's; no case starts after BUDGET_S
  local name=$1 budget_s=$2 module=$3 left_s=$((TOTAL_S - SECONDS)) wanted status
  if [ ${#only[@]} -gt 0 ]; then
    wanted=''
    for prefix in "${only[@]}"; do [[ $name == "$prefix"* ]] && wanted=1; done
    [ -n "$wanted" ] || return 0
  fi
  parts+=("$name")
  rm -f "$OUT/$name.json"
  if [ "$left_s" -lt 10 ]; then
    echo "==> $name: no time left"
    return
  fi
  # A smoke run asks whether the parts work, not how long they take.
  [ -n "$smoke" ] || [ "$budget_s" -gt "$left_s" ] && budget_s=$left_s
  echo "==> $name ($SECONDS s so far)"
  # What has begun may end: a part is killed only when it hangs.
  timeout --kill-after=20 $((budget_s + 20)) "$PYTHON" -m "benchmarks.cuda.$module" "${common[@]}" \
    --budget-s "$budget_s" "${@:4}" 2>"$OUT/logs/$name.log"
  status=$?
  if [ "$status" -ne 0 ]; then
    echo "$name: exit status $status; the end of $OUT/logs/$name.log:"
    tail -n 15 "$OUT/logs/$name.log"
  fi
  archive
}

# Correctness comes first. The budgets add up to 460 s.
part card 20 card
part handoff 30 handoff
[ -n "$smoke" ] || part checks-tests 100 checks --only tests # a smoke run is itself one of the tests
part checks-oracle 30 checks --only oracle
for model in "${big[@]}"; do part "speed-$model-bf16" 30 speed --model "$model" --format bf16; done
part kernels 30 kernels
part service 40 service
for format in "${formats[@]:1}"; do
  for model in "${big[@]}"; do part "speed-$model-$format" 20 speed --model "$model" --format "$format"; done
done
part throughput 60 throughput

echo "==> summary ($SECONDS s)"
"$PYTHON" -m benchmarks.cuda.summary --out "$OUT" --expect "${parts[@]}"
status=$?
archive
exit "$status"
