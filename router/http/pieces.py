"""Parts of an answer: consecutive tokens of one choice, token counts, and the report of how a request was served."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import Message

from common.tokens import TokenArray
from common.wire_names import FINISH_REASON_NAMES, PLAN_KIND_NAMES, TRANSPORT_NAMES
from kvrelay.v1 import inference_pb2, sampling_pb2
from kvrelay.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt that a choice continues."""

    token_ids: TokenArray
    echo: str | None
    """Text of the prompt, where the caller wants to see it again."""
    logprobs: Sequence[sampling_pb2.PositionLogprobs] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive tokens of one choice."""

    index: int
    """Index of the choice."""
    tokens: Sequence[sampling_pb2.SampleToken]
    prompt: Prompt | None
    """Set on the first piece of its choice."""

    @property
    def text(self) -> str:
        """Text that became certain with these tokens, after the echo."""
        text = "".join([token.text for token in self.tokens])
        return text if self.prompt is None or self.prompt.echo is None else self.prompt.echo + text

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens."""
        return [token.token_id for token in self.tokens]

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended, or None."""
        return FINISH_REASON_NAMES.get(self.tokens[-1].finish_reason) if self.tokens else "length"


class Prompts:
    """Prompts of a call; each goes out with the first piece of every choice that continues it."""

    def __init__(self) -> None:
        self._prompts: dict[int, Prompt] = {}
        self._taken: set[int] = set()

    def open(self, position: int, prompt: Prompt) -> None:
        """Begin a request."""
        self._prompts[position] = prompt

    def note(self, position: int, delta: inference_pb2.TokenDelta) -> None:
        """Keep the prompt's log-probabilities, which come once for all samples."""
        if delta.prompt_logprobs:
            self._prompts[position] = replace(self._prompts[position], logprobs=delta.prompt_logprobs)

    def take(self, position: int, index: int) -> Prompt | None:
        """Return the prompt for a choice's first piece, None afterwards."""
        if index in self._taken:
            return None
        self._taken.add(index)
        return self._prompts[position]


def by_sample(delta: inference_pb2.TokenDelta) -> dict[int, list[sampling_pb2.SampleToken]]:
    """Return the tokens of each sample, in order."""
    samples: dict[int, list[sampling_pb2.SampleToken]] = {}
    for token in delta.tokens:
        samples.setdefault(token.sample_index, []).append(token)
    return samples


@dataclass(slots=True, eq=False)
class RequestFacts:
    """Events of one request other than tokens."""

    request_id: str
    plans: list[pb.PlanChosen] = field(default_factory=list)
    begun: pb.Usage | None = None
    """Counts of the prompt when its first token came, from which on they are final."""
    completed: pb.Completed = field(default_factory=pb.Completed)


def usage_of(requests: Iterable[RequestFacts], *, counts_output: bool = True) -> dict[str, Any]:
    """Return the token counts of all requests together, under OpenAI's names."""
    usages = [facts.completed.usage for facts in requests]
    prompt = sum(usage.num_prompt_tokens for usage in usages)
    output = sum(usage.num_output_tokens for usage in usages) if counts_output else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.num_cached_tokens for usage in usages),
            "cache_write_tokens": sum(write.num_tokens for usage in usages for write in usage.cache_writes),
        },
    }


def report_of(requests: Iterable[RequestFacts]) -> dict[str, Any]:
    """Return the report, with an entry for each prompt of the call, for callers that ask by `kvrelay.report`.

    Field names are those of the gRPC messages (proto/kvrelay/v1/inference.proto), which define each of them.
    """
    return {"requests": [_report(facts) for facts in requests]}


def _report(facts: RequestFacts) -> dict[str, Any]:
    plans = [{**_plain(plan), "kind": PLAN_KIND_NAMES[plan.kind]} for plan in facts.plans]
    completed = _plain(facts.completed)
    completed["transfer"]["transport"] = TRANSPORT_NAMES.get(facts.completed.transfer.transport)
    return {"request_id": facts.request_id, "plans": plans, **completed}


def _plain(message: Message) -> dict[str, Any]:
    """Return every field of a message that has no maps; an optional one that is not set is None."""
    return {
        field.name: _value(message, field.name, is_optional=field.containing_oneof is not None)
        for field in message.DESCRIPTOR.fields
    }


def _value(message: Message, name: str, *, is_optional: bool) -> Any:
    if is_optional and not message.HasField(name):
        return None
    value = getattr(message, name)
    if not isinstance(value, Message) and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return _plain(value) if isinstance(value, Message) else value
