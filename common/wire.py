"""Conversions between protobuf messages and records."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from common.errors import InvalidRequest
from common.parameter import Biases, Texts, Tokens
from common.sampling import MAX_N, PARAMETERS, SamplingParams
from common.tokens import TOKEN_BYTES, TokenArray, as_tokens, token_view, tokens_from_bytes
from kvrelay.v1 import sampling_pb2

MAX_PROMPT_TOKENS = 1 << 24
"""Far beyond every model; its own context length is checked next, also by `len`."""
MAX_CHAT_MESSAGES = 4096
"""A template runs once per message: rendering this many takes 0.1 s."""
MAX_TOOLS = 128
"""Tools of a conversation, and calls of a message."""
MAX_CHAT_CALLS = 8192
"""Calls of all messages of a conversation."""
MAX_CONTENT_PARTS = 1024
"""Most parts of a message of the HTTP API."""
MAX_CACHE_MARKS = 4
"""Most marks of one request."""
MAX_CACHE_TTL_S = 86400.0
"""Longest time that a mark pins blocks after their last use."""
MAX_PROMPTS = 128
"""Most prompts of a call of the HTTP API; each is a request of its own."""

_MESSAGES = "kvrelay.v1.ChatPrompt.messages"
BOUNDS: Mapping[str, int] = {
    "kvrelay.v1.TokenIds.ids": MAX_PROMPT_TOKENS,
    _MESSAGES: MAX_CHAT_MESSAGES,
    "kvrelay.v1.ChatPrompt.tools": MAX_TOOLS,
    "kvrelay.v1.ChatMessage.tool_calls": MAX_TOOLS,
    "kvrelay.v1.GenerateRequest.cache_marks": MAX_CACHE_MARKS,
    "kvrelay.v1.Resume.samples": MAX_N,
    "kvrelay.v1.StreamTokensRequest.num_received": MAX_N,
} | {
    f"kvrelay.v1.SamplingParams.{each.option}": each.max_entries for each in PARAMETERS if each.max_entries is not None
}
"""Most entries of every repeated field and map that a client can send, by the field's full name.

Checked before anything else: a message of `router.max_message_mib` holds millions of small entries. `len` of a field
takes no time; sorting, copying or rendering its entries does, on the event loop that serves all requests.
"""


def check_bounds(message: Message, *, field: str = "") -> None:
    """Raise InvalidRequest, naming the field, when a field of a client's message has too many entries.

    `field` is the name of the message itself. Reads no entry of a field that is too long.
    """
    for descriptor in _bounded_fields(message.DESCRIPTOR):
        path = f"{field}.{descriptor.name}" if field else descriptor.name
        value: Any = getattr(message, descriptor.name)
        if not descriptor.is_repeated:
            if message.HasField(descriptor.name):
                check_bounds(value, field=path)
            continue
        check_length(len(value), BOUNDS[descriptor.full_name], field=path)
        if _has_bounds(descriptor):
            for position, entry in enumerate(value):
                check_bounds(entry, field=f"{path}[{position}]")
        if descriptor.full_name == _MESSAGES:
            check_length(sum(len(each.tool_calls) for each in value), MAX_CHAT_CALLS, field=f"{path}.tool_calls")


def check_length(num_entries: int, most: int, *, field: str) -> None:
    """Raise InvalidRequest when there are more than `most` entries."""
    if num_entries > most:
        raise InvalidRequest(f"{field} has {num_entries} entries; at most {most} are taken", field=field)


@cache
def _bounded_fields(descriptor: Descriptor) -> tuple[FieldDescriptor, ...]:
    """Return the fields with many entries, and those whose messages have such fields."""
    return tuple(field for field in descriptor.fields if field.is_repeated or _has_bounds(field))


@cache
def _has_bounds(field: FieldDescriptor) -> bool:
    """Whether the messages in a field have fields to check."""
    inner = field.message_type
    return inner is not None and not inner.GetOptions().map_entry and bool(_bounded_fields(inner))


_Convert = Callable[[Any], Any]
_Message = TypeVar("_Message", bound=Message)


def _same(value: Any) -> Any:
    return value


def _sorted_items(biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(biases.items()))


_FROM_PROTO: Mapping[Any, _Convert] = {Texts: tuple, Tokens: frozenset, Biases: _sorted_items}
_TO_PROTO: Mapping[Any, _Convert] = {Tokens: sorted, Biases: dict}
_READERS = {each.option: (each.name, _FROM_PROTO.get(each.type, _same)) for each in PARAMETERS}
_WRITERS = [(each.option, each.name, _TO_PROTO.get(each.type, _same)) for each in PARAMETERS]


def sampling_from_proto(message: sampling_pb2.SamplingParams, *, default_seed: int) -> SamplingParams:
    """Return the record with defaults filled in. Raises InvalidRequest for a field with too many entries.

    Values are not checked: call `validate`.
    """
    check_bounds(message, field="sampling")
    values: dict[str, Any] = {"seed": default_seed}
    for descriptor, value in message.ListFields():  # those that are set
        name, convert = _READERS[descriptor.name]
        values[name] = convert(value)
    return SamplingParams(**values)


def sampling_to_proto(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return the message with every field set."""
    return sampling_pb2.SamplingParams(
        **{option: convert(getattr(sampling, name)) for option, name, convert in _WRITERS}
    )


def pack_floats(values: npt.ArrayLike) -> bytes:
    """Return values as little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()


def unpack_floats(raw: bytes) -> npt.NDArray[np.float32]:
    """Invert `pack_floats`. Raises ValueError for a partial value."""
    return np.frombuffer(raw, dtype="<f4")


def message_of(kind: type[_Message], *sources: object, **given: Any) -> _Message:
    """Return a message with the given fields, and all others from attributes of the same names.

    A field is read from the first source that has it. Raises AttributeError for a field that no source has.
    """
    for name in _field_names(kind.DESCRIPTOR):
        if name not in given:
            given[name] = _first_named(name, sources)
    return kind(**given)


@cache
def _field_names(descriptor: Descriptor) -> tuple[str, ...]:
    return tuple(descriptor.fields_by_name)


def _first_named(name: str, sources: Sequence[object]) -> Any:
    """Return the attribute of the first source that has it. Raises AttributeError."""
    for source in sources[:-1]:
        try:
            return getattr(source, name)
        except AttributeError:
            continue
    return getattr(sources[-1] if sources else None, name)


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
