"""Converts between protobuf messages and our records."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from common.bounds import check_bounds
from common.errors import InvalidRequest
from common.sampling import SamplingParams
from common.tokens import TOKEN_BYTES, TokenArray, as_tokens, token_view, tokens_from_bytes
from kvrelay.v1 import sampling_pb2

_RENAMED = {"num_logprobs": "logprobs", "num_prompt_logprobs": "prompt_logprobs"}
_WIRE_NAMES = {field.name: _RENAMED.get(field.name, field.name) for field in fields(SamplingParams)}
_MAY_BE_UNSET = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields if field.has_presence}


def sampling_from_proto(
    message: sampling_pb2.SamplingParams, *, default_max_tokens: int, default_seed: int
) -> SamplingParams:
    """Return the record with defaults filled in. Raises InvalidRequest for a field with too many entries.

    Values are not checked: call `validate`.
    """
    check_bounds(message, field="sampling")
    values: dict[str, Any] = {"max_tokens": default_max_tokens, "seed": default_seed}
    for name, wire_name in _WIRE_NAMES.items():
        if wire_name not in _MAY_BE_UNSET or message.HasField(wire_name):  # type: ignore[arg-type]
            values[name] = getattr(message, wire_name)
    values["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    values["stop"] = tuple(message.stop)
    values["stop_token_ids"] = frozenset(message.stop_token_ids)
    return SamplingParams(**values)


def sampling_to_proto(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return the message with every field set."""
    values = {wire_name: getattr(sampling, name) for name, wire_name in _WIRE_NAMES.items()}
    values["logit_bias"] = dict(sampling.logit_bias)
    values["stop_token_ids"] = sorted(sampling.stop_token_ids)
    return sampling_pb2.SamplingParams(**values)


def check_number(value: float, field: str, *, highest: float) -> float:
    """Return the value of a field. Raises ValueError, naming the field, unless it is finite and in 0 to `highest`."""
    if not (0 <= value <= highest and math.isfinite(value)):
        raise ValueError(f"{field} is {value}; it must be finite, at least 0 and at most {highest:g}")
    return value


def token_ids_from_proto(ids: Sequence[int], *, vocab_size: int, field: str) -> TokenArray:
    """Return packed ids. Raises InvalidRequest for an id outside the vocabulary."""
    return _check_vocabulary(as_tokens(np.array(ids, dtype="<u4")), vocab_size=vocab_size, field=field)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32, 4 bytes a token."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def unpack_tokens(raw: bytes, *, vocab_size: int, field: str) -> TokenArray:
    """Invert `pack_tokens`. Raises InvalidRequest for a partial token, and for an id outside the vocabulary."""
    if len(raw) % TOKEN_BYTES:
        raise InvalidRequest(f"{len(raw)} bytes are not a multiple of {TOKEN_BYTES}, the size of a token", field=field)
    return _check_vocabulary(tokens_from_bytes(raw), vocab_size=vocab_size, field=field)


def _check_vocabulary(tokens: TokenArray, *, vocab_size: int, field: str) -> TokenArray:
    view = token_view(tokens)
    if len(view) and view.max() >= vocab_size:
        bad = int(np.argmax(view >= vocab_size))
        raise InvalidRequest(
            f"token {tokens[bad]} at position {bad} is not in the vocabulary of {vocab_size}", field=field
        )
    return tokens
