"""Converts messages to records."""

import dataclasses
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import grpc

from common.errors import EngineFault, InvalidRequest, KvrelayError, Unreachable, from_rpc_error
from common.wire_names import FINISH_REASON_NAMES, PLAN_KIND_NAMES, ROLE_NAMES, TRANSPORT_NAMES, FinishReason, PlanKind
from kvrelay.client.events import (
    Accepted,
    Completed,
    Event,
    PlanChosen,
    PositionLogprobs,
    PromptLogprobs,
    Queued,
    RequestTimings,
    Token,
    TokenRun,
    TransferStats,
    Usage,
)
from kvrelay.client.results import Embedding
from kvrelay.client.status import LinkRate, WorkerView
from kvrelay.v1 import inference_pb2

_R = TypeVar("_R")
_Read = Callable[[Any], Any]
_ENUMS: Mapping[Any, Mapping[int, Any]] = {
    PlanKind: {number: PlanKind(name) for number, name in PLAN_KIND_NAMES.items()},
    FinishReason: {number: FinishReason(name) for number, name in FINISH_REASON_NAMES.items()},
}
_FIELDS: Mapping[tuple[type, str], _Read] = {
    (Accepted, "defaults"): lambda message: {field.name: value for field, value in message.defaults.ListFields()},
    (WorkerView, "role"): lambda message: ROLE_NAMES.get(message.role, "unknown"),
    (TransferStats, "transport"): lambda message: (
        TRANSPORT_NAMES.get(message.transport) if message.num_blocks else None
    ),
    (LinkRate, "transport"): lambda message: TRANSPORT_NAMES.get(message.transport, ""),
    (TokenRun, "token_ids"): lambda message: struct.unpack(f"<{len(message.tokens) // 4}I", message.tokens),
    (Embedding, "vector"): lambda message: struct.unpack(f"<{len(message.embedding) // 4}f", message.embedding),
    (Embedding, "usage"): lambda message: record(Usage, message.completed.usage),
    (Embedding, "timings"): lambda message: record(RequestTimings, message.completed.timings),
    (Embedding, "num_attempts"): lambda message: message.completed.num_attempts,
}
"""Readers of the fields that differ from their message's."""


def record(cls: type[_R], message: Any) -> _R:
    """Return a record with the message's fields of the same names, nested records included.

    A field that may be None is None when the message's is not set, or zero or empty where it cannot be unset.
    Raises EngineFault for an enum value that this client does not know.
    """
    return cls(**{name: read(message) for name, read in _readers(cls)})  # type: ignore[arg-type]  # it is hashable


def events_from_proto(message: inference_pb2.GenerateResponse) -> Iterator[Event]:
    """Yield the events of one message. Raises EngineFault for an enum value that this client does not know."""
    match message.WhichOneof("event"):
        case "accepted":
            yield record(Accepted, message.accepted)
        case "queued":
            yield record(Queued, message.queued)
        case "plan":
            yield record(PlanChosen, message.plan)
        case "tokens":
            if message.tokens.prompt_logprobs:
                positions = tuple(record(PositionLogprobs, position) for position in message.tokens.prompt_logprobs)
                yield PromptLogprobs(positions=positions)
            for token in message.tokens.tokens:
                yield record(Token, token)
            for run in message.tokens.runs:
                yield record(TokenRun, run)
        case "completed":
            yield record(Completed, message.completed)
        case _:
            return  # an event of a newer server; what this client knows still arrives


@cache
def _readers(cls: type) -> tuple[tuple[str, _Read], ...]:
    return tuple(
        (name, _FIELDS.get((cls, name)) or _field_reader(name, hint)) for name, hint in get_type_hints(cls).items()
    )


def _field_reader(name: str, hint: Any) -> _Read:
    """Return the reader of a field of that type."""
    if NoneType not in get_args(hint):
        convert = _converter(hint)
        return lambda message: convert(getattr(message, name))
    (given,) = (each for each in get_args(hint) if each is not NoneType)
    convert_given = _converter(given)

    def read(message: Any) -> Any:
        has_presence = message.DESCRIPTOR.fields_by_name[name].has_presence
        is_given = message.HasField(name) if has_presence else getattr(message, name)
        return convert_given(getattr(message, name)) if is_given else None

    return read


def _converter(hint: Any) -> _Read:
    """Return the conversion from a message's value to that type."""
    if dataclasses.is_dataclass(hint):
        return lambda message: record(hint, message)  # type: ignore[arg-type]  # a class, as hints are
    if hint in _ENUMS:
        return lambda number: _enum(hint, number)
    if get_origin(hint) is tuple:
        convert = _converter(get_args(hint)[0])
        return lambda values: tuple(map(convert, values))
    return dict if get_origin(hint) is Mapping else lambda value: value


def _enum(kind: Any, number: int) -> Any:
    value = _ENUMS[kind].get(number)
    if value is None:
        what = {PlanKind: "plan kind", FinishReason: "finish reason"}[kind]
        raise EngineFault(f"the server sent {what} {number}, which this client does not know; upgrade the client")
    return value


def error_from_rpc(error: grpc.RpcError, *, address: str) -> KvrelayError:
    """Return the typed error of a failed call to the front door at `address`."""
    known = from_rpc_error(error, unavailable=Unreachable)
    if isinstance(known, Unreachable):
        return Unreachable(f"no kvrelay cluster answers at {address}: {known.message}{_tls_hint(known.message)}")
    if "larger than max" in known.message and known.retry_after_s is None:
        # gRPC itself refuses a message over the server's limit, as RESOURCE_EXHAUSTED; trying again cannot help
        return InvalidRequest(f"the request is too large: {known.message}")
    return known


_TLS_HINTS = {
    "WRONG_VERSION_NUMBER": "it does not use TLS; connect without",
    "CERTIFICATE_VERIFY_FAILED": "the given certificates do not vouch for it, or not for this address",
    "Hostname Verification": "its certificate is for other names: use one of those, or add this one to tls.names",
    "Socket closed": "if it uses TLS, name the certificates that vouch for it: --ca, KVRELAY_CA or tls=",
}


def _tls_hint(message: str) -> str:
    return next((f" ({hint})" for sign, hint in _TLS_HINTS.items() if sign in message), "")
