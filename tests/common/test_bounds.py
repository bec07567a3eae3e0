"""No client can put millions of entries into a message and have the router work on each of them."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from common.errors import InvalidRequest
from common.wire import BOUNDS, check_bounds, sampling_from_proto, sampling_to_proto
from kvrelay.v1 import decode_pb2, sampling_pb2
from kvrelay.v1 import inference_pb2 as pb

CLIENT_SERVICES = (
    pb.DESCRIPTOR.services_by_name["InferenceService"],
    decode_pb2.DESCRIPTOR.services_by_name["DirectService"],
)


def repeated_fields(message: Descriptor) -> Iterator[FieldDescriptor]:
    """Every repeated field and map of a message and of those inside it."""
    for field in message.fields:
        if field.is_repeated:
            yield field
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from repeated_fields(field.message_type)


def test_every_bound_is_of_a_field_that_a_client_can_send() -> None:
    methods = [method for service in CLIENT_SERVICES for method in service.methods]
    assert BOUNDS.keys() == {field.full_name for method in methods for field in repeated_fields(method.input_type)}


def sampling(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


def chat(num_messages: int) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role="user")] * num_messages)


def calls(num_messages: int) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * 128)] * num_messages)


def resume(num_samples: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(resume=pb.Resume(samples=[pb.ResumedSample()] * num_samples))


@pytest.mark.parametrize(
    ("message", "field", "num_entries", "most"),
    [
        (sampling(stop_token_ids=range(257)), "sampling.stop_token_ids", 257, 256),
        (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias", 1025, 1024),
        (sampling(stop=["x"] * 17), "sampling.stop", 17, 16),
        (pb.GenerateRequest(chat=chat(4097)), "chat.messages", 4097, 4096),
        (pb.TokenizeRequest(chat=chat(4097)), "chat.messages", 4097, 4096),
        (pb.GenerateRequest(chat=calls(65)), "chat.messages.tool_calls", 8320, 8192),
        (resume(65), "resume.samples", 65, 64),
        (decode_pb2.StreamTokensRequest(num_received=[0] * 65), "num_received", 65, 64),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_many_entries_are_refused_with_the_field_and_both_numbers(
    message: Message, field: str, num_entries: int, most: int
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_bounds(message)
    assert caught.value.field == field
    assert caught.value.message == f"{field} has {num_entries} entries; at most {most} are taken"


@pytest.mark.parametrize(
    "message",
    [
        sampling(stop_token_ids=range(256), logit_bias=dict.fromkeys(range(1024), 1.0), stop=["x"] * 16),
        pb.GenerateRequest(chat=chat(4096)),
        resume(64),
        pb.GenerateRequest(),
    ],
)
def test_as_many_entries_as_allowed_pass(message: Message) -> None:
    check_bounds(message)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "sampling.logit_bias"),
        ({"stop_token_ids": range(257)}, "sampling.stop_token_ids"),
    ],
)
def test_sampling_is_refused_before_a_long_field_is_sorted_or_copied(fields: dict[str, object], field: str) -> None:
    message = sampling_pb2.SamplingParams(**fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        sampling_from_proto(message, default_seed=0)
    assert caught.value.field == field


def test_the_engine_looks_stop_tokens_up_and_compares_no_token_with_each_of_them() -> None:
    message = sampling_pb2.SamplingParams(stop_token_ids=[9, 4, 9])
    params = sampling_from_proto(message, default_seed=0)
    assert params.stop_token_ids == frozenset({4, 9})
    assert isinstance(params.stop_token_ids, frozenset)
    assert list(sampling_to_proto(params).stop_token_ids) == [4, 9]
