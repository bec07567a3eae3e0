"""Most entries of each repeated field and map that a client can send: one table, checked before anything else.

A message of `router.max_message_mib` holds millions of small entries. `len` of a field takes no time; sorting, copying
or rendering its entries does, on the event loop that serves all requests.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from common.errors import InvalidRequest
from common.sampling import MAX_N, PARAMETERS

MAX_PROMPT_TOKENS = 1 << 24
"""Far beyond every model; its own context length is checked next, also by `len`."""
MAX_CHAT_MESSAGES = 4096
"""A template runs once per message: rendering this many takes 0.1 s."""
MAX_CONTENT_PARTS = 1024
"""Most parts of a message of the HTTP API."""
MAX_PROMPTS = 128
"""Most prompts of a call of the HTTP API; each is a request of its own."""

BOUNDS: Mapping[str, int] = {
    "kvrelay.v1.TokenIds.ids": MAX_PROMPT_TOKENS,
    "kvrelay.v1.ChatPrompt.messages": MAX_CHAT_MESSAGES,
    "kvrelay.v1.Resume.samples": MAX_N,
    "kvrelay.v1.StreamTokensRequest.num_received": MAX_N,
} | {
    f"kvrelay.v1.SamplingParams.{each.option}": each.max_entries for each in PARAMETERS if each.max_entries is not None
}
"""Most entries of every repeated field and map that a client can send, by the field's full name."""


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


def check_length(num_entries: int, most: int, *, field: str) -> None:
    """Raise InvalidRequest when there are more than `most`."""
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
