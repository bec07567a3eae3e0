"""The kernels inside the real decoder, against the portable implementation, and the description of their steps."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kv_store import KvShape
from engine.model.decoder import Decoder
from engine.model.loader import load_stacked_weights, load_weights, weight_files
from engine.ops.interface import Ops
from engine.ops.latent_attention import attend_chunk
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from engine.ops.triton_kernels.ops import TritonOps
from engine.ops.triton_kernels.step import DeviceStep
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.pages.kv_format import plain_format
from engine.weights.config import DecoderConfig, parse_config, read_json
from engine.weights.decoder_weights import DecoderWeights
from engine.weights.kernels import quantize_rows
from engine.weights.latent import LatentConfig
from engine.weights.quantize import quantize_weights
from tests.engine.tiny_models import make_prompt
from tests.engine.triton_kernels.support import Case, bits, padded

_BLOCK_SIZE = 4
_NUM_BLOCKS = 40
_PROMPTS = (make_prompt(10, seed=1), make_prompt(4, seed=2), make_prompt(6, seed=3))
# Tokens of each prompt per step: chunks, then decodes and chunks, then only decodes.
_STEPS = ((3, 2, 0), (1, 0, 2), (0, 1, 1))
_FEW_STEPS = ((2, 0, 0), (1, 0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TinyModel:
    decoder: Decoder
    config: DecoderConfig
    shape: KvShape
    device: torch.device

    def store(self) -> TorchKvStore:
        return TorchKvStore(self.shape, _NUM_BLOCKS, device=self.device, is_like_device=True)


def _load(model_dir: Path, device: torch.device, load: Callable[..., DecoderWeights] = load_weights) -> _TinyModel:
    config = parse_config(read_json(model_dir / "config.json"))
    weights = load(weight_files(model_dir), config, dtype=torch.float32, device=device)
    shape = kv_shape(
        config, block_size=_BLOCK_SIZE, dtype=torch.float32, fingerprint="test", kv_dtype=plain_format(torch.float32)
    )
    return _TinyModel(decoder=Decoder(config, weights), config=config, shape=shape, device=device)


def _spans(computed: Seq[int], num_new: Seq[int]) -> list[SequenceSpan]:
    """Return spans of the prompts that run; prompt i has every third block, counted down from the end."""
    return [
        SequenceSpan(num_computed=done, num_new_tokens=new, block_table=list(range(_NUM_BLOCKS - 1 - i, -1, -3)))
        for i, (done, new) in enumerate(zip(computed, num_new, strict=True))
        if new
    ]


def _run_steps(model: _TinyModel, ops: Ops, steps: Seq[Seq[int]] = _STEPS) -> list[Tensor]:
    """Return the hidden states of each step, in which the prompts advance by its numbers of tokens."""
    computed = [0] * len(_PROMPTS)
    hidden = []
    for num_new in steps:
        token_ids = [t for p, at, n in zip(_PROMPTS, computed, num_new, strict=True) for t in p[at : at + n]]
        metadata = AttentionMetadata.from_spans(_spans(computed, num_new), block_size=_BLOCK_SIZE)
        tokens = torch.tensor(token_ids, device=model.device)
        hidden.append(model.decoder.forward(tokens, ops.plan(metadata)))
        computed = [at + n for at, n in zip(computed, num_new, strict=True)]
    return hidden


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's
@pytest.mark.parametrize(
    ("name", "uses_cudnn"),
    [
        ("llama-one-key-head", True),
        ("qwen3-layer-types", False),
        ("gemma3", True),
        ("deepseek_v2-query-rank", False),
        ("deepseek_v3-halves", True),
    ],
)
@torch.inference_mode()
def test_triton_ops_in_decoder_equal_torch_ops(
    name: str, uses_cudnn: bool, checkpoint: Callable[[str], Path], device: torch.device
) -> None:
    model = _load(checkpoint(name), device)
    ours, theirs = model.store(), model.store()
    hidden = _run_steps(model, TritonOps(model.config, ours, uses_cudnn=uses_cudnn))
    expected = _run_steps(model, TorchOps(model.config, theirs))
    torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=2e-4)
    for pages, expected_pages in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(pages, expected_pages, atol=2e-4, rtol=2e-4)


class _WithoutFp8:
    """Operations whose results are rounded by the projections."""

    name = "without fp8"

    def __init__(self, ops: TritonOps) -> None:
        self._ops = ops

    def plan(self, metadata: AttentionMetadata) -> Any:
        ops = self._ops.plan(metadata)
        return SimpleNamespace(
            rms_norm=ops.rms_norm, add_rms_norm=ops.add_rms_norm, attend=ops.attend, gate_mul=ops.gate_mul
        )


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's
@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
@torch.inference_mode()
def test_triton_ops_round_for_fp8_projections_as_these_do(
    name: str, checkpoint: Callable[[str], Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(name)
    model = _load(folder, device)
    weights = load_weights(weight_files(folder), model.config, dtype=torch.float32, device=device)
    quantize_weights(weights, model.config, "fp8")
    monkeypatch.setattr(
        "engine.weights.quantize.quantize_rows_in_torch", quantize_rows
    )  # the interpreter rounds as it does
    model = replace(model, decoder=Decoder(model.config, weights))
    fused = _run_steps(model, TritonOps(model.config, model.store()), _FEW_STEPS)
    plain = _run_steps(model, _WithoutFp8(TritonOps(model.config, model.store())), _FEW_STEPS)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fused, plain, strict=True))


@torch.inference_mode()
def test_triton_ops_bound_to_padded_step_equal_planned_step(
    checkpoint: Callable[[str], Path], device: torch.device
) -> None:
    model = _load(checkpoint("qwen3"), device)
    planned, bound = (
        TritonOps(model.config, model.store()),
        TritonOps(model.config, model.store()),
    )
    metadata = AttentionMetadata.from_spans(_spans((5, 0, 8), (1, 1, 1)), block_size=_BLOCK_SIZE)
    step = DeviceStep.from_metadata(metadata, tile_tokens=bound.tile_tokens, device=device)
    tokens = torch.tensor([3, 1, 4, 0, 0], device=device)
    expected = model.decoder.forward(tokens[:3], planned.plan(metadata))
    hidden = model.decoder.forward(tokens, bound.bind(padded(step, 5)))
    torch.testing.assert_close(hidden[:3], expected)
    assert hidden.isfinite().all()


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@torch.inference_mode()
def test_whole_prompts_in_keys_and_values_of_heads_equal_torch_ops(
    name: str, checkpoint: Callable[[str], Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, then beside a decode; chunks behind a prefix stay rows."""
    expanded: list[int] = []

    def attend(chunk: Any, query: Tensor, *others: Any) -> Tensor:
        expanded.append(len(query))
        return attend_chunk(chunk, query, *others)

    monkeypatch.setattr("engine.ops.triton_kernels.latent_ops.attend_chunk", attend)
    monkeypatch.setattr(LatentConfig, "expands_from", 2)
    model, steps = _load(checkpoint(name), device), ((3, 0, 4), (1, 3, 0), (2, 0, 2), (0, 1, 0))
    hidden = _run_steps(model, TritonOps(model.config, model.store()), steps)
    expected = _run_steps(model, TorchOps(model.config, model.store()), steps)
    torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=2e-4)
    assert expanded == [3, 4] * model.config.num_layers + [3] * model.config.num_layers


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends operations that hand the host a value, or have a shape that depends on one."""

    _WAITING = ("local_scalar_dense", "nonzero", "unique", "masked_select", "equal", "bincount", "repeat_interleave")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().removeprefix("aten::").strip("_")
        has_mask = name.startswith("index.") and any(each is not None and each.dtype is torch.bool for each in args[1])
        assert not has_mask and not name.startswith(self._WAITING), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe", "deepseek_v2-query-rank", "deepseek_v3"])
@torch.inference_mode()
def test_decode_of_mixtures_and_latent_rows_never_waits(
    name: str, checkpoint: Callable[[str], Path], device: torch.device
) -> None:
    model = _load(checkpoint(name), device, load=load_stacked_weights)
    ops = TritonOps(model.config, model.store())
    metadata = AttentionMetadata.from_spans(_spans((5, 0, 8), (1, 1, 1)), block_size=_BLOCK_SIZE)
    step = DeviceStep.from_metadata(metadata, tile_tokens=ops.tile_tokens, device=device)
    tokens = torch.tensor([3, 1, 4], device=device)
    with _NoWaiting():
        logits = model.decoder.logits(model.decoder.forward(tokens, ops.bind(step)))
    single = _load(checkpoint(name), device)
    with pytest.raises(AssertionError, match="waits for the device"), _NoWaiting():
        single.decoder.forward(tokens, ops.bind(step))
    assert logits.isfinite().all()


@torch.inference_mode()
def test_triton_ops_with_kv_scales_store_divided_and_read_alike(
    checkpoint: Callable[[str], Path], device: torch.device
) -> None:
    model = _load(checkpoint("llama"), device)
    plain, scaled = model.store(), model.store()
    expected = _run_steps(model, TritonOps(model.config, plain), _FEW_STEPS)
    hidden = _run_steps(model, TritonOps(model.config, scaled, kv_scales=[(0.5, 4.0)] * 2), _FEW_STEPS)
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(scaled.layers[0][0] * 0.5, plain.layers[0][0])
    torch.testing.assert_close(scaled.layers[0][1] * 4.0, plain.layers[0][1])


def test_triton_ops_beside_float8_pages_ask_for_a_dtype(
    checkpoint: Callable[[str], Path], device: torch.device
) -> None:
    model = _load(checkpoint("llama"), device)
    shape = replace(model.shape, dtype="float8_e4m3fn", row_bytes=model.shape.head_dim)
    store = TorchKvStore(shape, _NUM_BLOCKS, device=device, is_like_device=True)
    with pytest.raises(ValueError, match="dtype of the activations"):
        TritonOps(model.config, store)
    assert TritonOps(model.config, store, dtype=torch.bfloat16).tile_tokens == 128 // 3


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3-layer-types", "deepseek_v2", "deepseek_v3"])
def test_triton_ops_warm_up_leaves_pages_as_they_are(
    name: str, checkpoint: Callable[[str], Path], device: torch.device
) -> None:
    model = _load(checkpoint(name), device)
    store = model.store()
    for part in (part for pages in store.layers for part in pages):
        part.normal_()
    before = [bits(cache) for pages in store.layers for cache in pages]
    TritonOps(model.config, store, max_positions=16).warm_up()
    after = [bits(cache) for pages in store.layers for cache in pages]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_device_step_from_mixed_metadata_describes_it(device: torch.device) -> None:
    case = Case(spans=[(3, 6), (8, 1), (0, 1), (0, 4)])
    metadata = case.metadata()
    step = DeviceStep.from_metadata(metadata, tile_tokens=4, device=device)
    assert step.positions.tolist() == metadata.positions.tolist()
    assert step.slot_mapping.tolist() == metadata.slot_mapping.tolist()
    assert step.context_lens.tolist() == [9, 9, 1, 4]
    assert step.query_start_loc.tolist() == [0, 6, 7, 8, 12]
    for row, table in zip(step.block_tables.tolist(), metadata.block_tables, strict=True):
        assert row[: len(table)] == table.tolist()
    assert step.decode_seqs is not None
    assert step.decode_seqs.tolist() == [1, 2]
    assert step.num_decodes == 2
    assert step.prefill_tiles is not None
    assert step.prefill_tiles.tolist() == [[0, 4], [0, 0], [3, 0]]
