"""Converts timing models to and from the wire."""

import math
from collections.abc import Mapping

from common.ids import WorkerId
from common.timing import LinkModel, StepModel, TimingModel
from common.wire import check_number
from kvrelay.v1 import worker_pb2

_STEP_FIELDS = ("constant_s", "per_prefill_token_s", "per_prefill_pair_s", "per_decode_s", "per_context_token_s")
_LONGEST_S = 3600.0
"""Longest plausible time of one step."""
_MAX_STEP_TOKENS = 1 << 24
MAX_LINKS = 4096


def timing_to_proto(model: TimingModel, transports: Mapping[WorkerId, int]) -> worker_pb2.TimingReport:
    """Return the message; `transports` holds the transport to each peer."""
    return worker_pb2.TimingReport(
        prefill=_step_to_proto(model.prefill),
        decode=_step_to_proto(model.decode),
        links=[
            worker_pb2.LinkModel(
                peer_worker_id=peer or "",
                transport=worker_pb2.KvTransport.ValueType(0 if peer is None else transports.get(peer, 0)),
                latency_s=link.latency_s,
                bytes_per_s=link.bytes_per_s,
                num_samples=link.num_samples,
            )
            for peer, link in model.links.items()
        ],
        max_step_tokens=model.max_step_tokens,
    )


def timing_from_proto(message: worker_pb2.TimingReport) -> TimingModel:
    """Return the record. Raises ValueError, naming the field, for values that no measurement can yield."""
    if not 1 <= message.max_step_tokens <= _MAX_STEP_TOKENS:
        raise ValueError(f"timing.max_step_tokens is {message.max_step_tokens}; allowed are 1 to {_MAX_STEP_TOKENS}")
    if len(message.links) > MAX_LINKS:
        raise ValueError(f"timing.links has {len(message.links)} entries; at most {MAX_LINKS}")
    return TimingModel(
        prefill=_step_from_proto(message.prefill, "timing.prefill"),
        decode=_step_from_proto(message.decode, "timing.decode"),
        max_step_tokens=message.max_step_tokens,
        links={
            WorkerId(link.peer_worker_id) if link.peer_worker_id else None: _link_from_proto(link, f"timing.links[{i}]")
            for i, link in enumerate(message.links)
        },
    )


def _step_to_proto(model: StepModel) -> worker_pb2.StepModel:
    weights = {name: getattr(model, name) for name in _STEP_FIELDS}
    return worker_pb2.StepModel(**weights, num_samples=model.num_samples)


def _step_from_proto(message: worker_pb2.StepModel, field: str) -> StepModel:
    weights = {
        name: check_number(getattr(message, name), f"{field}.{name}", highest=_LONGEST_S) for name in _STEP_FIELDS
    }
    return StepModel(**weights, num_samples=message.num_samples)


def _link_from_proto(message: worker_pb2.LinkModel, field: str) -> LinkModel:
    bytes_per_s = check_number(message.bytes_per_s, f"{field}.bytes_per_s", highest=math.inf)
    if bytes_per_s == 0:
        raise ValueError(f"{field}.bytes_per_s is 0")
    return LinkModel(
        latency_s=check_number(message.latency_s, f"{field}.latency_s", highest=_LONGEST_S),
        bytes_per_s=bytes_per_s,
        num_samples=message.num_samples,
    )
