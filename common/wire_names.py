"""Enums of the wire in Python, and the names of their values. Separate from `common.wire`: clients need no NumPy."""

import enum
from collections.abc import Mapping
from typing import Any

from kvrelay.v1 import inference_pb2, sampling_pb2, worker_pb2


def _names(enum: Any, prefix: str) -> dict[Any, str]:
    """Return the name of each value but the unspecified one."""
    return {number: name.removeprefix(prefix).lower() for name, number in enum.items() if number}


class FinishReason(enum.StrEnum):
    """Why a sample ended."""

    STOP = "stop"
    """End-of-sequence token, stop token or stop string."""
    LENGTH = "length"
    """max_tokens or the model's context length."""


class PlanKind(enum.StrEnum):
    """How a request is served."""

    REMOTE = "remote"
    """A prefill worker computes the prompt and hands its KV to a decode worker."""
    LOCAL = "local"
    """The decode worker computes the uncached rest of the prompt itself."""
    PREFILL = "prefill"
    """A prefill worker computes the prompt, and nothing is decoded: for an embedding."""


ROLE_NAMES = _names(worker_pb2.WorkerRole, "WORKER_ROLE_")
ROLE_NUMBERS: Mapping[str, worker_pb2.WorkerRole.ValueType] = {name: number for number, name in ROLE_NAMES.items()}
TRANSPORT_NAMES = _names(worker_pb2.KvTransport, "KV_TRANSPORT_")
TRANSPORT_NUMBERS: Mapping[str, int] = {name: number for number, name in TRANSPORT_NAMES.items()}
PLAN_KIND_NAMES = _names(inference_pb2.PlanKind, "PLAN_KIND_")
_CHOICE_NAMES = _names(inference_pb2.ToolChoiceKind, "TOOL_CHOICE_KIND_")
TOOL_CHOICE_NUMBERS = {name: number for number, name in _CHOICE_NAMES.items() if name != "named"}
"""Kinds of choice that have no further argument."""
FINISH_REASON_NAMES = _names(sampling_pb2.FinishReason, "FINISH_REASON_")
