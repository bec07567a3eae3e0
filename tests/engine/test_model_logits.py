"""Logits of a whole prompt against transformers, for every architecture and feature."""

from pathlib import Path

import pytest
import torch

from common.ids import BlockId
from engine.kv_cache import TorchKvStore, kv_shape
from engine.model.config import parse_config, read_json
from engine.model.decoder import Decoder
from engine.model.loader import load_weights, weight_files
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.torch_ops import TorchOps
from tests.engine.tiny_models import MODELS, make_model, make_prompt

CPU = torch.device("cpu")
PROMPT = make_prompt(45)


def prompt_logits(model_dir: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return our logits [num_tokens, vocab_size] of PROMPT in one chunk."""
    config = parse_config(read_json(model_dir / "config.json"))
    model = Decoder(config, load_weights(weight_files(model_dir), config, dtype=dtype, device=CPU))
    shape = kv_shape(config, block_size=4, dtype=dtype, fingerprint="test")
    store = TorchKvStore(shape, 12, device=CPU)
    span = SequenceSpan(
        num_computed=0, num_new_tokens=len(PROMPT), block_table=[BlockId(i) for i in reversed(range(12))]
    )
    metadata = AttentionMetadata.from_spans([span], block_size=4)
    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(PROMPT), TorchOps(config, store).plan(metadata)))


@pytest.mark.parametrize("name", MODELS)
def test_prefill_when_float32_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = make_model(name)
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(prompt_logits(tmp_path), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_when_half_precision_stays_near_float32(dtype: torch.dtype, qwen3: Path) -> None:
    exact, half = prompt_logits(qwen3), prompt_logits(qwen3, dtype)
    assert half.dtype is torch.float32
    assert (half - exact).abs().mean() < 0.05 * exact.std()
