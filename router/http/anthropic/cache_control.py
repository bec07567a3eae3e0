"""Reads the marks of a body, `cache_control`, in the order of a prompt: tools, system, messages, and the whole of it.

What is before a marked block is what the conversation would be if the body ended there: turns.py reads it so.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from common.wire import MAX_CACHE_MARKS
from kvrelay.v1 import inference_pb2 as pb
from router.http.anthropic.schema import CACHE_TTLS, MessagesBody
from router.http.anthropic.turns import read_turns
from router.http.strict import field_path

DEFAULT_TTL = "5m"
_ANYTHING = {"role": "user", "content": "-"}


def read_marks(body: MessagesBody) -> list[pb.CacheMark]:
    """Return the marks of a body whose conversation was read. Raises InvalidRequest that names the field."""
    marks: list[pb.CacheMark] = []
    for where, mark in _marks(body):
        if len(marks) == MAX_CACHE_MARKS:
            raise InvalidRequest(f"{where} is one mark too many; at most {MAX_CACHE_MARKS} are taken", field=where)
        marks.append(mark)
    return marks


def _marks(body: MessagesBody) -> Iterator[tuple[str, pb.CacheMark]]:
    for position, tool in enumerate(body.tools or ()):
        if tool.cache_control is not None:
            where = f"{field_path('tools', position)}.cache_control"
            yield where, pb.CacheMark(num_tools=position + 1, ttl_s=_ttl_s(tool.cache_control, where))
    for where, ttl_s, before in _marked(body.system, "system"):
        turn = read_turns(before, [_ANYTHING])[0]
        if turn is not _ANYTHING and turn["role"] == "system":
            yield where, pb.CacheMark(message=pb.MessageEnd(index=0, num_chars=len(turn["content"])), ttl_s=ttl_s)
        else:  # what its blocks say is left out
            yield where, pb.CacheMark(message=pb.MessageEnd(index=0, num_chars=0), ttl_s=ttl_s)
    for position, message in enumerate(body.messages):
        for where, ttl_s, before in _marked(message["content"], f"{field_path('messages', position)}.content"):
            turns = read_turns(body.system, [*body.messages[:position], {**message, "content": before}])
            end = pb.MessageEnd(index=len(turns) - 1)
            if not turns[-1].get("tool_calls"):
                end.num_chars = len(turns[-1]["content"])
            yield where, pb.CacheMark(message=end, ttl_s=ttl_s)
    if body.cache_control is not None:
        yield "cache_control", pb.CacheMark(ttl_s=_ttl_s(body.cache_control, "cache_control"))


def _marked(content: Any, where: str) -> Iterator[tuple[str, float, list[Any]]]:
    """Yield place and time of each mark in some content, with the content up to there, the marked block included."""
    for position, block in enumerate(content if isinstance(content, list) else ()):
        if block["type"] == "tool_result":
            for inner, ttl_s, returned in _marked(block.get("content"), f"{field_path(where, position)}.content"):
                yield inner, ttl_s, [*content[:position], {**block, "content": returned}]
        if (given := block.get("cache_control")) is not None:
            inner = f"{field_path(where, position)}.cache_control"
            yield inner, _ttl_s(given, inner), content[: position + 1]


def _ttl_s(given: Any, where: str) -> float:
    """Return the time of a mark. Raises InvalidRequest."""
    if not isinstance(given, Mapping) or given.get("type") != "ephemeral":
        raise InvalidRequest(f'{where}.type must be "ephemeral"', field=f"{where}.type")
    ttl = given.get("ttl") or DEFAULT_TTL
    if not isinstance(ttl, str) or ttl not in CACHE_TTLS:
        raise InvalidRequest(f"{where}.ttl must be one of {', '.join(CACHE_TTLS)}", field=f"{where}.ttl")
    return CACHE_TTLS[ttl]


def creation_by_ttl(writes: Sequence[pb.CacheWrite]) -> dict[str, int]:
    """Return the written tokens as usage tells them, by the times that a mark may have."""
    found = {write.ttl_s: write.num_tokens for write in writes}
    return {f"ephemeral_{name}_input_tokens": found.get(ttl_s, 0) for name, ttl_s in CACHE_TTLS.items()}
