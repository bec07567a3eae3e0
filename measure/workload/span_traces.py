"""Sessions as spans of OpenTelemetry: a JSON file per session, as inference-perf replays them, or OTLP's own JSON.

Calls of a model are the spans with an operation `chat`, or tokens of the conventions for generative AI:
`gen_ai.usage.input_tokens` and `output_tokens`, or their older names; without them four characters count as one token.
A call waits for the calls of its own agent and of agents around it, or within, that had ended when it began, and of
these only for those that no other of them waited for. An agent is the parent of spans; without parents all are of one.

Where spans have `gen_ai.input.messages`, a prompt begins with the messages that it has in common with an earlier one,
and with its answer where that follows. Otherwise a call continues the latest that it waits for, if its prompt is longer
than that one's text.
"""

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measure.workload.session_traces import PrefixTree, RecordedRequest
from measure.workload.sessions import Beginning
from measure.workload.traces import TraceError

_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_MESSAGES = "gen_ai.input.messages"
_ANSWERS = ("gen_ai.output.text", "gen_ai.output.messages")
_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A span of a session."""

    name: str
    parents: tuple[str, ...]
    """Ids of the spans around it, its parent first."""
    start_s: float
    end_s: float
    values: Mapping[str, Any]

    @property
    def is_call(self) -> bool:
        """Whether it is a call of a model."""
        is_chat = self.values.get("gen_ai.operation.name") == "chat" or self.name.startswith("chat ")
        return is_chat or any(name in self.values for name in (*_INPUT, _MESSAGES))

    def messages(self) -> list[str]:
        """Return the messages of its prompt, each as one text; none where they are not recorded."""
        raw = self.values.get(_MESSAGES)
        try:
            found = json.loads(raw) if isinstance(raw, str) else raw
        except ValueError:
            found = None
        return [json.dumps(each, sort_keys=True) for each in found] if isinstance(found, list) else []

    def count(self, names: Sequence[str], num_chars: int) -> int:
        """Return a number of tokens as recorded, else by the characters; at least 1."""
        for name in names:
            value = self.values.get(name)
            if value is not None and str(value).isdecimal():
                return max(1, int(value))
        return max(1, num_chars // _CHARS_PER_TOKEN)


def requests_of(document: Mapping[str, Any], where: str) -> list[RecordedRequest]:
    """Return the calls of a session, in order of their starts. Raises TraceError without any."""
    calls = sorted((span for span in _spans(document, where) if span.is_call), key=lambda span: span.start_s)
    if not calls:
        raise TraceError(f"{where}: spans: none is a call of a model")
    prompts = [call.messages() for call in calls]
    requests: list[RecordedRequest] = []
    tree = PrefixTree()
    for index, call in enumerate(calls):
        found = tree.add(prompts[index])
        after = _after(calls, index)
        num_prompt_tokens = call.count(_INPUT, sum(map(len, prompts[index])))
        request = RecordedRequest(
            at_s=call.start_s - calls[0].start_s,
            end_s=call.end_s - calls[0].start_s,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=call.count(_OUTPUT, len(str(next(filter(None, map(call.values.get, _ANSWERS)), "")))),
            agent=call.parents[0] if call.parents else "",
            kept=Beginning(0, 0),
            after=after,
        )
        request.kept = _kept(requests, prompts, found) if prompts[index] else _continued(requests, request)
        requests.append(request)
    return requests


def _kept(requests: Sequence[RecordedRequest], prompts: Sequence[list[str]], found: tuple[int, int]) -> Beginning:
    """Return a prompt's leading messages that it has in common with an earlier one, by their tokens."""
    turn, num_messages = found
    if not num_messages:
        return Beginning(0, 0)
    source, messages = requests[turn], prompts[turn]
    if num_messages == len(messages):
        return Beginning(turn, source.num_prompt_tokens)
    share = sum(map(len, messages[:num_messages])) / sum(map(len, messages))
    return Beginning(turn, int(share * source.num_prompt_tokens))


def _continued(requests: Sequence[RecordedRequest], request: RecordedRequest) -> Beginning:
    turn = max(request.after or (), key=lambda index: requests[index].end_s, default=None)
    if turn is None or requests[turn].num_prompt_tokens + requests[turn].num_output_tokens > request.num_prompt_tokens:
        return Beginning(0, 0)
    return Beginning(turn, requests[turn].num_prompt_tokens)


def _after(calls: Sequence[_Span], index: int) -> tuple[int, ...]:
    call = calls[index]
    ended = [i for i in range(index) if _may_wait(call, calls[i])]
    return tuple(i for i in ended if not any(_may_wait(calls[j], calls[i]) for j in reversed(ended)))


def _may_wait(one: _Span, other: _Span) -> bool:
    """Return whether a call began after the end of another, of its own agent or of one around or within."""
    mine, theirs = one.parents[:1], other.parents[:1]
    is_related = not mine or not theirs or mine[0] in other.parents or theirs[0] in one.parents
    return is_related and other.end_s <= one.start_s and other is not one


def _spans(document: Mapping[str, Any], where: str) -> Iterator[_Span]:
    raw = list(_raw_spans(document))
    parents = {_text(each, "span_id", "spanId"): _text(each, "parent_span_id", "parentSpanId") for each in raw}
    for number, each in enumerate(raw):
        around: list[str] = []
        parent = _text(each, "parent_span_id", "parentSpanId")
        while parent and parent not in around:
            around.append(parent)
            parent = parents.get(parent, "")
        try:
            yield _Span(
                name=str(each.get("name", "")),
                parents=tuple(around),
                start_s=_seconds(each, "start_time", "startTimeUnixNano"),
                end_s=_seconds(each, "end_time", "endTimeUnixNano"),
                values=_attributes(each.get("attributes", {})),
            )
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TraceError(f"{where}: spans.{number}: {error}") from None


def _raw_spans(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    groups = [document]
    groups += [scope for each in document.get("resourceSpans", ()) for scope in each.get("scopeSpans", ())]
    yield from (span for group in groups for span in group.get("spans", ()))


def _text(span: Mapping[str, Any], *names: str) -> str:
    return next((str(span[name]) for name in names if span.get(name)), "")


def _seconds(span: Mapping[str, Any], iso: str, nanoseconds: str) -> float:
    if nanoseconds in span:
        return int(span[nanoseconds]) / 1e9
    return datetime.datetime.fromisoformat(span[iso]).replace(tzinfo=datetime.UTC).timestamp()


def _attributes(raw: Any) -> dict[str, Any]:
    """Return attributes by name: a mapping, or OTLP's list of keys and typed values."""
    if isinstance(raw, Mapping):
        return dict(raw)
    return {each["key"]: next(iter(each["value"].values()), None) for each in raw}
