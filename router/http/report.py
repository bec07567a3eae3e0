"""How a request was served, for callers that ask by `"kvrelay": {"report": true}`.

Field names are those of the gRPC messages (proto/kvrelay/v1/inference.proto), which define each of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from common.wire_names import TRANSPORT_NAMES
from kvrelay.v1 import inference_pb2 as pb

_PLAN_KINDS = {pb.PLAN_KIND_REMOTE: "remote", pb.PLAN_KIND_LOCAL: "local"}


@dataclass(slots=True, eq=False)
class RequestFacts:
    """Events of one request other than tokens."""

    request_id: str
    plans: list[pb.PlanChosen] = field(default_factory=list)
    completed: pb.Completed = field(default_factory=pb.Completed)


def usage_of(requests: Iterable[RequestFacts]) -> dict[str, Any]:
    """Return the token counts of all requests together, under OpenAI's names."""
    usages = [facts.completed.usage for facts in requests]
    prompt = sum(usage.num_prompt_tokens for usage in usages)
    output = sum(usage.num_output_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in usages)},
    }


def report_of(requests: Iterable[RequestFacts]) -> dict[str, Any]:
    """Return the report, with an entry for each prompt of the call."""
    return {"requests": [_report(facts) for facts in requests]}


def _report(facts: RequestFacts) -> dict[str, Any]:
    plans = [{**_plain(plan), "kind": _PLAN_KINDS[plan.kind]} for plan in facts.plans]
    told = _plain(facts.completed)
    told["transfer"]["transport"] = TRANSPORT_NAMES.get(facts.completed.transfer.transport)
    return {"request_id": facts.request_id, "plans": plans, **told}


def _plain(message: Message) -> dict[str, Any]:
    """Return every field of a message that has neither lists nor maps."""
    return {
        name: _plain(value) if isinstance(value, Message) else value
        for name, value in ((field.name, getattr(message, field.name)) for field in message.DESCRIPTOR.fields)
    }
