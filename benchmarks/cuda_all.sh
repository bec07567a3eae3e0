#!/usr/bin/env bash
# Checks and measures everything that wants a GPU, on a machine with one, in about 9 minutes.
#
#   benchmarks/cuda_all.sh                what the card shows, goals and all
#   benchmarks/cuda_all.sh speed kernels  only the parts whose names begin so
#   benchmarks/cuda_all.sh --smoke        tiny shapes on the CPU: do the scripts work?
#
# Needs torch, triton and transformers, and the packages that `deploy/bundle --dev` collects elsewhere (found in
# dist/bundle or dist/bundle.tar.gz, or name their folder in PYTHONPATH). No Ray, no network.
# Results: JSON per part and summary.md in $OUT (default benchmarks/results/cuda), logs in $OUT/logs. All of it is in
# $ARCHIVE (default $OUT/results.tar.gz), with a copy of summary.md beside it; both are written again after each part.
# What was measured before an end by force is kept, and so are results of parts that this run does not measure.
# $TOTAL_S: seconds for everything (default 545); a part gets what its budget and the rest of it allow.
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
ARCHIVE=${ARCHIVE:-$OUT/results.tar.gz}
TOTAL_S=${TOTAL_S:-545}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}
[ ! -d dist/bundle ] && [ -f dist/bundle.tar.gz ] && tar -xzf dist/bundle.tar.gz -C dist
[ -d dist/bundle ] && PYTHONPATH="$PWD/dist/bundle${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH="${PYTHONPATH:-}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRITON_INTERPRET=${smoke:-0}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export KVRELAY_CACHE=${KVRELAY_CACHE:-$scratch/cache}
common=(--out "$OUT" --device cuda)
main=qwen3-8b others=(llama-3.1-8b qwen3-0.6b)
if [ -n "$smoke" ]; then
  common=(--out "$OUT" --device cpu --smoke)
  main=tiny others=(tiny-llama)
fi
mkdir -p "$OUT/logs" "$(dirname "$ARCHIVE")"
parts=()

summarize() {
  "$PYTHON" -m benchmarks.cuda.summary --out "$OUT" --expect "${parts[@]}"
}

archive() { # what there is so far, as one file: complete or the one before
  # Written elsewhere: tar takes a folder in which a file appears for one that changes, and fails.
  tar -czf "$scratch/results" -C "$OUT" --exclude=./results.tar.gz --exclude=./.results . \
    && mv "$scratch/results" "$(dirname "$ARCHIVE")/.results" && mv "$(dirname "$ARCHIVE")/.results" "$ARCHIVE"
  [ "$OUT" -ef "$(dirname "$ARCHIVE")" ] || cp "$OUT/summary.md" "$(dirname "$ARCHIVE")/"
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
  local most_s=$((budget_s + 20))
  [ "$most_s" -lt $((left_s + 10)) ] || most_s=$((left_s + 10))
  timeout --kill-after=5 "$most_s" "$PYTHON" -m "benchmarks.cuda.$module" "${common[@]}" \
    --budget-s "$budget_s" "${@:4}" 2>"$OUT/logs/$name.log"
  status=$?
  if [ "$status" -ne 0 ]; then
    echo "$name: exit status $status; the end of $OUT/logs/$name.log:"
    tail -n 15 "$OUT/logs/$name.log"
  fi
  summarize >/dev/null
  archive
}

# Packages that do not fit each other show at once; then correctness, then what only a GPU can tell. The budgets add up
# to 535 s, and most parts need less.
part preflight 15 preflight
part card 15 card
part numerics 40 numerics
part handoff 25 handoff
part checks-oracle 30 checks --only oracle
part "speed-$main-bf16" 50 speed --model "$main" --format bf16 --sampling
part profile 25 profile
[ -n "$smoke" ] || part "speed-$main-fp8" 30 speed --model "$main" --format fp8 # only GPUs have it
part kernels 35 kernels
part service 60 service
part checks-tests 110 checks --only tests
for model in "${others[@]}"; do part "speed-$model-bf16" 20 speed --model "$model" --format bf16; done
part throughput 60 throughput

echo "==> summary ($SECONDS s)"
summarize
status=$?
archive
exit "$status"
