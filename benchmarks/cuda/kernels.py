"""Time of each operation of a step by itself, beside the card's own rates.

    python -m benchmarks.cuda.kernels [--device cuda] [--out DIR] [--smoke]

Method. Shapes of Qwen3-8B in bf16. Operations run 16 at a time in a CUDA graph, so that no launch is measured, and walk
through the pages of 16 layers or through several copies of the weights, so that they find nothing in the card's cache
that a real step would not find there; median of 10. Bound: the bytes that must be read or written, at the rate of a
large copy, or the operations of matrix products, at the rate of a large one; the larger of the two. `attend` is head
norms, rotation, KV write and attention together; that of a prompt runs with other tiles and with cuDNN, too. Layers of
a mixture and with latent attention run whole. On a CPU the portable operations run instead.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.cuda.arms import BLOCK_SIZE, Arm, Format
from benchmarks.cuda.card import CardRates, load_rates
from benchmarks.cuda.layers import VOCAB_SIZE, Layers, noisy_store, scattered_step
from benchmarks.cuda.part import Part, part_parser, run_part
from benchmarks.cuda.timing import graph_s
from engine.ops.interface import Ops
from engine.ops.torch_ops import TorchOps
from engine.ops.triton_kernels import prefill_attention
from engine.ops.triton_kernels.ops import TritonOps
from engine.ops.triton_kernels.pages import Tiles
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.pages.kv_format import plain_format
from engine.weights.config import DecoderConfig

_MAX_POSITIONS = 8192
_TILES = ((64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2))
"""(rows, keys, warps, stages) of a prompt's attention, beside those that are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Cases that are run."""

    model: str
    num_layers: int
    decodes: tuple[tuple[int, int], ...]
    """(batch size, context length)."""
    num_prompt_tokens: int
    layers: tuple[str, ...]
    """Models whose first layers run whole."""


