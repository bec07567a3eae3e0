"""Most entries of each repeated field and map that a client can send: one table, checked before anything else.

A message of `router.max_message_mib` holds millions of small entries. `len` of a field takes no time; sorting, copying
or rendering its entries does, on the event loop that serves all requests.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor
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


class _Field(NamedTuple):
    """A field with many entries, or with messages that have such fields."""

    name: str
    most: int | None
    """None for a single message."""
    holds_more: bool
    """Whether its messages have such fields."""


def check_bounds(message: Message, *, field: str = "") -> None:
    """Raise InvalidRequest, naming the field, when a field of a client's message has too many entries.

    `field` is the name of the message itself. Reads no entry of a field that is too long.
    """
    for name, most, holds_more in _fields(message.DESCRIPTOR):
        path = f"{field}.{name}" if field else name
        if most is None:
            if message.HasField(name):
                check_bounds(getattr(message, name), field=path)
            continue
        entries: Any = getattr(message, name)
        check_length(len(entries), most, field=path)
        if holds_more:
            for position, entry in enumerate(entries):
                check_bounds(entry, field=f"{path}[{position}]")


def check_length(num_entries: int, most: int, *, field: str) -> None:
    """Raise InvalidRequest when there are more than `most`."""
    if num_entries > most:
        raise InvalidRequest(f"{field} has {num_entries} entries; at most {most} are taken", field=field)


@cache
def _fields(descriptor: Descriptor) -> tuple[_Field, ...]:
    """Return the fields to check. Raises KeyError for one that is not in the table."""
    found = []
    for field in descriptor.fields:
        inner = field.message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        holds_more = inner is not None and not is_map and bool(_fields(inner))
        if field.is_repeated:
            found.append(_Field(field.name, most=BOUNDS[field.full_name], holds_more=holds_more))
        elif holds_more:
            found.append(_Field(field.name, most=None, holds_more=True))
    return tuple(found)
