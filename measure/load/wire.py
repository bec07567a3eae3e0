"""What the load test and its generator processes tell each other: msgpack over pipes, a list with its kind first."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
from pydantic import TypeAdapter

from measure.load.player import Terms
from measure.load.records import RequestRecord
from measure.load.targets.interface import TargetSpec
from measure.workload.sessions import Session

_T = TypeVar("_T", Terms, Session, RequestRecord, TargetSpec)
Message = list[Any]


class Order(enum.IntEnum):
    """To a generator process."""

    SETUP = 0
    """[target spec, first token, number of tokens]: make a target; answered with READY."""
    BEGIN = 1
    """[terms]: the run's clock is known."""
    PLAY = 2
    """[session]"""
    PLAY_IN_PLACE = 3
    """[stream, session]"""
    GRANT = 4
    """[stream, places]"""
    ASK_BACK = 5
    """[stream, places]"""
    STOP = 6
    """[]: cancel everything."""
    FINISH = 7
    """[]: report the rest and exit."""


class Report(enum.IntEnum):
    """From a generator process."""

    READY = 0
    """[whether it runs before others on its core]"""
    RECORD = 1
    """[request]"""
    SESSION_OVER = 2
    """[stream or None]"""
    SESSION_BEGUN = 3
    """[stream]"""
    PLACE_RETURNED = 4
    """[stream]"""
    PULSE = 5
    """[pulse]"""
    BYE = 6
    """[]: the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """How a process did since the pulse before."""

    cpu_share: float
    """Of one core."""
    loop_lags_s: list[float]
    """How late it woke at evenly spaced times; a stall counts for each of them."""
    suspended_s: float
    """How long the machine slept since the process began."""


class Unpacker:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=1 << 30)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that `data` completes."""
        self._unpacker.feed(data)
        yield from self._unpacker


def pack(kind: Order | Report, *values: Any) -> bytes:
    """Return a message."""
    packed: bytes = msgpack.packb([int(kind), *values])
    return packed


def to_wire(value: Terms | Session | RequestRecord | TargetSpec) -> dict[str, Any]:
    """Return plain values; what is None is left out."""
    plain: dict[str, Any] = _ADAPTERS[type(value)].dump_python(value, exclude_none=True)
    return plain


def from_wire(kind: type[_T], raw: dict[str, Any]) -> _T:
    """Invert `to_wire`."""
    value: _T = _ADAPTERS[kind].validate_python(raw)
    return value


_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (Terms, Session, RequestRecord, TargetSpec)
}
