"""Messages between the load test and its generator processes: msgpack over pipes, lists that begin with their kind."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
from pydantic import TypeAdapter

from measure.load.player import RequestTerms
from measure.load.records import RequestRecord
from measure.load.targets.interface import TargetSpec
from measure.workload.sessions import Session

_T = TypeVar("_T", RequestTerms, Session, RequestRecord, TargetSpec)
Message = list[Any]


class GeneratorOrder(enum.IntEnum):
    """Message to a generator process, with its values."""

    SETUP = 0  # [target spec]: make a target; the process answers READY.
    BEGIN = 1  # [terms]: the clock of the run is known.
    PLAY = 2  # [session, closed loop or None]
    STOP = 3  # []: cancel everything.
    FINISH = 4  # []: report the rest and exit.


class Report(enum.IntEnum):
    """Message from a generator process, with its values."""

    READY = 0  # [whether it has real-time scheduling]
    RECORD = 1  # [request]
    SESSION_OVER = 2  # [closed loop or None]
    PULSE = 3  # [pulse]
    BYE = 4  # []: the last message.


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """Self-measurement of a process since the pulse before."""

    cpu_share: float
    loop_lags_s: list[float]
    """Delays of wake-ups at evenly spaced times; a stall counts for each missed one."""
    suspended_s: float
    """Time that the machine was suspended since the process began."""


class Unpacker:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=1 << 30)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that `data` completes."""
        self._unpacker.feed(data)
        yield from self._unpacker


def pack(kind: GeneratorOrder | Report, *values: Any) -> bytes:
    """Return a message."""
    packed: bytes = msgpack.packb([int(kind), *values])
    return packed


def to_wire(value: RequestTerms | Session | RequestRecord | TargetSpec) -> dict[str, Any]:
    """Return plain values; fields that are None are left out."""
    plain: dict[str, Any] = _ADAPTERS[type(value)].dump_python(value, exclude_none=True)
    return plain


def from_wire(kind: type[_T], raw: dict[str, Any]) -> _T:
    """Invert `to_wire`."""
    value: _T = _ADAPTERS[kind].validate_python(raw)
    return value


_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (RequestTerms, Session, RequestRecord, TargetSpec)
}
