"""Tickets in fuzzed messages. Templates hold a word in their place; what is signed is what a message asks for then."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError, Message

from common.ids import Epoch, HandoffId, WorkerId
from common.trust.identity import Role
from common.trust.tickets import ANY_CACHED, PullRight, issuer, of_blocks, of_handoff
from kvrelay.v1 import decode_pb2, kv_transfer_pb2, prefill_pb2, prefix_pb2, sequence_pb2
from tests.fuzz.callers import WORKER
from tests.fuzz.members import credentials_of
from tests.fuzz.play import Step
from tests.fuzz.source import Source

RIGHT = "ticket"
_FOR_CACHE = "ticket-for-cache"


def _as(role: Role) -> Callable[[PullRight], str]:
    return issuer(lambda: credentials_of(role, f"{role}-0").held.signer)


_router, _controller, _worker = _as(Role.ROUTER), _as(Role.CONTROLLER), _as(Role.WORKER)
_KINDS: Mapping[str, Callable[[PullRight], str]] = {
    RIGHT: _router,
    _FOR_CACHE: lambda right: _controller(replace(right, subject=ANY_CACHED)),
    "ticket-for-cache-of-router": lambda right: _router(replace(right, subject=ANY_CACHED)),
    "ticket-of-worker": _worker,
    "ticket-of-controller": _controller,
    "ticket-for-another": lambda right: _router(replace(right, puller=WorkerId("prefill-9"))),
    "ticket-from-another": lambda right: _router(replace(right, source=WorkerId("prefill-9"))),
    "ticket-for-another-life": lambda right: _router(replace(right, epoch=Epoch(right.epoch ^ 1))),
    "ticket-for-something-else": lambda right: _router(replace(right, subject=of_blocks(b"x" * 16))),
    "ticket-damaged": lambda right: _router(right)[:-40] + "A" * 40,
}
WORDS = (RIGHT, RIGHT, *_KINDS, "", "x", "a.b.c", "x" * 7000)
"""Tickets that hints offer; those outside `_KINDS` are sent unchanged."""
_PULLING: Mapping[str, type[Message]] = {
    "DecodeMany": decode_pb2.DecodeManyRequest,
    "Prefill": prefill_pb2.PrefillRequest,
    "PullPrefixes": prefix_pb2.PullPrefixesRequest,
    "FetchBlocks": kv_transfer_pb2.FetchBlocksRequest,
}
_Parts = decode_pb2.Handoff | sequence_pb2.KvSource | kv_transfer_pb2.OpenFetch


def with_tickets(step: Step, source: Source) -> Step:
    """Return a call to a worker with its tickets signed; what is not right about them comes from an input's end.

    Pullers of the worker are `WORKER`; where a message has the worker pull, it is the puller.
    """
    kind = _PULLING.get(step.method.rpartition("/")[2])
    if kind is None:
        return step
    word = source.choose(WORDS) if source.byte() >= 192 else RIGHT
    worker = step.target.partition(":")[0]
    signed = [_sign(raw, kind(), worker=worker, word=word) for raw in step.messages]
    return replace(step, messages=tuple(raw for raw, _ in signed), may_pull=signed[0][1])


def _sign(raw: bytes, message: Message, *, worker: str, word: str) -> tuple[bytes, bool]:
    """Return a message with its tickets, and whether it may open a pull."""
    try:
        message.ParseFromString(raw)
    except (DecodeError, UnicodeDecodeError):
        return raw, True
    may_pull = True
    parts = list(_parts(message))
    for part in parts:
        right = _right_of(part, worker)
        if part.ticket == RIGHT:
            part.ticket = word
        if isinstance(part, kv_transfer_pb2.OpenFetch):
            may_pull = part.ticket == RIGHT or (part.ticket == _FOR_CACHE and not part.handoff_id)
        if part.ticket in _KINDS:
            part.ticket = _KINDS[part.ticket](right)
    return (message.SerializeToString() if parts else raw), may_pull


def _right_of(part: _Parts, worker: str) -> PullRight:
    if isinstance(part, kv_transfer_pb2.OpenFetch):
        subject = of_handoff(HandoffId(part.handoff_id)) if part.handoff_id else of_blocks(part.block_hashes)
        return PullRight(puller=WorkerId(WORKER), source=WorkerId(worker), epoch=Epoch(part.epoch), subject=subject)
    if isinstance(part, decode_pb2.Handoff):
        source, epoch, subject = part.prefill_worker_id, part.prefill_epoch, of_handoff(HandoffId(part.handoff_id))
    else:
        source, epoch, subject = part.worker_id, part.epoch, ANY_CACHED
    return PullRight(puller=WorkerId(worker), source=WorkerId(source), epoch=Epoch(epoch), subject=subject)


def _parts(message: Any) -> Iterator[_Parts]:
    if isinstance(message, _Parts):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None and not field.is_repeated:
            yield from _parts(value)
