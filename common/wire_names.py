"""Names of enum values on the wire. Separate from `common.wire`, so that clients need no NumPy."""

from collections.abc import Mapping
from typing import Any

from kvrelay.v1 import inference_pb2, sampling_pb2, worker_pb2


def _names(enum: Any, prefix: str) -> dict[Any, str]:
    """Return the name of each value but the unspecified one."""
    return {number: name.removeprefix(prefix).lower() for name, number in enum.items() if number}


ROLE_NAMES = _names(worker_pb2.WorkerRole, "WORKER_ROLE_")
ROLE_NUMBERS: Mapping[str, worker_pb2.WorkerRole.ValueType] = {name: number for number, name in ROLE_NAMES.items()}
TRANSPORT_NAMES = _names(worker_pb2.KvTransport, "KV_TRANSPORT_")
TRANSPORT_NUMBERS: Mapping[str, int] = {name: number for number, name in TRANSPORT_NAMES.items()}
PLAN_KIND_NAMES = _names(inference_pb2.PlanKind, "PLAN_KIND_")
_CHOICE_NAMES = _names(inference_pb2.ToolChoiceKind, "TOOL_CHOICE_KIND_")
TOOL_CHOICE_NUMBERS = {name: number for number, name in _CHOICE_NAMES.items() if name != "named"}
"""Kinds of choice that have no further argument."""
FINISH_REASON_NAMES = _names(sampling_pb2.FinishReason, "FINISH_REASON_")
