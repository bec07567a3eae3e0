"""Builds request messages from the arguments of the clients. Bad values raise here, before anything is sent."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from common.errors import InvalidRequest
from common.sampling import PARAMETERS, SamplingOptions
from kvrelay.client.records import Accepted, ChatMessage, ChatTurn, Prompt, SampleSoFar, ServiceTerms
from kvrelay.v1 import inference_pb2, sampling_pb2

_OPTIONS = tuple(each.option for each in PARAMETERS)
_OTHER_OPTIONS = frozenset(("model", "label", "timeout_s", "terms"))


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of the generating calls: those of sampling, and four of the request."""

    model: str
    """Name of a served model; default: the only one."""
    label: str
    """Appears in the cluster's logs."""
    timeout_s: float | None
    """Deadline of the whole call; default: the client's."""
    terms: ServiceTerms | None
    """How soon the answer is needed."""


def generate_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Return the message. Raises InvalidRequest for values that no message can carry, TypeError for wrong types."""
    message = inference_pb2.GenerateRequest(sampling=_sampling_message(options))
    with _field("model"):
        message.model = options.get("model", "")
    with _field("label"):
        message.label = options.get("label", "")
    terms = options.get("terms")
    if terms is not None:
        _set_terms(message, terms)
    if isinstance(prompt, str):
        with _field("text"):
            message.text = prompt
    elif chat := _as_chat(prompt):
        message.chat.CopyFrom(chat)
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
    resumed.resume.fingerprint = accepted.fingerprint
    resumed.resume.rendered_unix_s = accepted.rendered_unix_s
    for sample in samples:
        tokens = struct.pack(f"<{len(sample.token_ids)}I", *sample.token_ids)
        resumed.resume.samples.add(tokens=tokens, is_finished=sample.is_finished)
    return resumed


def _set_terms(message: inference_pb2.GenerateRequest, terms: ServiceTerms) -> None:
    with _field("priority"):
        message.priority = terms.priority
    for name, seconds in (("ttft_s", terms.ttft_s), ("itl_s", terms.itl_s)):
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
        raise InvalidRequest("an API key is printable ASCII without spaces", field="api_key")
    return (("authorization", f"Bearer {api_key}"),)


def as_conversation(messages: str | Sequence[ChatTurn]) -> Sequence[ChatTurn]:
    """Return the conversation; plain text is a single turn of the user."""
    return [ChatMessage(role="user", content=messages)] if isinstance(messages, str) else messages


def chat_message(messages: Sequence[ChatTurn]) -> inference_pb2.ChatPrompt:
    """Return the conversation as a message. Raises InvalidRequest, TypeError."""
    chat = inference_pb2.ChatPrompt()
    for turn in messages:
        message = turn if isinstance(turn, ChatMessage) else _from_mapping(turn)
        with _field("chat.messages"):
            chat.messages.add(role=message.role, content=message.content)
    return chat


def _as_chat(prompt: Sequence[int] | Sequence[ChatTurn]) -> inference_pb2.ChatPrompt | None:
    if len(prompt) and isinstance(prompt[0], ChatMessage | Mapping):
        return chat_message(prompt)  # type: ignore[arg-type]  # the first element decides between the two
    return None


def _from_mapping(turn: Mapping[str, str]) -> ChatMessage:
    if not isinstance(turn, Mapping) or set(turn) != {"role", "content"}:
        raise TypeError(f"a chat turn is a ChatMessage or a mapping with the keys role and content, not {turn!r}")
    return ChatMessage(role=turn["role"], content=turn["content"])


def _sampling_message(options: GenerateOptions) -> sampling_pb2.SamplingParams:
    message = sampling_pb2.SamplingParams()
    for name, value in options.items():
        if name in _OTHER_OPTIONS:
            continue
        if name not in _OPTIONS:
            raise TypeError(f"unknown sampling option {name!r}; known are {', '.join(_OPTIONS)}")
        given: Any = [value] if name == "stop" and isinstance(value, str) else value
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
