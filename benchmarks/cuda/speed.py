"""Decode and prefill of one model, as fractions of what the card measures for itself.

    python -m benchmarks.cuda.speed --model qwen3-8b --format bf16 [--sampling] [--device cuda] [--out DIR] [--smoke]

Method. Random weights of the published shape, the engine loop of a worker (scheduling, input preparation, greedy
sampling, results on the host), nothing cached. Decode: requests enter as after a handoff, their pages full of noise; 8
steps warm up, then 32 are timed together. Bound: bytes of weights and of KV that a step must read, at the measured
rate of a large copy. Prefill: one prompt of 8192 tokens in one step, until its first token is on the host; median of 5.
Bound: operations of its matrix products and causal attention, at the measured rate of a large matrix product (in fp8
for fp8 weights, in bf16 for attention). A goal is a share of the bound, and set for models of 4 GiB and more: the steps
of smaller ones are bound by the gaps between kernels.
--sampling: the smallest and the largest batch again, with top-p 0.9, top-k 20 and penalties; their bound is the time
of the greedy step. A sequence that skips steps takes as long as the steps between its tokens.
"""

import statistics
import sys
import time
from dataclasses import dataclass

import torch

from benchmarks.cuda.arms import BLOCK_SIZE, Arm, EngineArm, Format
from benchmarks.cuda.card import CardRates, load_rates
from benchmarks.cuda.part import Part, part_parser, run_part
from benchmarks.cuda.timing import synchronize
from common.random_models import CONFIGS
from common.sampling import SamplingParams

_SAMPLINGS = {
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k": SamplingParams(temperature=0.8, top_k=20),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.2),
}
_GIB = 1 << 30
_LEAST_GOAL_BYTES = 4 * _GIB
_RESERVE_BYTES = 10 * _GIB
"""Memory left for activations of an 8k prefill, graphs, libraries' workspaces and other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Cases that are run."""

    decodes: tuple[tuple[int, int, float], ...]
    """(batch size, context length, goal)."""
    num_prompt_tokens: int
    prefill_goal: float
    num_warm_up_steps: int
    num_steps: int
    num_prefills: int


