"""Messages from the first rank to the others over a pipe per rank: `Start`, then one msgpack value each."""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.options import EngineOptions
from engine.weights.ranks import Rank

PLAN, FORWARD, LOGITS = "plan", "forward", "logits"
"""Kinds of steps' messages, in this order; a step may have several of logits, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first message to a rank: all that it needs to load its part of the model."""

    rank: Rank
    options: EngineOptions
    num_threads: int
    buffer_size: int | None
    """Floats of one of the buffers that ranks share; None: torch computes, and sums go through `RankGroup`."""


def pack_plan(metadata: AttentionMetadata, window_page_of: "array[int]") -> bytes:
    """Return the message of a step's batch. `window_page_of`: of the pages' store; empty where no layer needs it."""
    size = metadata.block_size
    spans = [
        (
            span.num_computed,
            span.num_new_tokens,
            _table(span.block_table, -(-span.context_len // size)),
            [_table(mirror, len(mirror)) for mirror in span.mirrors],
        )
        for span in metadata.spans
    ]
    return bytes(msgpack.packb((PLAN, spans, window_page_of.tobytes())))


def pack_forward(token_ids: Tensor) -> bytes:
    """Return the message of a planned step's tokens, int64 [num_tokens]."""
    return bytes(msgpack.packb((FORWARD, token_ids.numpy().tobytes())))


def pack_logits(hidden: Tensor) -> bytes:
    """Return the message of rows whose logits are computed, contiguous [num_rows, hidden_size]."""
    return bytes(msgpack.packb((LOGITS, len(hidden), hidden.view(torch.uint8).numpy().tobytes())))


def read_plan(spans: Seq[Any], *, block_size: int) -> AttentionMetadata:
    """Return the batch that a message describes."""
    return AttentionMetadata.from_spans(
        [
            SequenceSpan(
                num_computed=num_computed,
                num_new_tokens=num_new_tokens,
                block_table=array("i", table),
                mirrors=[array("i", mirror) for mirror in mirrors],
            )
            for num_computed, num_new_tokens, table, mirrors in spans
        ],
        block_size=block_size,
    )


def _table(table: Seq[int], length: int) -> bytes:
    return np.asarray(table, dtype=np.int32)[:length].tobytes()
