#!/usr/bin/env bash
# Checks and measures everything that wants a GPU, on a machine with one, in under 8 minutes.
#
#   benchmarks/cuda_all.sh                what the card shows, goals and all
#   benchmarks/cuda_all.sh speed kernels  only the parts whose names begin so
#   benchmarks/cuda_all.sh --smoke        tiny shapes on the CPU: do the scripts work?
#
# Needs torch, triton, transformers, grpcio, protobuf, msgpack and prometheus-client, and the folder of small packages
# that `deploy/bundle --dev` makes elsewhere (found in dist/bundle, or name it in PYTHONPATH). No Ray, no network.
# Results: JSON per part and summary.md in $OUT (default benchmarks/results/cuda), logs in $OUT/logs.
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
rm -f "$OUT"/{card,card_rates,checks-*,handoff,kernels,service,speed-*,throughput}.json "$OUT/summary.md"
parts=()

part() { # part NAME BUDGET_S MODULE ARGUMENTS...: NAME is its result's; no case starts after BUDGET_S
  local name=$1 budget_s=$2 module=$3 left_s=$((TOTAL_S - SECONDS)) wanted status
  if [ ${#only[@]} -gt 0 ]; then
    wanted=''
    for prefix in "${only[@]}"; do [[ $name == "$prefix"* ]] && wanted=1; done
    [ -n "$wanted" ] || return 0
  fi
  parts+=("$name")
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
}

part card 30 card
part checks-oracle 60 checks --only oracle
for model in "${big[@]}"; do part "speed-$model-bf16" 40 speed --model "$model" --format bf16; done
part handoff 30 handoff
part throughput 110 throughput
for format in "${formats[@]:1}"; do
  for model in "${big[@]}"; do part "speed-$model-$format" 40 speed --model "$model" --format "$format"; done
done
part service 60 service
part kernels 40 kernels
[ -n "$smoke" ] || part checks-tests 240 checks --only tests # a smoke run is itself one of the tests

echo "==> summary ($SECONDS s)"
"$PYTHON" -m benchmarks.cuda.summary --out "$OUT" --expect "${parts[@]}"