FULL = Sizes(
    model="qwen3-8b",
    num_layers=16,
    decodes=((1, 1024), (8, 1024), (32, 1024), (128, 4096)),
    num_prompt_tokens=8192,
    layers=("qwen3-30b-a3b", "deepseek-v2-lite"),
)
SMOKE = Sizes(
    model="tiny",
    num_layers=2,
    decodes=((1, 33), (4, 64)),
    num_prompt_tokens=48,
    layers=("tiny-moe", "tiny-deepseek"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Inputs of every case."""

    part: Part
    rates: CardRates
    sizes: Sizes
    decoder: DecoderConfig

    def run(self, case: str, run: Callable[[], object], *, num_bytes: float = 0, flops: float = 0) -> None:
        """Time one operation and report it."""
        elapsed_s = graph_s(run, self.part.device, calls=self.sizes.num_layers)
        bound_s = max(num_bytes / self.rates.copy_bytes_per_s, flops / self.rates.bf16_flops)
        self.part.add_time(case, elapsed_s, bound_s, unit="us")

    def noise(self, *sizes: int) -> Tensor:
        """Return normally distributed bf16 numbers."""
        return torch.randn(sizes, dtype=torch.bfloat16, device=self.part.device)


def measure(part: Part) -> None:
    """Measure every operation of a layer."""
    sizes = SMOKE if part.is_smoke else FULL
    decoder = Arm(model=sizes.model, format=Format.BF16).decoder
    decoder = replace(decoder, num_layers=sizes.num_layers, windows=(None,) * sizes.num_layers)
    bench = Bench(part=part, rates=load_rates(part), sizes=sizes, decoder=decoder)
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        if part.device.type != "cuda" and kv_dtype is not torch.bfloat16:
            continue  # the portable operations have no 8-bit pages
        for batch, context in sizes.decodes:
            _case(bench, f"attend, {_name(kv_dtype)} pages, decode {batch} x {context}", kv_dtype, batch, context)
        _case(bench, f"attend, {_name(kv_dtype)} pages, prefill {sizes.num_prompt_tokens}", kv_dtype, 1, None)
    for num_tokens in (*(batch for batch, _ in sizes.decodes), sizes.num_prompt_tokens):
        if part.has_time(f"{num_tokens} tokens"):
            with part.case(f"{num_tokens} tokens"), torch.inference_mode():
                _measure_elementwise(bench, num_tokens)
                _measure_products(bench, num_tokens)
    for model in sizes.layers:
        for batch, context in sizes.decodes:
            case = f"layers of {model}, decode {batch} x {context}"
            if part.has_time(case):
                with part.case(case), torch.inference_mode():
                    _measure_layers(bench, case, model, batch, context)
    prompt = f"attend, bf16 pages, prefill {sizes.num_prompt_tokens}"
    _case(bench, f"{prompt}, cuDNN", torch.bfloat16, 1, None, uses_cudnn=True)
    for rows, keys, num_warps, num_stages in _TILES:  # each takes seconds to compile
        with _tiles(rows, keys, num_warps, num_stages):
            case = f"{prompt}, {rows} rows x {keys} keys, {num_warps} warps, {num_stages} stages"
            _case(bench, case, torch.bfloat16, 1, None)


def _tiles(rows: int, keys: int, num_warps: int, num_stages: int) -> AbstractContextManager[object]:
    """Let a prompt's attention take these block sizes."""
    tiles = Tiles(rows=rows, keys=keys, num_warps=num_warps, num_stages=num_stages)
    return mock.patch.object(prefill_attention, "prefill_tiles", lambda *_shape: tiles)


def _name(dtype: torch.dtype) -> str:
    return "fp8" if dtype is torch.float8_e4m3fn else "bf16"


def _case(
    bench: Bench, case: str, kv_dtype: torch.dtype, batch: int, context: int | None, *, uses_cudnn: bool = False
) -> None:
    if bench.part.has_time(case):
        with bench.part.case(case), torch.inference_mode():
            _measure_attend(bench, case, kv_dtype, batch, context, uses_cudnn=uses_cudnn)


def _measure_attend(
    bench: Bench, case: str, kv_dtype: torch.dtype, batch: int, context: int | None, *, uses_cudnn: bool
) -> None:
    """Measure one new token of each sequence, or a whole prompt when `context` is None."""
    decoder, num_prompt_tokens = bench.decoder, bench.sizes.num_prompt_tokens
    context_len = num_prompt_tokens if context is None else context
    num_new = num_prompt_tokens if context is None else 1
    ops = _make_ops(bench, kv_dtype, batch, context_len, uses_cudnn=uses_cudnn)
    step = ops.plan(scattered_step([(context_len - num_new, num_new)] * batch))
    qkv = bench.noise(batch * num_new, (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim)
    norm = torch.ones(decoder.head_dim, dtype=torch.bfloat16, device=bench.part.device)
    layers: Iterator[int] = itertools.cycle(range(bench.sizes.num_layers))
    token_bytes = 2 * decoder.num_kv_heads * decoder.head_dim * kv_dtype.itemsize
    output_bytes = 2 * batch * num_new * decoder.num_heads * decoder.head_dim
    # Each query meets half of a prompt's keys on average, all of a context.
    num_scores = batch * num_new * context_len / (2 if context is None else 1)
    bench.run(
        case,
        lambda: step.attend(next(layers), qkv, norm, norm),
        num_bytes=batch * context_len * token_bytes + 2 * qkv.numel() + output_bytes,
        flops=4 * num_scores * decoder.num_heads * decoder.head_dim,
    )


def _make_ops(bench: Bench, kv_dtype: torch.dtype, batch: int, context_len: int, *, uses_cudnn: bool = False) -> Ops:
    decoder, device = bench.decoder, bench.part.device
    shape = kv_shape(
        decoder, block_size=BLOCK_SIZE, dtype=kv_dtype, fingerprint="benchmark", kv_dtype=plain_format(kv_dtype)
    )
    store = TorchKvStore(shape, batch * -(-context_len // BLOCK_SIZE) + 1, device=device, is_like_device=True)
    for pages in (pages for layer in store.layers for pages in layer):
        pages.copy_(torch.randn(pages.shape, dtype=torch.bfloat16, device=device))
    return _ops(decoder, store, uses_cudnn=uses_cudnn)


def _ops(decoder: DecoderConfig, store: TorchKvStore, *, uses_cudnn: bool = False) -> Ops:
    if store.layers[0][0].device.type != "cuda":
        return TorchOps(decoder, store)
    return TritonOps(decoder, store, dtype=torch.bfloat16, max_positions=_MAX_POSITIONS, uses_cudnn=uses_cudnn)


def _measure_elementwise(bench: Bench, num_tokens: int) -> None:
    hidden, inner = bench.decoder.hidden_size, bench.decoder.intermediate_size
    step = _make_ops(bench, torch.bfloat16, 1, 1).plan(scattered_step([(0, 1)]))
    x, residual, weight = bench.noise(num_tokens, hidden), bench.noise(num_tokens, hidden), bench.noise(hidden).float()
    gate_up = bench.noise(num_tokens, 2 * inner)
    element = 2 * num_tokens  # bytes of a column
    bench.run(f"rms_norm, {num_tokens}", lambda: step.rms_norm(x, weight), num_bytes=2 * element * hidden)
    bench.run(
        f"add_rms_norm, {num_tokens}",
        lambda: step.add_rms_norm(x, residual, weight),
        num_bytes=4 * element * hidden,
    )
    bench.run(f"gate_mul, {num_tokens}", lambda: step.gate_mul(gate_up), num_bytes=3 * element * inner)


def _measure_products(bench: Bench, num_tokens: int) -> None:
    decoder = bench.decoder
    hidden, inner = decoder.hidden_size, decoder.intermediate_size
    heads = decoder.num_heads * decoder.head_dim
    shapes = {
        "qkv": (heads + 2 * decoder.num_kv_heads * decoder.head_dim, hidden),
        "output": (hidden, heads),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    for name, (num_out, num_in) in shapes.items():
        x = bench.noise(num_tokens, num_in)
        weights = itertools.cycle([bench.noise(num_out, num_in) for _ in range(4)])
        bench.run(
            f"{name}, {num_tokens}",
            lambda x=x, weights=weights: F.linear(x, next(weights)),  # type: ignore[misc]
            num_bytes=2 * (num_out * num_in + num_tokens * (num_in + num_out)),
            flops=2 * num_tokens * num_in * num_out,
        )


def _measure_layers(bench: Bench, case: str, model: str, batch: int, context: int) -> None:
    """Measure one new token of each sequence in a model's first layers."""
    device = bench.part.device
    layers, metadata = _layers(model, device), scattered_step([(context - 1, 1)] * batch)
    store = noisy_store(layers.config, metadata, [context] * batch, torch.bfloat16, device)
    step, decoder = _ops(layers.config, store).plan(metadata), layers.decoder
    token_ids = torch.arange(batch, device=device) % VOCAB_SIZE
    token_bytes = sum(pages[0, 0].nbytes for layer in store.layers for pages in layer)
    bench.run(
        case,
        lambda: decoder.forward(token_ids, step),
        num_bytes=layers.step_bytes(batch) + batch * context * token_bytes,
    )


@lru_cache(maxsize=1)
def _layers(model: str, device: torch.device) -> Layers:
    return Layers.of(model, dtype=torch.bfloat16, device=device)


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    args = part_parser("kernels", __doc__).parse_args(argv)
    return run_part("kernels", "Each operation by itself", args, measure)


if __name__ == "__main__":
    sys.exit(main())