FULL = Sizes(
    decodes=((1, 1024, 0.75), (8, 1024, 0.75), (32, 1024, 0.75), (128, 4096, 0.70)),
    num_prompt_tokens=8192,
    prefill_goal=0.60,
    num_warm_up_steps=8,
    num_steps=32,
    num_prefills=5,
)
SMOKE = Sizes(
    decodes=((1, 33, 0.75), (4, 64, 0.70)),
    num_prompt_tokens=96,
    prefill_goal=0.60,
    num_warm_up_steps=2,
    num_steps=4,
    num_prefills=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One arm, loaded, and what it is held against."""

    arm: Arm
    engine: EngineArm
    rates: CardRates
    sizes: Sizes
    part: Part

    def goal(self, goal: float) -> float | None:
        """Return the goal of a case; None for a model without goals."""
        return goal if self.arm.weight_bytes >= _LEAST_GOAL_BYTES else None


def measure(part: Part, arm: Arm, *, samples: bool = False) -> None:
    """Measure one model in one format; with `samples`, ways of sampling, too."""
    sizes = SMOKE if part.is_smoke else FULL
    decodes = tuple(
        (batch, _fitting_context(part, arm, batch, context), goal) for batch, context, goal in sizes.decodes
    )
    num_kv_tokens = max(batch * (context + _num_new_tokens(sizes)) for batch, context, _ in decodes)
    num_blocks = int(1.05 * max(num_kv_tokens, sizes.num_prompt_tokens) / BLOCK_SIZE) + 4 * max(d[0] for d in decodes)
    started_s = time.monotonic()
    engine = EngineArm(
        arm.serving_config(
            part.device,
            num_blocks=num_blocks,
            max_running=max(batch for batch, _, _ in decodes),
            max_step_tokens=sizes.num_prompt_tokens,
        )
    )
    engine.fill_pages()
    print(f"  {arm.name}: loaded in {time.monotonic() - started_s:.1f} s", flush=True)
    bench = Bench(arm=arm, engine=engine, rates=load_rates(part), sizes=sizes, part=part)
    greedy_s: dict[int, float] = {}
    for (batch, context, goal), (_, wanted, _) in zip(decodes, sizes.decodes, strict=True):
        case = f"{arm.name}, decode {batch} x {context}"
        if part.has_time(case):
            with part.case(case):
                note = "" if context == wanted else f"a context of {wanted} does not fit into this card"
                greedy_s[batch] = _measure_decode(
                    bench, case, batch, context, goal=bench.goal(goal) if context == wanted else None, note=note
                )
    for batch, context, _goal in (decodes[0], decodes[-1]) if samples else ():
        for name, sampling in _SAMPLINGS.items():
            case = f"{arm.name}, decode {batch} x {context}, {name}"
            if batch in greedy_s and part.has_time(case):
                with part.case(case):
                    part.add_time(case, _time_decode(bench, batch, context, sampling), greedy_s[batch])
    case = f"{arm.name}, prefill {sizes.num_prompt_tokens}"
    if part.has_time(case):
        with part.case(case):
            _measure_prefill(bench, case)


def _num_new_tokens(sizes: Sizes) -> int:
    return sizes.num_warm_up_steps + sizes.num_steps + 8


def _fitting_context(part: Part, arm: Arm, batch: int, context: int) -> int:
    """Return the context, or the longest multiple of 256 of it whose KV fits beside the weights."""
    if part.device.type != "cuda":
        return context
    embedding_bytes = 0 if arm.decoder.has_tied_embeddings else 2 * arm.num_head_weights
    # Weights are loaded in bf16 and quantized one by one.
    taken = 2 * (arm.num_layer_weights + arm.num_head_weights) + embedding_bytes + _RESERVE_BYTES
    room = torch.cuda.mem_get_info(part.device)[0] - taken
    fitting = int(room / (1.05 * batch * arm.kv_bytes_per_token)) - 64
    return min(context, max(256, fitting // 256 * 256))


def _measure_decode(bench: Bench, case: str, batch: int, context: int, *, goal: float | None, note: str) -> float:
    """Report a greedy step; returns its seconds."""
    sizes = bench.sizes
    step_s = _time_decode(bench, batch, context, SamplingParams(temperature=0.0))
    mean_context = context + sizes.num_warm_up_steps + sizes.num_steps / 2
    num_bytes = bench.arm.weight_bytes + batch * mean_context * bench.arm.kv_bytes_per_token
    bound_s = num_bytes / bench.rates.copy_bytes_per_s
    note = note or f"{batch / step_s:.0f} tokens/s, {num_bytes / 1e9:.1f} GB a step"
    bench.part.add_time(case, step_s, bound_s, goal=goal, note=note)
    return step_s


def _time_decode(bench: Bench, batch: int, context: int, sampling: SamplingParams) -> float:
    """Return the seconds between two tokens of a sequence."""
    engine, sizes = bench.engine, bench.sizes
    groups = [engine.add_decoding(context, max_tokens=_num_new_tokens(sizes), sampling=sampling) for _ in range(batch)]
    try:
        for _ in range(sizes.num_warm_up_steps):
            engine.step()
        num_before, started_s = engine.num_tokens, time.perf_counter()
        for _ in range(sizes.num_steps):
            engine.step()
        elapsed_s = time.perf_counter() - started_s
        num_tokens = engine.num_tokens - num_before
    finally:
        engine.cancel(groups)
    if not num_tokens or (sampling.repetition_penalty == 1 and num_tokens != batch * sizes.num_steps):
        raise AssertionError(f"{num_tokens} tokens in {sizes.num_steps} steps of {batch} sequences")
    return elapsed_s * batch / num_tokens


def _measure_prefill(bench: Bench, case: str) -> None:
    engine, num_tokens, arm = bench.engine, bench.sizes.num_prompt_tokens, bench.arm
    times: list[float] = []
    for _ in range(bench.sizes.num_prefills + 1):
        group = engine.add(engine.prompt(num_tokens), max_tokens=1)
        synchronize(bench.part.device)
        started_s = time.perf_counter()
        while not group.is_over:
            engine.step()
        times.append(time.perf_counter() - started_s)
    prefill_s = statistics.median(times[1:])
    is_fp8 = arm.format is Format.FP8 and bench.rates.fp8_flops is not None
    product_rate = bench.rates.fp8_flops if is_fp8 and bench.rates.fp8_flops else bench.rates.bf16_flops
    products = 2.0 * arm.num_layer_weights * num_tokens + 2.0 * arm.num_head_weights
    bound_s = products / product_rate + arm.attention_flops(num_tokens) / bench.rates.bf16_flops
    flops = products + arm.attention_flops(num_tokens)
    note = f"{num_tokens / prefill_s:.0f} tokens/s, {flops / prefill_s / 1e12:.0f} TFLOP/s"
    bench.part.add_time(case, prefill_s, bound_s, goal=bench.goal(bench.sizes.prefill_goal), note=note)


def main(argv: list[str] | None = None) -> int:
    """Measure one arm; returns the exit status."""
    parser = part_parser("speed", __doc__)
    parser.add_argument("--model", choices=list(CONFIGS), default="qwen3-8b", help="a random model's name")
    parser.add_argument("--format", choices=[*Format], type=Format, default=Format.BF16, help="of weights and KV")
    parser.add_argument("--sampling", action="store_true", help="measure ways of sampling, too")
    args = parser.parse_args(argv)
    arm = Arm(model=args.model, format=args.format)
    return run_part(
        f"speed-{arm.model}-{arm.format}",
        f"Speed of {arm.name}",
        args,
        lambda part: measure(part, arm, samples=args.sampling),
    )


if __name__ == "__main__":
    sys.exit(main())
