"""From messages to records: the only place of the client that reads protobuf."""

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import grpc

from common.errors import EngineFault, InvalidRequest, KvrelayError, Unreachable, from_rpc_error
from common.wire_names import ROLE_NAMES, TRANSPORT_NAMES
from kvrelay.client.decisions import Candidate, Decision, DecisionOutcome
from kvrelay.client.records import (
    Accepted,
    Completed,
    Event,
    FinishReason,
    ModelInfo,
    PlanChosen,
    PlanKind,
    PositionLogprobs,
    PromptLogprobs,
    RequestTimings,
    Token,
    Tokenization,
    TokenLogprob,
    TokenRun,
    TransferStats,
    Usage,
)
from kvrelay.client.status import ClusterStatus, RouterStatus, WorkerLoad, WorkerStatus, WorkerView
from kvrelay.v1 import inference_pb2, sampling_pb2, worker_pb2

_PLAN_KINDS = {
    inference_pb2.PLAN_KIND_REMOTE: PlanKind.REMOTE,
    inference_pb2.PLAN_KIND_LOCAL: PlanKind.LOCAL,
}
_FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    sampling_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_K = TypeVar("_K")
_R = TypeVar("_R")


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


def events_from_proto(message: inference_pb2.GenerateResponse) -> Iterator[Event]:
    """Yield the events of one message. Raises EngineFault for an enum value that this client does not know."""
    match message.WhichOneof("event"):
        case "accepted":
            yield _same_fields(Accepted, message.accepted)
        case "plan":
            yield _plan(message.plan)
        case "tokens":
            if message.tokens.prompt_logprobs:
                positions = tuple(_position_logprobs(position) for position in message.tokens.prompt_logprobs)
                yield PromptLogprobs(positions=positions)
            for token in message.tokens.tokens:
                yield _token(token)
            for run in message.tokens.runs:
                yield _run(run)
        case "completed":
            yield _completed(message.completed)
        case _:
            return  # an event of a newer server; what this client knows still arrives


def tokenization_from_proto(message: inference_pb2.TokenizeResponse) -> Tokenization:
    """Return the record."""
    return Tokenization(token_ids=tuple(message.token_ids), pieces=tuple(message.pieces))


def models_from_proto(message: inference_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
    """Return the records."""
    return tuple(_same_fields(ModelInfo, model) for model in message.models)


def status_from_proto(message: inference_pb2.GetClusterStatusResponse) -> ClusterStatus:
    """Return the record."""
    return ClusterStatus(
        router=_same_fields(RouterStatus, message.router, alarms=tuple(message.router.alarms)),
        workers=tuple(_worker(worker) for worker in message.workers),
    )


def decisions_from_proto(message: inference_pb2.ExplainResponse) -> tuple[Decision, ...]:
    """Return the records. Raises EngineFault for a plan of a kind that this client does not know."""
    return tuple(_decision(decision) for decision in message.decisions)


def _decision(message: inference_pb2.Decision) -> Decision:
    outcome = message.outcome
    return _same_fields(
        Decision,
        message,
        plan=_plan(message.plan),
        candidates=tuple(_candidate(candidate) for candidate in message.candidates),
        outcome=DecisionOutcome(
            num_cached_tokens=outcome.num_cached_tokens if outcome.HasField("num_cached_tokens") else None,
            ttft_s=outcome.ttft_s if outcome.HasField("ttft_s") else None,
            mean_itl_s=outcome.mean_itl_s if outcome.HasField("mean_itl_s") else None,
            ended=outcome.ended or None,
        ),
    )


def _candidate(message: inference_pb2.Candidate) -> Candidate:
    return _same_fields(
        Candidate,
        message,
        kind=_enum(_PLAN_KINDS, message.kind, "plan kind"),
        prefill_worker_id=message.prefill_worker_id or None,
        source_worker_id=message.source_worker_id or None,
        terms=dict(message.terms),
    )


def _worker(message: inference_pb2.WorkerView) -> WorkerView:
    status = message.status
    return WorkerView(
        worker_id=message.worker_id,
        role=ROLE_NAMES.get(message.role, "unknown"),
        address=message.address,
        state=message.state,
        status=_same_fields(WorkerStatus, status, load=_same_fields(WorkerLoad, status.load))
        if message.HasField("status")
        else None,
    )


def _plan(message: inference_pb2.PlanChosen) -> PlanChosen:
    return _same_fields(
        PlanChosen,
        message,
        kind=_enum(_PLAN_KINDS, message.kind, "plan kind"),
        prefill_worker_id=message.prefill_worker_id or None,
        source_worker_id=message.source_worker_id or None,
    )


def _token(message: sampling_pb2.SampleToken) -> Token:
    reason = message.finish_reason
    return _same_fields(
        Token,
        message,
        logprobs=_position_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        finish_reason=_enum(_FINISH_REASONS, reason, "finish reason") if reason else None,
    )


def _run(message: sampling_pb2.TokenRun) -> TokenRun:
    reason = message.finish_reason
    return TokenRun(
        sample_index=message.sample_index,
        first_token_index=message.first_token_index,
        token_ids=struct.unpack(f"<{len(message.tokens) // 4}I", message.tokens),
        finish_reason=_enum(_FINISH_REASONS, reason, "finish reason") if reason else None,
    )


def _completed(message: inference_pb2.Completed) -> Completed:
    timings, transfer = message.timings, message.transfer
    return _same_fields(
        Completed,
        message,
        usage=_same_fields(Usage, message.usage),
        timings=_same_fields(
            RequestTimings,
            timings,
            mean_itl_s=timings.mean_itl_s or None,
            max_itl_s=timings.max_itl_s or None,
        ),
        transfer=_same_fields(TransferStats, transfer, transport=_transport(transfer)),
    )


def _transport(message: worker_pb2.TransferStats) -> str | None:
    return TRANSPORT_NAMES.get(message.transport) if message.num_blocks else None


def _position_logprobs(message: sampling_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=_same_fields(TokenLogprob, message.chosen),
        top=tuple(_same_fields(TokenLogprob, entry) for entry in message.top),
    )


def _same_fields(cls: type[_R], message: Any, **given: Any) -> _R:
    """Return a record whose fields, but for those given, are the message's scalars of the same name."""
    names = (field.name for field in dataclasses.fields(cls) if field.name not in given)  # type: ignore[arg-type]
    return cls(**{name: getattr(message, name) for name in names}, **given)


def _enum(known: Mapping[Any, _K], number: int, what: str) -> _K:
    value = known.get(number)
    if value is None:
        raise EngineFault(f"the server sent {what} {number}, which this client does not know; upgrade the client")
    return value
