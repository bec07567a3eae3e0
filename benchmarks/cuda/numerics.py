"""Are the kernels right at the sizes of real models? Attention, and whole layers, against torch in float32.

    python -m benchmarks.cuda.numerics [--device cuda] [--out DIR] [--smoke]

Method. Contexts of 1 to 8192 tokens around the edges of pages and tiles, one long prompt, and a batch of chunks and
decodes; pages in bf16 and fp8. Attention: the kernels alone, over given queries and pages; the largest relative error
of a token's head. Layers: first layers of each model, the largest relative error of a token; of mixtures the median,
since near ties choose other experts. Memory that a kernel does not write, and pages behind a context, hold NaN. A batch
is run 20 times, and one of decodes as a CUDA graph too: all have the same bits. A case that fails is run again with
prefill tiles of 64 rows and 4 warps, and its failure says whether it then passes. On a CPU Triton's interpreter runs
the kernels: TRITON_INTERPRET=1.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cuda.layers import VOCAB_SIZE, Layers, noisy_store, scattered_step, short_config
from benchmarks.cuda.part import Part, part_parser, run_part
from benchmarks.cuda.report import Reading
from engine.device.devices import device_for
from engine.device.interpreter import is_interpreted
from engine.ops.metadata import AttentionMetadata
from engine.ops.torch_ops import TorchOps
from engine.ops.triton_kernels import latent_attention, prefill_attention
from engine.ops.triton_kernels.decode_attention import decode_attention, split_keys
from engine.ops.triton_kernels.ops import TritonOps
from engine.ops.triton_kernels.pages import LayerPages, Tiles
from engine.ops.triton_kernels.step import DeviceStep

logger = logging.getLogger(__name__)

Spans: TypeAlias = Sequence[tuple[int, int]]
"""(tokens computed before, new tokens) of each sequence."""

_MAX_POSITIONS = 8192
_PAGES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_ATTENTION_LIMIT = 0.02
_LAYER_LIMITS = {"bf16": 0.03, "fp8": 0.15}
"""Largest relative errors. New keys are rounded to a page's dtype, which only a layer's error shows."""
_TRUNCATION = 3
"""Factor for the interpreter, which truncates to bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Cases that are run."""

    attention: tuple[str, ...]
    layers: tuple[str, ...]
    batches: Mapping[str, Spans]
    layer_batches: tuple[str, ...]
    num_repeats: int


def _decodes(*context_lens: int) -> Spans:
    return [(context_len - 1, 1) for context_len in context_lens]


FULL = Sizes(
    attention=("qwen3-8b", "llama-3.1-70b"),
    layers=("qwen3-8b", "llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v2-lite"),
    batches={
        "decodes": _decodes(1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 512, 1000, 1024, 4095, 4096, 8191, 8192),
        "a long decode": _decodes(8192),
        "a prompt of 8192": [(0, 8192)],
        "mixed": [(0, 1), (1, 2), (100, 1), (8000, 192), (4095, 130), (0, 513), (8191, 1), (17, 1)],
    },
    layer_batches=("decodes", "mixed"),
    num_repeats=20,
)
SMOKE = Sizes(
    attention=("tiny", "tiny-llama"),
    layers=("tiny", "tiny-moe", "tiny-deepseek"),
    batches={"decodes": _decodes(1, 16, 33), "mixed": [(0, 1), (20, 3), (0, 2)]},
    layer_batches=("mixed",),
    num_repeats=2,
)


def measure(part: Part) -> None:
    """Compare every model, batch and dtype of pages."""
    sizes = SMOKE if part.is_smoke else FULL
    for model in sizes.attention:
        for pages in _PAGES:
            for batch, spans in sizes.batches.items():
                case = _Case(
                    name=f"attention of {model}, {pages} pages, {batch}", model=model, pages=pages, spans=spans
                )
                _compare(part, case, _attention, num_repeats=sizes.num_repeats, limit=_ATTENTION_LIMIT)
    for model in sizes.layers:
        for pages, limit in _LAYER_LIMITS.items():
            if pages == "fp8" and (is_interpreted() or short_config(model).latent is not None):
                continue  # the interpreter rounds to fp8 in another way; latent rows are never in fp8
            for batch in sizes.layer_batches:
                name = f"layers of {model}, {pages} pages, {batch}"
                case = _Case(name=name, model=model, pages=pages, spans=sizes.batches[batch])
                _compare(part, case, _layers, num_repeats=sizes.num_repeats, limit=limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    name: str
    model: str
    pages: str
    spans: Spans

    @property
    def has_decodes_alone(self) -> bool:
        return all(num_new == 1 for _, num_new in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """The kernels' way to a result [num_tokens, ..., size], which only launches work, and the reference's."""

    run: Callable[[], Tensor]
    reference: Callable[[], Tensor]


Make: TypeAlias = Callable[[_Case, torch.device], _Pair]


def _compare(part: Part, case: _Case, make: Make, *, num_repeats: int, limit: float) -> None:
    """Report one case; where it fails, try other tiles too."""
    if not part.has_time(case.name):
        return
    limit *= _TRUNCATION if is_interpreted() else 1

    def check() -> float:
        torch.manual_seed(0)  # the same inputs with other tiles
        pair = make(case, part.device)
        with _poisoned():
            found = pair.run()
        error = _relative_error(found, pair.reference(), takes_median=short_config(case.model).experts is not None)
        if not error <= limit:  # NaN is not
            raise AssertionError(f"relative error {error:.3g}, at most {limit:g} is right")
        _check_bits(case, part.device, pair.run, num_repeats)
        return error

    with part.case(case.name), torch.inference_mode():
        try:
            error = check()
        except Exception as failure:
            with _small_tiles():
                raise AssertionError(f"{failure}; with 64 rows and 4 warps: {_verdict(check)}") from failure
        part.add(Reading(case=case.name, value=error, unit="of the value", bound=limit))


def _verdict(check: Callable[[], float]) -> str:
    try:
        return f"passes, {check():.3g}"
    except Exception as failure:  # the failure itself is raised by the caller
        logger.exception("it fails with smaller tiles too")
        return f"fails too: {failure}"


def _check_bits(case: _Case, device: torch.device, run: Callable[[], Tensor], num_repeats: int) -> None:
    """Raise AssertionError where another run, or a graph, gives other bits."""
    first = run()
    for i in range(1, num_repeats):
        if not torch.equal(run(), first):
            raise AssertionError(f"run {i + 1} has other bits than the first")
    if case.has_decodes_alone and not torch.equal(device_for(device).capture(run)(), first):
        raise AssertionError("a graph has other bits than its kernels one by one")


def _relative_error(found: Tensor, expected: Tensor, *, takes_median: bool) -> float:
    norms = torch.linalg.vector_norm(expected.float(), dim=-1)
    errors = torch.linalg.vector_norm(found.float() - expected.float(), dim=-1) / norms
    if errors.isnan().any():
        return float("nan")
    return float(errors.median() if takes_median else errors.max())


@contextmanager
def _poisoned() -> Iterator[None]:
    """Let torch fill new memory with NaN."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


