"""Reads what bodies of OpenAI's API say of the prompt cache: how long a prompt stays cached, and breakpoints in it.

Without such options nothing is marked; prefixes are cached all the same. A breakpoint stands where the conversation
would end if it ended with its part: each endpoint's own reader tells that place.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from common.errors import InvalidRequest
from common.wire import MAX_CACHE_MARKS
from kvrelay.v1 import inference_pb2 as pb
from router.http.strict import Strict, field_path

TTLS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0, "24h": 86400.0}
"""Times that a prefix may be asked to stay cached, seconds."""
DEFAULT_TTL = "30m"
_MEMBERS = ("content", "output")
"""Members of messages and items that are text, or parts."""
_POINT = "prompt_cache_breakpoint"
_Place = tuple[int, str, int]
"""Message or item, its member, and the part there."""
Retention = Annotated[Literal["in_memory", "in-memory", "24h"] | None, Field()]
Texts = Callable[[list[Any]], list[str]]
"""Returns the texts of the chat's messages that some messages or items of a body become."""


class CacheOptions(Strict):
    """`prompt_cache_options`."""

    mode: Literal["implicit", "explicit"] | None = None
    """`implicit` marks the end of the prompt, too; `explicit` breakpoints alone."""
    ttl: Literal["5m", "30m", "1h", "12h", "24h"] | None = None
    """Time after the last use for which marked prefixes stay pinned; default `30m`."""
    prewarm: Literal[False] | None = None
    """Only `false`: every request has an answer."""
    comparison_response_id: str | None = None
    """Ignored: there are no diagnostics of single responses."""


class Cached(Protocol):
    """A body with options of the prompt cache."""

    @property
    def prompt_cache_retention(self) -> Retention:
        """`24h` marks the end of the prompt for a day."""
        ...

    @property
    def prompt_cache_options(self) -> CacheOptions | None:
        """How breakpoints are taken."""
        ...


def cache_marks(body: Cached, given: Any, field: str, texts: Texts) -> list[pb.CacheMark]:
    """Return the marks of a body whose field holds this conversation: of its breakpoints the latest.

    Raises InvalidRequest.
    """
    options = body.prompt_cache_options or CacheOptions()
    ttl = TTLS[options.ttl or DEFAULT_TTL]
    whole = [TTLS["24h"]] if body.prompt_cache_retention == "24h" else []
    if body.prompt_cache_options is not None and options.mode != "explicit":
        whole.append(ttl)
    marks = [pb.CacheMark(ttl_s=max(whole))] if whole else []
    for (position, name, number), ttl_s in deque(_breakpoints(given, field, ttl), MAX_CACHE_MARKS - len(marks)):
        message = given[position]
        made = texts([*given[:position], {**message, name: message[name][: number + 1]}])
        if not made:
            where = field_path(field, position, name, number, _POINT)
            raise InvalidRequest(f"{where} is in an item that the model is not told of", field=where)
        end = pb.MessageEnd(index=len(made) - 1, num_chars=len(made[-1]))
        marks.append(pb.CacheMark(message=end, ttl_s=ttl_s))
    return marks


def _breakpoints(given: Any, field: str, ttl_s: float) -> Iterator[tuple[_Place, float]]:
    """Yield place and time of each breakpoint of a conversation that was read. There may be one in each part."""
    for position, message in enumerate(given if isinstance(given, list) else ()):
        for name in _MEMBERS:
            parts = message.get(name)
            for number, part in enumerate(parts if isinstance(parts, list) else ()):
                if (point := part.get(_POINT)) is not None:
                    place = position, name, number
                    yield place, _ttl_s(point, (field, *place, _POINT), ttl_s)


def _ttl_s(point: Any, path: tuple[str | int, ...], default_s: float) -> float:
    if not isinstance(point, Mapping) or (point.get("mode") or "explicit") != "explicit":
        where = field_path(*path)
        raise InvalidRequest(f'{where} must be {{"mode": "explicit"}}', field=where)
    ttl = point.get("ttl")
    if ttl is None:
        return default_s
    if not isinstance(ttl, str) or ttl not in TTLS:
        where = field_path(*path, "ttl")
        raise InvalidRequest(f"{where} must be one of {', '.join(TTLS)}", field=where)
    return TTLS[ttl]
