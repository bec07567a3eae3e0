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
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, NonNegativeInt, model_validator

from measure.workload.session_traces import MAX_REQUESTS, PrefixTree, RecordedRequest
from measure.workload.sessions import Beginning
from measure.workload.traces import MAX_TOKENS, TraceError, checked

_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_MESSAGES = "gen_ai.input.messages"
_ANSWERS = ("gen_ai.output.text", "gen_ai.output.messages")
_CHARS_PER_TOKEN = 4
_MAX_NANOSECONDS = 1 << 63


def _attributes(raw: Any) -> Any:
    """Return attributes by name: a mapping, or OTLP's list of keys and typed values. Raises ValueError."""
    if not isinstance(raw, list):
        return raw or {}
    try:
        return {each["key"]: next(iter(each["value"].values()), None) for each in raw}
    except (AttributeError, KeyError, TypeError):
        raise ValueError('an attribute is not {"key": …, "value": {…}}') from None


_Attributes = Annotated[dict[str, Any], BeforeValidator(_attributes)]


class _Counts(BaseModel):
    input: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(None, validation_alias=AliasChoices(*_INPUT))
    output: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(None, validation_alias=AliasChoices(*_OUTPUT))


class _RawSpan(BaseModel):
    name: str = ""
    span_id: str = Field("", validation_alias=AliasChoices("span_id", "spanId"))
    parent: str | None = Field(None, validation_alias=AliasChoices("parent_span_id", "parentSpanId"))
    start_time: datetime.datetime | None = None
    end_time: datetime.datetime | None = None
    start_ns: Annotated[NonNegativeInt, Field(le=_MAX_NANOSECONDS)] | None = Field(None, alias="startTimeUnixNano")
    end_ns: Annotated[NonNegativeInt, Field(le=_MAX_NANOSECONDS)] | None = Field(None, alias="endTimeUnixNano")
    attributes: _Attributes = {}

    @model_validator(mode="after")
    def _has_times(self) -> "_RawSpan":
        if self.start_time is None and self.start_ns is None:
            raise ValueError("has neither start_time nor startTimeUnixNano")
        if self.end_time is None and self.end_ns is None:
            raise ValueError("has neither end_time nor endTimeUnixNano")
        if self.end_s < self.start_s:
            raise ValueError("ends before it starts")
        return self

    @property
    def start_s(self) -> float:
        return _seconds(self.start_time, self.start_ns)

    @property
    def end_s(self) -> float:
        return _seconds(self.end_time, self.end_ns)


class _Scope(BaseModel):
    spans: list[_RawSpan] = []


class _Resource(BaseModel):
    scopes: list[_Scope] = Field([], alias="scopeSpans")


class _Document(_Scope):
    resources: list[_Resource] = Field([], alias="resourceSpans")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A span of a session."""

    name: str
    parents: tuple[str, ...]
    """Ids of the spans around it, its parent first."""
    start_s: float
    end_s: float
    values: Mapping[str, Any]
    counts: _Counts
    """Its tokens, where they are recorded."""

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

    @property
    def answer(self) -> str:
        """Its answer as one text; empty where it is not recorded."""
        return str(next(filter(None, map(self.values.get, _ANSWERS)), ""))


def requests_of(text: str, where: str) -> list[RecordedRequest]:
    """Return the calls of a session, in order of their starts. Raises TraceError, also without any."""
    calls = sorted((span for span in _spans(text, where) if span.is_call), key=lambda span: span.start_s)
    if not 0 < len(calls) <= MAX_REQUESTS:
        what = f"{len(calls):,} are calls of a model; no more than {MAX_REQUESTS:,} can be played: cut the session"
        raise TraceError(f"{where}: spans: {what if calls else 'none is a call of a model'}")
    prompts = [call.messages() for call in calls]
    requests: list[RecordedRequest] = []
    tree = PrefixTree()
    for index, call in enumerate(calls):
        found = tree.add(prompts[index])
        after = _after(calls, index)
        request = RecordedRequest(
            at_s=call.start_s - calls[0].start_s,
            end_s=call.end_s - calls[0].start_s,
            num_prompt_tokens=_tokens(call.counts.input, sum(map(len, prompts[index]))),
            num_output_tokens=_tokens(call.counts.output, len(call.answer)),
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
    last_s = max((calls[i].start_s for i in ended), default=0.0)

    def is_waited_for(turn: int) -> bool:
        """Return whether one of those that had ended waited for it."""
        return calls[turn].end_s <= last_s and any(
            _may_wait(calls[later], calls[turn]) for later in reversed(ended) if later > turn
        )

    return tuple(turn for turn in ended if not is_waited_for(turn))


def _may_wait(one: _Span, other: _Span) -> bool:
    """Return whether a call began after the end of another, of its own agent or of one around or within."""
    mine, theirs = one.parents[:1], other.parents[:1]
    is_related = not mine or not theirs or mine[0] in other.parents or theirs[0] in one.parents
    return is_related and other.end_s <= one.start_s


def _tokens(recorded: int | None, num_chars: int) -> int:
    """Return a number of tokens as recorded, else by the characters; at least 1."""
    return max(1, num_chars // _CHARS_PER_TOKEN if recorded is None else recorded)


def _spans(text: str, where: str) -> Iterator[_Span]:
    document = checked(_Document, text, where)
    groups = {"spans": document.spans} | {
        f"resourceSpans.{i}.scopeSpans.{j}.spans": scope.spans
        for i, resource in enumerate(document.resources)
        for j, scope in enumerate(resource.scopes)
    }
    places = {f"{where}: {name}.{number}": span for name, spans in groups.items() for number, span in enumerate(spans)}
    known: dict[str, str | None] = {}
    for place, span in places.items():
        if span.span_id in known:
            raise TraceError(f"{place}: has the span_id {span.span_id} of an earlier span; a file is one session")
        if span.span_id:
            known[span.span_id] = span.parent
    for place, span in places.items():
        yield _Span(
            name=span.name,
            parents=_around(span.parent, known, place),
            start_s=span.start_s,
            end_s=span.end_s,
            values=span.attributes,
            counts=checked(_Counts, span.attributes, f"{place}.attributes"),
        )


def _around(parent: str | None, known: Mapping[str, str | None], place: str) -> tuple[str, ...]:
    """Return the ids of a span's parents, its own first; one that is not in the file is the last."""
    around: dict[str, None] = {}
    while parent:
        if parent in around:
            raise TraceError(f"{place}: parent_span_id: {parent} is within itself; parents form a tree")
        around[parent] = None
        parent = known.get(parent)
    return tuple(around)


def _seconds(time: datetime.datetime | None, nanoseconds: int | None) -> float:
    if nanoseconds is not None:
        return nanoseconds / 1e9
    assert time is not None, "a span has either"
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()
