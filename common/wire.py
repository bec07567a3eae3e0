"""Between protobuf messages and our records."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.bounds import check_bounds
from common.errors import InvalidRequest
from common.sampling import SamplingParams
from common.tokens import TOKEN_BYTES, TokenArray, as_tokens, token_view, tokens_from_bytes
from kvrelay.v1 import sampling_pb2


def sampling_from_proto(
    message: sampling_pb2.SamplingParams, *, default_max_tokens: int, default_seed: int
) -> SamplingParams:
    """Return the record with defaults filled in. Raises InvalidRequest for a field with too many entries.

    Values are not checked: call `validate`.
    """
    check_bounds(message, field="sampling")
    defaults = SamplingParams()

    def value(name: Any, default: Any) -> Any:
        return getattr(message, name) if message.HasField(name) else default

    return SamplingParams(
        temperature=value("temperature", defaults.temperature),
        top_k=value("top_k", defaults.top_k),
        top_p=value("top_p", defaults.top_p),
        min_p=value("min_p", defaults.min_p),
        repetition_penalty=value("repetition_penalty", defaults.repetition_penalty),
        presence_penalty=value("presence_penalty", defaults.presence_penalty),
        frequency_penalty=value("frequency_penalty", defaults.frequency_penalty),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        seed=value("seed", default_seed),
        n=value("n", defaults.n),
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        max_tokens=value("max_tokens", default_max_tokens),
        min_tokens=value("min_tokens", defaults.min_tokens),
        ignore_eos=message.ignore_eos,
        num_logprobs=message.logprobs if message.HasField("logprobs") else None,
        num_prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        include_special_tokens=message.include_special_tokens,
        detokenize=value("detokenize", defaults.detokenize),
    )


def sampling_to_proto(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return the message with every field set."""
    message = sampling_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        n=sampling.n,
        stop=sampling.stop,
        stop_token_ids=sorted(sampling.stop_token_ids),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        include_special_tokens=sampling.include_special_tokens,
        detokenize=sampling.detokenize,
    )
    if sampling.num_logprobs is not None:
        message.logprobs = sampling.num_logprobs
    if sampling.num_prompt_logprobs is not None:
        message.prompt_logprobs = sampling.num_prompt_logprobs
    return message


def token_ids_from_proto(ids: Sequence[int], *, vocab_size: int, field: str) -> TokenArray:
    """Return the ids (a repeated uint32, say) packed. Raises InvalidRequest for one that is not in the vocabulary."""
    return _check_vocabulary(as_tokens(np.array(ids, dtype="<u4")), vocab_size=vocab_size, field=field)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32, 4 bytes a token."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


def unpack_tokens(raw: bytes, *, vocab_size: int, field: str) -> TokenArray:
    """Invert `pack_tokens`. Raises InvalidRequest for half a token, and for one that is not in the vocabulary."""
    if len(raw) % TOKEN_BYTES:
        raise InvalidRequest(f"{len(raw)} bytes are no whole number of {TOKEN_BYTES}-byte tokens", field=field)
    return _check_vocabulary(tokens_from_bytes(raw), vocab_size=vocab_size, field=field)


def _check_vocabulary(tokens: TokenArray, *, vocab_size: int, field: str) -> TokenArray:
    view = token_view(tokens)
    if len(view) and view.max() >= vocab_size:
        bad = int(np.argmax(view >= vocab_size))
        raise InvalidRequest(
            f"token {tokens[bad]} at position {bad} is not in the vocabulary of {vocab_size}", field=field
        )
    return tokens
