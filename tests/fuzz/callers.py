"""Callers of fuzzed calls: most show a proof of the right role and a right ticket, the others anything else.

What is drawn here comes from the end of an input, behind all other decisions; where nothing is left all is right."""

import base64
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import DecodeError, Message

from common.ids import Epoch, HandoffId, WorkerId
from common.trust.access import METHODS
from common.trust.authority import Authority
from common.trust.credentials import Credentials
from common.trust.identity import Role
from common.trust.proofs import METADATA_KEY, PROOF_LIFETIME_S, audience_of
from common.trust.tickets import ANY_CACHED, PullRight, issuer, of_blocks, of_handoff
from kvrelay.v1 import decode_pb2, kv_transfer_pb2, prefill_pb2, prefix_pb2, sequence_pb2
from tests.fuzz.members import AUTHORITY, DENIED, credentials_of
from tests.fuzz.messages import Source
from tests.fuzz.play import Step

WORKER = "decode-0"
"""The caller of what only workers may call."""
_INSIDERS = (Role.ROUTER, Role.WORKER, Role.CONTROLLER, Role.OPERATOR)
_STRANGERS = Authority.new(AUTHORITY.settings)
"""Another cluster that has the same name."""
_X5C: Sequence[Any] = (None, [], "", [""], ["AAAA"], [None], 5, {"0": "x"}, ["\ud800"])
_EXP: Sequence[Any] = (None, 2**60, "x", "2147483647", -1, 1e300, [], {}, float("inf"), float("nan"))
_ODD: Sequence[Any] = (None, 2**60, "x", [], {"x": 1})
_CRITICAL: Sequence[Any] = (["exp"], False, 5, {"k": []})
_FIELDS: Sequence[tuple[int, str, Any]] = (
    *((0, "alg", value) for value in ("none", "HS256", "ES512", "", None, 5)),
    *((0, "x5c", value) for value in _X5C),
    *((0, name, value) for name in ("crit", "typ", "b64", "kid", "jwk") for value in _CRITICAL),
    *((1, "sub", value) for value in ("spiffe://test/controller/x", "", None, 7, "spiffe://test/root/x", ["x"])),
    *((1, "aud", value) for value in ("", None, 5, [], ["worker:1", "router:1"], {"worker:1": 1})),
    *((1, "exp", value) for value in _EXP),
    *((1, name, value) for name in ("nbf", "iat", "iss", "jti") for value in _ODD),
)
_signed: dict[tuple[Role, str, str], tuple[str, float]] = {}


def audience_at(address: str) -> str:
    """Return what a proof for a listener names."""
    return audience_of(Role.ROUTER if address.startswith("router") else Role.WORKER, address)


def proof_of(role: Role, audience: str) -> str:
    """Return a proof for a caller with a role; the same one for half of its life."""
    name = WORKER if role is Role.WORKER else f"{role}-0"
    return _proof(credentials_of(role, name), audience, "")


def _proof(credentials: Credentials, audience: str, kind: str, *, lifetime_s: float = PROOF_LIFETIME_S) -> str:
    key = (credentials.identity.role, audience, kind)
    known = _signed.get(key)
    if known is None or known[1] < time.monotonic():
        made = credentials.held.signer.sign({}, audience=audience, lifetime_s=lifetime_s)
        known = _signed[key] = made, time.monotonic() + PROOF_LIFETIME_S / 2
    return known[0]


def right_role(method: str) -> Role:
    """Return a role that may call a method."""
    return min(METHODS[method])


def right_metadata(method: str, address: str) -> tuple[tuple[str, Any], ...]:
    """Return what a caller shows that may call an inside method."""
    return ((METADATA_KEY, proof_of(right_role(method), audience_at(address))),)


def with_proof(step: Step, source: Source) -> Step:
    """Return a call with what its caller shows."""
    way, role = source.byte(), right_role(step.method)
    if way < 192:
        return (
            step
            if role is Role.CLIENT
            else dataclasses.replace(step, metadata=right_metadata(step.method, step.target))
        )
    shown = _WRONG[source.below(len(_WRONG))](source, step)
    metadata = () if shown is None else ((METADATA_KEY, shown),)
    if role is Role.CLIENT:  # not checked
        return dataclasses.replace(step, metadata=metadata)
    return dataclasses.replace(step, metadata=(*metadata, DENIED), is_denied=True)


def _of_a_stranger(_source: Source, step: Step) -> str:
    role = _insider(step.method)
    stranger = _strangers.get(role) or _strangers.setdefault(role, Credentials.of(_STRANGERS, role, "x"))
    return _proof(stranger, audience_at(step.target), "stranger")


_strangers: dict[Role, Credentials] = {}


def change_fields(token: str, source: Source) -> str:
    """Return a token with a field or a few changed, and the same signature or none."""
    parts = token.split(".")
    fields = [json.loads(base64.urlsafe_b64decode(part + "==")) for part in parts[:2]]
    for _ in range(1 + source.below(3)):
        part, name, value = source.choose(_FIELDS)
        fields[part][name] = value
    if source.byte() % 8 == 7:
        fields[source.below(2)] = source.choose(([], None, 5, "x", [[]] * 50))
    parts[:2] = [encoded(json.dumps(each).encode()) for each in fields]
    if source.byte() % 4 == 3:
        parts[2] = ""
    return ".".join(parts)


def encoded(raw: bytes) -> str:
    """Return bytes as a token has them."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _insider(method: str) -> Role:
    role = right_role(method)
    return Role.ROUTER if role is Role.CLIENT else role


def _raw(source: Source, _step: Step) -> Any:
    raw = source.take(source.below(64))
    return source.choose((raw, raw.decode("latin-1"), "a.b.c", "x" * 7000, "." * 4000, "\ud800"))


_OTHERS = ("worker:x:1", "worker:prefill-9:1", "router:2", "door", "kv", "", "controller:1", "worker:1")
"""Listeners that no call is for."""
_WRONG: Sequence[Callable[[Source, Step], Any]] = (
    lambda _source, _step: None,
    lambda source, step: proof_of(
        source.choose([role for role in _INSIDERS if role not in METHODS[step.method]]), audience_at(step.target)
    ),
    lambda source, step: proof_of(_insider(step.method), source.choose(_OTHERS)),
    _of_a_stranger,
    lambda _source, step: _proof(
        credentials_of(_insider(step.method), "x"), audience_at(step.target), "expired", lifetime_s=-1000
    ),
    _raw,
)
"""Proofs that a call may not be made with; the target "trust" has changed ones. Their order is part of kept inputs."""


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
