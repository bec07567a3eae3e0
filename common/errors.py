"""The one exception tree, and its mapping to and from gRPC status.

KvrelayError
├── RequestError              the caller's fault; nothing is computed
│   ├── InvalidRequest        a field has a bad value               INVALID_ARGUMENT + BadRequest(field)
│   ├── PromptTooLong         prompt does not fit                   INVALID_ARGUMENT + BadRequest(field)
│   └── UnknownModel          no such model is served               NOT_FOUND
├── AccessDenied              a capability is wrong or has expired  PERMISSION_DENIED
├── ClientGone                a client left its direct stream       CANCELLED
├── Unauthenticated           no identity, or an unknown one        UNAUTHENTICATED
├── Overloaded                refused for now, retry later          RESOURCE_EXHAUSTED + RetryInfo
├── DeadlineExceeded          the caller's deadline passed          DEADLINE_EXCEEDED
├── Cancelled                 the caller went away                  CANCELLED
├── Unreachable               no connection to the front door       UNAVAILABLE
├── TransferError
│   ├── KvIncomplete          bytes missing or wrong                DATA_LOSS
│   │   └── KvCorrupt         bytes changed on the way              DATA_LOSS
│   ├── HandoffGone           handoff unknown, expired or aborted   ABORTED
│   └── LayoutMismatch        blocks of another shape               FAILED_PRECONDITION
└── WorkerError
    ├── StaleEpoch            the worker was restarted              FAILED_PRECONDITION
    ├── WorkerLost            a worker died or went away            UNAVAILABLE
    └── EngineFault           a step failed                         INTERNAL
        └── CrashSuspected    it seems to end its workers           INTERNAL

The status carries ErrorInfo(reason=<class name>, domain="kvrelay"), so a client gets the same class back.
Inside a process a refusal is a value (`Refused`); it becomes `Overloaded` only at the edge.
"""

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "kvrelay"
_DETAILS_KEY = "grpc-status-details-bin"
_MAX_MESSAGE_CHARS = 512


class KvrelayError(Exception):
    """Anything that kvrelay reports to a caller."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self, message: str, *, field: str = "", retry_after_s: float | None = None, spent_s: float = 0.0
    ) -> None:
        """`spent_s`: CPU seconds that a worker has spent on the caller before it refused."""
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.spent_s = spent_s


class RequestError(KvrelayError):
    """The request cannot be served as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class InvalidRequest(RequestError):
    """A field has a value that is not allowed."""


class PromptTooLong(RequestError):
    """The prompt, or prompt and answer together, do not fit the model or the pages."""


class UnknownModel(RequestError):
    """The model is not served here."""

    code = grpc.StatusCode.NOT_FOUND


class Unauthenticated(KvrelayError):
    """The caller did not prove its identity. The message never repeats its credentials."""

    code = grpc.StatusCode.UNAUTHENTICATED


class AccessDenied(KvrelayError):
    """The caller's credentials do not, or no longer, allow the call."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ClientGone(KvrelayError):
    """A client that streams its tokens from the worker did not connect, or left and did not return."""

    code = grpc.StatusCode.CANCELLED


class Overloaded(KvrelayError):
    """Refused for now; `retry_after_s` says when to try again."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(KvrelayError):
    """The caller's deadline, or the server's own limit on a wait, has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(KvrelayError):
    """The caller cancelled."""

    code = grpc.StatusCode.CANCELLED


class Unreachable(KvrelayError):
    """A client has no connection to the cluster's front door, or it broke, or the router dropped the call."""

    code = grpc.StatusCode.UNAVAILABLE


class TransferError(KvrelayError):
    """KV blocks did not arrive."""

    code = grpc.StatusCode.ABORTED


class KvIncomplete(TransferError):
    """Blocks are missing, or their checksums or manifest do not match. Never decode from them."""

    code = grpc.StatusCode.DATA_LOSS


class KvCorrupt(KvIncomplete):
    """Bytes do not match their checksum, or come out of order. Both workers were alive then."""


class HandoffGone(TransferError):
    """The handoff is unknown: aborted, expired or of another epoch."""


class LayoutMismatch(TransferError):
    """The two workers' blocks have different shapes or come from different weights."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class WorkerError(KvrelayError):
    """A worker cannot serve."""

    code = grpc.StatusCode.UNAVAILABLE


class StaleEpoch(WorkerError):
    """The worker was restarted since its last report to the caller."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class WorkerLost(WorkerError):
    """The connection to a worker broke, or a pool has no worker."""


class EngineFault(WorkerError):
    """An engine step failed; its requests end, the worker continues."""

    code = grpc.StatusCode.INTERNAL


