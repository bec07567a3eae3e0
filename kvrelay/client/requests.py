"""Builds request messages from the arguments of the clients. Bad values raise here, before anything is sent."""

import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, TypedDict

from common.errors import InvalidRequest
from common.pooling import Pooling, pooling_to_proto
from common.sampling import PARAMETERS, SamplingOptions
from common.structured_outputs import structure_text
from common.tracing import TRACEPARENT, SpanContext
from kvrelay.client.chat import CHAT_OPTIONS, ChatMessage, ChatOptions, ChatTurn, set_chat_options, turn_of
from kvrelay.client.events import Accepted, SampleSoFar
from kvrelay.v1 import inference_pb2, sampling_pb2

_OPTIONS = tuple(each.option for each in PARAMETERS)
_OTHER_OPTIONS = frozenset(("model", "label", "timeout_s", "terms", "cache_marks", "session_id", *CHAT_OPTIONS))


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatTurn]
"""Text, continued as it is; ready token ids; or a conversation for the model's chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTerms:
    """How soon an answer is needed. The cluster may refuse at once what it cannot meet."""

    priority: int = 0
    """Requests of a tenant with a larger one go first, up to the tenant's maximum."""
    ttft_s: float | None = None
    """Objective for the time to the first token; default: serving.yaml's `slo`."""
    tpot_s: float | None = None
    """Objective for the mean gap between tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMark:
    """The end of a prefix of the prompt that is to stay cached; without a place the end of the prompt."""

    ttl_s: float
    """Time after the last use."""
    num_tokens: int | None = None
    """Leading tokens of a prompt of token ids."""
    num_chars: int | None = None
    """Leading characters of a text, or of the content of `message`."""
    num_tools: int | None = None
    """Leading tools of a conversation."""
    message: int | None = None
    """Message of a conversation, from 0."""


class GenerateOptions(SamplingOptions, ChatOptions, total=False):
    """Keyword arguments of the generating calls: those of sampling, of conversations, and six of the request."""

    model: str
    """Name of a served model; default: the only one."""
    label: str
    """Appears in the cluster's logs."""
    timeout_s: float | None
    """Deadline of the whole call; default: the client's."""
    terms: ServiceTerms | None
    """How soon the answer is needed."""
    cache_marks: Sequence[CacheMark]
    """Prefixes of the prompt that are to stay cached, at most 4."""
    session_id: str
    """Conversation or task that the request belongs to, by a name of the caller's."""


class EmbedOptions(TypedDict, total=False):
    """Keyword arguments of `embed`."""

    pooling: Literal["last", "mean"]
    """Hidden states that the vector is made of: the last token's (default), or the mean over all tokens."""
    normalize: bool
    """Scale the vector to length 1; default True."""
    dimensions: int | None
    """Keep so many leading values, before the vector is scaled; default: all."""
    model: str
    """Name of a served model; default: the only one."""
    label: str
    """Appears in the cluster's logs."""
    timeout_s: float | None
    """Deadline of the call; default: the client's."""
    terms: ServiceTerms | None
    """How soon the answer is needed; `tpot_s` has no meaning here."""


