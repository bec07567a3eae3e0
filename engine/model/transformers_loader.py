"""Loads decoders that transformers computes.

`TESTED_ARCHITECTURES` are tested against transformers on tiny random checkpoints
(tests/engine/test_transformers_models.py); others are refused. For the installed version of transformers, a model must
also pass a trial run (`engine.model.transformers_trial`) and, once loaded, agree with transformers' own attention.

The trial run sees a model's calls of attention, but not whether it counts positions itself, looks at neighbouring
tokens, or keeps a state. So two short texts run in plain transformers, each alone, and in our way, in one row and in
two steps, and the logits are compared: four forward passes over a few tokens.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from common.ids import BlockId
from engine.model.checkpoints.checkpoint import is_gguf
from engine.model.loader import weight_files
from engine.model.transformers_decoder import (
    PAGED_ATTENTION,
    TransformersDecoder,
    TransformersOps,
    register_paged_attention,
)
from engine.model.transformers_trial import causal_lm_class, pin_rotary_frequencies, pretrained_config, refusing
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.pages.kv_cache import TorchKvStore, kv_shape
from engine.weights.config import TransformersConfig, UnsupportedModel

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 2
_BLOCK_TABLES = ((BlockId(3), BlockId(0), BlockId(4)), (BlockId(1), BlockId(2)))
_TEXT_LENS = (6, 4)
_FIRST_STEP = 3
"""Tokens of each text in the first step; the second then has a chunk with a cached prefix, and a decode token."""
# In units of the logits' spread: rounding is well below, a wrong position or a look at a neighbour well above.
_FLOAT32_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.1

TESTED_ARCHITECTURES = frozenset(
    {
        "AfmoeForCausalLM",
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "Dots1ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "FlexOlmoForCausalLM",
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3nForCausalLM",
        "Gemma4ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "Glm4MoeForCausalLM",
        "GlmForCausalLM",
        "HeliumForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MinistralForCausalLM",
        "NanoChatForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "PhimoeForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
    }
)


def load_transformers_decoder(
    model_dir: Path, config: TransformersConfig, *, dtype: torch.dtype, device: torch.device
) -> TransformersDecoder:
    """Return the decoder of a checkpoint folder, whose `config` comes from `read_transformers_config`.

    Reads only local safetensors files and runs no code of a checkpoint. Raises UnsupportedModel when the architecture
    is untested, a tensor is missing, unknown or of another shape, or logits differ from transformers' own.
    """
    if config.architecture not in TESTED_ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {config.architecture} is not supported; through transformers these are:"
            f" {', '.join(sorted(TESTED_ARCHITECTURES))}"
        )
    causal_lm = _load_causal_lm(model_dir, dtype).to(device)
    decoder = TransformersDecoder(config, causal_lm)
    with refusing(f"{config.architecture} cannot run"):
        check_against_transformers(decoder, causal_lm)
    return decoder


def _load_causal_lm(model_dir: Path, dtype: torch.dtype) -> Any:
    """Return the checkpoint's model, on the CPU, with our attention."""
    register_paged_attention()
    files = weight_files(model_dir)  # raises unless they are complete
    if is_gguf(files):
        raise UnsupportedModel(f"{model_dir} holds a GGUF file; for this architecture only safetensors files are read")
    if (model_dir / "adapter_config.json").exists():
        raise UnsupportedModel(f"{model_dir} holds an adapter (adapter_config.json); adapters are not supported")
    config = pretrained_config(model_dir)
    with refusing(f"cannot load {model_dir}"), _no_progress_bar():
        model, report = causal_lm_class(config).from_pretrained(
            model_dir,
            config=config,
            dtype=dtype,
            attn_implementation=PAGED_ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    for key, problem in (("missing_keys", "missing in the checkpoint"), ("unexpected_keys", "of no known place")):
        if report[key]:
            names = sorted(report[key])
            raise UnsupportedModel(f"{len(names)} tensors are {problem}, {names[0]} among them")
    pin_rotary_frequencies(model)
    return model


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing on stderr, which has log lines."""
    transformers_logging: Any = transformers.utils.logging
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


@torch.inference_mode()
def check_against_transformers(decoder: TransformersDecoder, causal_lm: Any) -> None:
    """Raise UnsupportedModel unless the decoder agrees with its own `causal_lm` in eager attention."""
    device, dtype = causal_lm.device, causal_lm.dtype
    vocab_size = decoder.config.vocab_size
    texts = [torch.tensor([(7 * i + 5 * n) % vocab_size for i in range(n)], device=device) for n in _TEXT_LENS]
    causal_lm.set_attn_implementation("eager")
    expected = torch.cat([causal_lm(input_ids=text[None], use_cache=False).logits[0].float() for text in texts])
    causal_lm.set_attn_implementation(PAGED_ATTENTION)
    error = _paged_logits(decoder, texts, dtype) - expected
    relative_error = (error.norm() / (expected - expected.mean(-1, keepdim=True)).norm()).item()
    tolerance = _FLOAT32_TOLERANCE if dtype is torch.float32 else _HALF_TOLERANCE
    if not relative_error <= tolerance:
        raise UnsupportedModel(
            f"{decoder.config.architecture} on a paged cache differs from transformers by {relative_error:.2g} of the"
            f" logits' spread, more than {tolerance}: it does something that only whole texts allow"
        )
    logger.info("model agrees with transformers", extra={"relative_error": relative_error, "tolerance": tolerance})


def _paged_logits(decoder: TransformersDecoder, texts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return logits [sum of lengths, vocab_size], text by text, computed in two steps on pages."""
    shape = kv_shape(decoder.config, block_size=_BLOCK_SIZE, dtype=dtype, fingerprint="check")
    store = TorchKvStore(shape, sum(map(len, _BLOCK_TABLES)), device=texts[0].device)
    ops = TransformersOps(decoder.config, store)
    logits: list[list[Tensor]] = [[] for _ in texts]
    for begin, ends in ((0, [_FIRST_STEP] * len(texts)), (_FIRST_STEP, [len(text) for text in texts])):
        spans = [
            SequenceSpan(num_computed=begin, num_new_tokens=end - begin, block_table=table)
            for end, table in zip(ends, _BLOCK_TABLES, strict=True)
        ]
        step = ops.plan(AttentionMetadata.from_spans(spans, block_size=_BLOCK_SIZE))
        row = torch.cat([text[begin:end] for text, end in zip(texts, ends, strict=True)])
        of_texts = torch.split(decoder.logits(decoder.forward(row, step)), [end - begin for end in ends])
        for found, rows in zip(logits, of_texts, strict=True):
            found.append(rows)
    return torch.cat([rows for found in logits for rows in found])