class CrashSuspected(EngineFault):
    """Worker after worker was lost while computing this request; it is not tried again."""


class RefusalCause(enum.Enum):
    """Reason of a refusal; a label of metrics."""

    NO_ROOM = "no_room"
    """No worker can take it now."""
    BUSY = "busy"
    """Workers could take it but are busy with other prompts: it waits in line, where its turn can still change."""
    SATURATED = "saturated"
    """The workers run as many answers as they may: no other request that waits for their pool gets a plan, either."""
    QUEUE_FULL = "queue_full"
    """Too many requests of all tenants wait."""
    TENANT_QUEUE_FULL = "tenant_queue_full"
    REQUEST_RATE = "request_rate"
    TOKEN_RATE = "token_rate"
    DEADLINE = "deadline"
    """The first token would come after the caller's own deadline, on every worker."""
    SLO = "slo"
    """The first token would come later than the request's objective, on every worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A refusal as a value."""

    reason: str
    retry_after_s: float
    cause: RefusalCause = RefusalCause.NO_ROOM

    @property
    def is_final(self) -> bool:
        """Whether the caller gets the refusal at once, because waiting in line cannot help."""
        return self.cause not in (RefusalCause.NO_ROOM, RefusalCause.BUSY, RefusalCause.SATURATED)

    def error(self) -> Overloaded:
        """Return the exception for a caller outside of the process."""
        return Overloaded(self.reason, retry_after_s=self.retry_after_s)


def error_classes() -> list[type[KvrelayError]]:
    """Return every class of the tree, root first; subclasses in other modules do not travel and are left out."""
    found: list[type[KvrelayError]] = [KvrelayError]
    for cls in found:
        found.extend(each for each in cls.__subclasses__() if each.__module__ == __name__)
    return found


def to_status(error: KvrelayError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return (code, message, trailing metadata) that carry `error` over gRPC.

    Long messages are cut: they stand in the trailers twice, and peers refuse trailers above 8 KiB.
    """
    text = error.message if len(error.message) <= _MAX_MESSAGE_CHARS else error.message[: _MAX_MESSAGE_CHARS - 1] + "…"
    metadata = {"field": error.field}
    if error.spent_s:
        metadata["spent_s"] = str(error.spent_s)
    packed = [_pack(error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=metadata))]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text)
        packed.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        packed.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    status = status_pb2.Status(code=_number(error.code), message=text, details=packed)
    return error.code, text, ((_DETAILS_KEY, status.SerializeToString()),)


def to_status_bytes(error: KvrelayError) -> tuple[int, bytes]:
    """Return (code, serialized google.rpc.Status) that carry `error` inside a message."""
    code, _message, trailing = to_status(error)
    return _number(code), trailing[0][1]


def from_status_bytes(raw: bytes) -> KvrelayError:
    """Invert `to_status_bytes`."""
    message = status_pb2.Status.FromString(raw).message
    return _from_details(raw, message) or WorkerError(message)


def from_rpc_error(error: grpc.RpcError, *, unavailable: type[KvrelayError] = WorkerLost) -> KvrelayError:
    """Return the error that a peer reported, or the nearest class for a bare gRPC status.

    A bare UNAVAILABLE means that the peer is gone. So does a bare CANCELLED: the caller's own cancellation is raised as
    CancelledError, so the peer has dropped the call. `unavailable` is the class for a peer of this kind.
    """
    call: Any = error  # grpc.RpcError has code() and details() only on its concrete classes
    code = call.code() if hasattr(call, "code") else grpc.StatusCode.UNKNOWN
    message = (call.details() if hasattr(call, "details") else None) or str(code)
    for key, value in (call.trailing_metadata() if hasattr(call, "trailing_metadata") else None) or ():
        if key == _DETAILS_KEY:
            known = _from_details(value, message)
            if known is not None:
                return known
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return unavailable(message)
    return _BARE.get(code, WorkerError)(message)


_BARE: dict[grpc.StatusCode, type[KvrelayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.INTERNAL: EngineFault,
}


def _from_details(raw: bytes, message: str) -> KvrelayError | None:
    status = status_pb2.Status.FromString(raw)
    cls: type[KvrelayError] | None = None
    field, spent_s = "", 0.0
    retry_after_s: float | None = None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            cls = next((c for c in error_classes() if c.__name__ == info.reason), None)
            field, spent_s = info.metadata["field"], float(info.metadata.get("spent_s", 0.0))
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return cls(message, field=field, retry_after_s=retry_after_s, spent_s=spent_s) if cls is not None else None


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _number(code: grpc.StatusCode) -> int:
    return int(code_pb2.Code.Value(code.name))