@contextmanager
def _small_tiles() -> Iterator[None]:
    """Let chunks take tiles of 64 rows and 4 warps."""
    with ExitStack() as stack:
        for module, name in ((prefill_attention, "prefill_tiles"), (latent_attention, "_chunk_tiles")):
            stack.enter_context(mock.patch.object(module, name, _smaller(getattr(module, name))))
        yield


def _smaller(choose: Callable[..., Tiles]) -> Callable[..., Tiles]:
    return lambda *shape: replace(choose(*shape), rows=64, num_warps=4)


def _attention(case: _Case, device: torch.device) -> _Pair:
    """Return both attention kernels over given queries, with all of the step's keys in the pages already."""
    config, metadata = short_config(case.model), scattered_step(case.spans)
    context_lens = metadata.context_lens.tolist()
    keys, values = noisy_store(config, metadata, context_lens, _PAGES[case.pages], device).layers[0]
    pages = LayerPages(keys=keys, values=values)
    tile = prefill_attention.tile_tokens(torch.bfloat16, config.head_dim, config.num_heads // config.num_kv_heads)
    step = DeviceStep.from_metadata(metadata, tile_tokens=tile, device=device)
    query = torch.randn(
        (len(metadata.positions), config.num_heads, config.head_dim), dtype=torch.bfloat16, device=device
    )
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

    def run() -> Tensor:
        output = torch.empty_like(query)
        if step.num_decodes:
            splits = split_keys(step.num_decodes, config.num_heads, pages, num_sms=num_sms)
            decode_attention(output, query, pages, step, splits)
        prefill_attention.prefill_attention(output, query, pages, step)
        return output

    return _Pair(run=run, reference=lambda: _attend(query, pages, metadata))


def _attend(query: Tensor, pages: LayerPages, metadata: AttentionMetadata) -> Tensor:
    """Return what attention is in float32, head by head, so that the scores of long prompts fit into memory."""
    group = query.shape[1] // pages.num_kv_heads
    result = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    keys, values = pages.keys.float(), pages.values.float()
    bounds = metadata.query_start_loc.tolist()
    for begin, end, table in zip(bounds[:-1], bounds[1:], metadata.block_tables, strict=True):
        context_len = int(metadata.positions[end - 1]) + 1
        blocks = torch.from_numpy(table).to(query.device)
        hidden = torch.ones((end - begin, context_len), dtype=torch.bool, device=query.device)
        hidden.triu_(context_len - (end - begin) + 1)
        for head in range(pages.num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            key, value = (each[blocks, :, head].flatten(0, 1)[:context_len] for each in (keys, values))
            scores = query[begin:end, heads].float().transpose(0, 1) @ key.T * pages.score_scale
            weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
            result[begin:end, heads] = (weights @ value).transpose(0, 1)
    return result


@lru_cache(maxsize=1)
def _weights(model: str, device: torch.device) -> tuple[Layers, Layers]:
    layers = Layers.of(model, dtype=torch.bfloat16, device=device)
    return layers, layers.widened(device)


def _layers(case: _Case, device: torch.device) -> _Pair:
    """Return a whole forward pass without the head."""
    layers, wide = _weights(case.model, device)
    config, metadata = layers.config, scattered_step(case.spans)
    num_computed = [span.num_computed for span in metadata.spans]
    store = noisy_store(config, metadata, num_computed, _PAGES[case.pages], device)
    wide_store = noisy_store(config, metadata, num_computed, torch.float32, device)
    for sources, targets in zip(store.layers, wide_store.layers, strict=True):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source.float().nan_to_num_())  # torch's attention reads beyond contexts
    ops = TritonOps(config, store, dtype=torch.bfloat16, max_positions=_MAX_POSITIONS)
    step = DeviceStep.from_metadata(metadata, tile_tokens=ops.tile_tokens, device=device)
    token_ids = torch.arange(len(metadata.positions), device=device) % VOCAB_SIZE
    decoder = layers.decoder
    return _Pair(
        run=lambda: decoder.forward(token_ids, ops.bind(step)),
        reference=lambda: wide.decoder.forward(token_ids, TorchOps(config, wide_store).plan(metadata)),
    )


def main(argv: list[str] | None = None) -> int:
    """Compare; returns the exit status."""
    args = part_parser("numerics", __doc__).parse_args(argv)
    return run_part("numerics", "Kernels at real sizes against torch in float32", args, measure)


if __name__ == "__main__":
    sys.exit(main())
