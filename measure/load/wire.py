"""What the load test and its generator processes tell each other: msgpack over pipes, a list with its kind first."""

import enum
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

from common.slo import Slo
from measure.load.player import Terms
from measure.load.records import Outcome, RequestRecord, ServerReport
from measure.load.targets.interface import Feature, TargetSpec
from measure.workload.sessions import Content, Segment, Session, Turn

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


def terms_to_wire(terms: Terms) -> dict[str, Any]:
    """Return plain values."""
    return asdict(terms) | {"content": str(terms.content)}


def terms_from_wire(raw: dict[str, Any]) -> Terms:
    """Invert `terms_to_wire`."""
    slo = Slo(**raw["slo"]) if raw["slo"] is not None else None
    return Terms(**raw | {"content": Content(raw["content"]), "slo": slo})


def session_to_wire(session: Session) -> Message:
    """Return plain values."""
    turns = [
        [[[segment.content, segment.num_tokens] for segment in turn.segments], turn.num_output_tokens, turn.think_s]
        for turn in session.turns
    ]
    return [session.index, session.kind, session.start_s, turns]


def session_from_wire(raw: Message) -> Session:
    """Invert `session_to_wire`."""
    index, kind, start_s, turns = raw
    return Session(
        index=index,
        kind=kind,
        start_s=start_s,
        turns=tuple(
            Turn(segments=tuple(Segment(*segment) for segment in segments), num_output_tokens=length, think_s=think_s)
            for segments, length, think_s in turns
        ),
    )


_RECORD_FIELDS = tuple(field.name for field in fields(RequestRecord))
_SERVER_FIELDS = tuple(field.name for field in fields(ServerReport))


def record_to_wire(record: RequestRecord) -> dict[str, Any]:
    """Return plain values; what the server does not say is left out."""
    raw = {name: getattr(record, name) for name in _RECORD_FIELDS}
    server = {name: value for name in _SERVER_FIELDS if (value := getattr(record.server, name)) is not None}
    return raw | {"outcome": str(record.outcome), "server": server}


def record_from_wire(raw: dict[str, Any]) -> RequestRecord:
    """Invert `record_to_wire`."""
    return RequestRecord(
        **raw
        | {
            "chunk_s": tuple(raw["chunk_s"]),
            "chunk_tokens": tuple(raw["chunk_tokens"]),
            "outcome": Outcome(raw["outcome"]),
            "server": ServerReport(**raw["server"]),
        }
    )


def target_to_wire(target: TargetSpec) -> dict[str, Any]:
    """Return plain values."""
    return asdict(target)


def target_from_wire(raw: dict[str, Any]) -> TargetSpec:
    """Invert `target_to_wire`."""
    features = raw["features"]
    return TargetSpec(**raw | {"features": None if features is None else tuple(map(Feature, features))})
