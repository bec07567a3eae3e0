"""Checks, when a model is loaded, that it computes the same on our pages as in plain transformers.

The trial run sees a model's calls of attention, but not whether it counts positions itself, looks at neighbouring
tokens, or keeps a state. So two short texts run in plain transformers, each alone, and in our way, in one row and in
two steps, and the logits are compared: four forward passes over a few tokens.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from common.ids import BlockId
from engine.kv_cache import TorchKvStore, kv_shape
from engine.model.config import UnsupportedModel
from engine.model.transformers_decoder import PAGED_ATTENTION, TransformersDecoder, TransformersOps
from engine.ops.metadata import AttentionMetadata, SequenceSpan

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 2
_BLOCK_TABLES = ((BlockId(3), BlockId(0), BlockId(4)), (BlockId(1), BlockId(2)))
_TEXT_LENS = (6, 4)
_FIRST_STEP = 3
"""Tokens of each text in the first step; the second then has a chunk with a cached prefix, and a decode token."""
# In units of the logits' spread: rounding is well below, a wrong position or a look at a neighbour well above.
_FLOAT32_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.1


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