def generate_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Return the message. Raises InvalidRequest for values that no message can carry, TypeError for wrong types."""
    message = inference_pb2.GenerateRequest(sampling=_sampling_message(options))
    with _field("model"):
        message.model = options.get("model") or ""
    with _field("label"):
        message.label = options.get("label") or ""
    with _field("session_id"):
        message.session_id = options.get("session_id") or ""
    terms = options.get("terms")
    if terms is not None:
        _set_terms(message, terms)
    for mark in options.get("cache_marks") or ():
        with _field("cache_marks"):
            message.cache_marks.append(_mark_message(mark))
    chat = None if isinstance(prompt, str) else _as_chat(prompt, options)
    if chat is not None:
        message.chat.CopyFrom(chat)
        return message
    if given := CHAT_OPTIONS & options.keys():
        raise InvalidRequest(f"{min(given)} is for conversations", field=min(given))
    if isinstance(prompt, str):
        with _field("text"):
            message.text = prompt
    else:
        with _field("token_ids"):
            message.token_ids.SetInParent()  # an empty list is still a list of token ids; the server refuses it
            message.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # _as_chat has excluded the other kind
    return message


def resumed_request(
    request: inference_pb2.GenerateRequest, samples: Sequence[SampleSoFar], accepted: Accepted
) -> inference_pb2.GenerateRequest:
    """Return a copy of the request that asks for the rest of an answer that another router began."""
    resumed = inference_pb2.GenerateRequest()
    resumed.CopyFrom(request)
    resumed.sampling.seed = accepted.seed
    for name, value in accepted.defaults.items():
        setattr(resumed.sampling, name, value)
    resumed.resume.fingerprint = accepted.fingerprint
    resumed.resume.rendered_unix_s = accepted.rendered_unix_s
    if accepted.answer_format is not None:
        resumed.resume.answer_format.CopyFrom(inference_pb2.AnswerFormat(**asdict(accepted.answer_format)))
    for sample in samples:
        tokens = struct.pack(f"<{len(sample.token_ids)}I", *sample.token_ids)
        resumed.resume.samples.add(tokens=tokens, is_finished=sample.is_finished)
    return resumed


def embed_request(prompt: str | Sequence[int], options: EmbedOptions) -> inference_pb2.EmbedRequest:
    """Return the message. Raises InvalidRequest for values that no message can carry, TypeError for wrong types."""
    unknown = sorted(set(options) - EmbedOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; known are {', '.join(EmbedOptions.__annotations__)}")
    message = inference_pb2.EmbedRequest()
    if isinstance(prompt, str):
        with _field("text"):
            message.text = prompt
    else:
        with _field("token_ids"):
            message.token_ids.SetInParent()  # as in `generate_request`
            message.token_ids.ids.extend(prompt)
    for name in ("normalize", "dimensions", "model", "label"):
        value = options.get(name)
        if value is not None:
            with _field(name):
                setattr(message, name, value)
    message.pooling = _pooling(options.get("pooling", "last"))
    terms = options.get("terms")
    if terms is not None:
        _set_terms(message, terms)
    return message


def _pooling(name: str) -> "sampling_pb2.Pooling.ValueType":
    try:
        return pooling_to_proto(Pooling(name))
    except ValueError:
        known = ", ".join(each.value for each in Pooling)
        raise InvalidRequest(f"pooling is {name!r}; known are {known}", field="pooling") from None


def _mark_message(mark: CacheMark) -> inference_pb2.CacheMark:
    if mark.message is not None:
        end = inference_pb2.MessageEnd(index=mark.message, num_chars=mark.num_chars)
        return inference_pb2.CacheMark(message=end, ttl_s=mark.ttl_s)
    places = {"num_tokens": mark.num_tokens, "num_chars": mark.num_chars, "num_tools": mark.num_tools}
    given = {name: place for name, place in places.items() if place is not None}
    if len(given) > 1:
        raise InvalidRequest(f"a mark has one place, not {' and '.join(given)}", field="cache_marks")
    message = inference_pb2.CacheMark(ttl_s=mark.ttl_s)
    for name, place in given.items():
        setattr(message, name, place)
    return message


def _set_terms(message: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest, terms: ServiceTerms) -> None:
    with _field("priority"):
        message.priority = terms.priority
    for name, seconds in (("ttft_s", terms.ttft_s), ("tpot_s", terms.tpot_s)):
        if seconds is not None:
            with _field(f"objective.{name}"):
                setattr(message.objective, name, seconds)


def tokenize_request(source: str | Sequence[ChatTurn]) -> inference_pb2.TokenizeRequest:
    """Return the message. Raises InvalidRequest, TypeError."""
    message = inference_pb2.TokenizeRequest()
    if isinstance(source, str):
        with _field("text"):
            message.text = source
    else:
        message.chat.CopyFrom(chat_message(source))
    return message


def credentials(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries the API key. Raises InvalidRequest for a key that cannot be sent."""
    if api_key is None:
        return ()
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise InvalidRequest("cannot send this API key: it must be printable ASCII without spaces", field="api_key")
    return (("authorization", f"Bearer {api_key}"),)


def trace_context() -> tuple[tuple[str, str], ...]:
    """Return the metadata that continue the caller's trace; none in a program that does not use OpenTelemetry."""
    # Another thread may be importing the module: it then is there without its functions.
    current_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if current_span is None:
        return ()
    place = current_span().get_span_context()
    if not place.is_valid:
        return ()
    context = SpanContext(trace_id=place.trace_id, span_id=place.span_id, is_sampled=bool(place.trace_flags.sampled))
    return ((TRACEPARENT, context.traceparent),)


def as_conversation(messages: str | Sequence[ChatTurn]) -> Sequence[ChatTurn]:
    """Return the conversation; plain text is a single turn of the user."""
    return [ChatMessage(role="user", content=messages)] if isinstance(messages, str) else messages


def chat_message(messages: Sequence[ChatTurn], options: Mapping[str, Any] | None = None) -> inference_pb2.ChatPrompt:
    """Return the conversation as a message. Raises InvalidRequest, TypeError."""
    chat = inference_pb2.ChatPrompt()
    for turn in messages:
        message = turn_of(turn)
        with _field("chat.messages"):
            added = chat.messages.add(
                role=message.role,
                content=message.content,
                tool_call_id=message.tool_call_id,
                reasoning=message.reasoning,
                name=message.name,
            )
            for call in message.tool_calls:
                added.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
    with _field("chat"):
        set_chat_options(chat, options or {})
    return chat


def _as_chat(prompt: Sequence[int] | Sequence[ChatTurn], options: Mapping[str, Any]) -> inference_pb2.ChatPrompt | None:
    if len(prompt) and isinstance(prompt[0], ChatMessage | Mapping):
        return chat_message(prompt, options)  # type: ignore[arg-type]  # the first element decides between the two
    return None


def _sampling_message(options: GenerateOptions) -> sampling_pb2.SamplingParams:
    message = sampling_pb2.SamplingParams()
    for name, value in options.items():
        if name in _OTHER_OPTIONS:
            continue
        if name not in _OPTIONS:
            raise TypeError(f"unknown sampling option {name!r}; known are {', '.join(_OPTIONS)}")
        given: Any = [value] if name == "stop" and isinstance(value, str) else value
        if name == "structured_outputs" and value is not None:
            given = structure_text(value)
        with _field(f"sampling.{name}"):
            message.MergeFrom(sampling_pb2.SamplingParams(**{name: given}))  # None leaves the field unset
    return message


@contextmanager
def _field(name: str) -> Iterator[None]:
    """Add the field's name to errors of protobuf: values out of range, or text that is not valid Unicode."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from error
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from error
