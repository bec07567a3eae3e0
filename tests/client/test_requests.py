from typing import Any

import pytest

from common.errors import InvalidRequest
from kvrelay.client.chat import ChatMessage
from kvrelay.client.requests import CacheMark, ServiceTerms, credentials, generate_request
from kvrelay.v1 import inference_pb2, sampling_pb2


def build(prompt: Any, **options: Any) -> inference_pb2.GenerateRequest:
    given: Any = {"model": "m", "label": "l", **options}
    return generate_request(prompt, given)


def test_options_left_out_stay_unset_on_the_wire() -> None:
    assert build("Hi").sampling == sampling_pb2.SamplingParams()
    assert build("Hi", seed=None, stop=None).sampling == sampling_pb2.SamplingParams()


def test_every_kind_of_option_arrives() -> None:
    message = build("Hi", temperature=0, top_k=3, stop="END", stop_token_ids=(4, 5), logit_bias={7: -1.5}, logprobs=2)
    expected = sampling_pb2.SamplingParams(
        temperature=0, top_k=3, stop=["END"], stop_token_ids=[4, 5], logit_bias={7: -1.5}, logprobs=2
    )
    assert message.sampling == expected
    assert message.sampling.HasField("temperature")
    assert (message.model, message.label) == ("m", "l")


def test_marks_arrive_with_their_places() -> None:
    marks = [CacheMark(ttl_s=60), CacheMark(ttl_s=5, num_tools=2), CacheMark(ttl_s=1, message=0, num_chars=7)]
    assert list(build([{"role": "user", "content": "Tell me"}], cache_marks=marks).cache_marks) == [
        inference_pb2.CacheMark(ttl_s=60),
        inference_pb2.CacheMark(ttl_s=5, num_tools=2),
        inference_pb2.CacheMark(ttl_s=1, message=inference_pb2.MessageEnd(index=0, num_chars=7)),
    ]
    with pytest.raises(InvalidRequest, match="one place"):
        build("Hi", cache_marks=[CacheMark(ttl_s=1, num_chars=1, num_tokens=1)])


def test_name_of_a_session_arrives() -> None:
    assert build("Hi", session_id="my task").session_id == "my task"
    assert build("Hi", session_id=None).session_id == build("Hi").session_id == ""


def test_prompt_kind_follows_its_type() -> None:
    assert build("Hi").text == "Hi"
    assert list(build((1, 2)).token_ids.ids) == [1, 2]
    assert build([ChatMessage(role="user", content="Hi")]).chat.messages[0].content == "Hi"
    assert build([{"role": "user", "content": "Hi"}]).chat.messages[0].role == "user"
    assert build([]).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([-1], {}, "token_ids"),
        ([1 << 32], {}, "token_ids"),
        ("\ud800", {}, "text"),
        ([{"role": "user", "content": "\ud800"}], {}, "chat.messages"),
        ("Hi", {"seed": -1}, "sampling.seed"),
        ("Hi", {"n": 1 << 40}, "sampling.n"),
        ("Hi", {"stop": ["\udfff"]}, "sampling.stop"),
        ("Hi", {"logit_bias": {-1: 0.0}}, "sampling.logit_bias"),
    ],
)
def test_value_that_no_message_can_carry_names_its_field(
    prompt: object, sampling: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(prompt, **sampling)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ("Hi", {"max_new_tokens": 4}, "unknown sampling option 'max_new_tokens'"),
        ("Hi", {"temperature": "hot"}, "sampling.temperature"),
        ([{"role": "user"}], {}, "role and content"),
        ([{"role": "user", "content": "a"}, 3], {}, "role and content"),
        ([1.5], {}, "token_ids"),
    ],
)
def test_value_of_a_wrong_type_raises_type_error(prompt: object, sampling: dict[str, object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        build(prompt, **sampling)


def test_terms_arrive_and_those_left_out_stay_unset() -> None:
    terms = ServiceTerms(priority=3, ttft_s=0.5)
    message = build("Hi", terms=terms)
    assert (message.priority, message.objective.ttft_s, message.objective.HasField("tpot_s")) == (3, 0.5, False)
    assert not build("Hi").HasField("objective")


def test_priority_that_no_message_can_carry_is_named() -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        build("Hi", terms=ServiceTerms(priority=1 << 40))


def test_api_key_becomes_metadata() -> None:
    assert credentials("secret-key-0123456") == (("authorization", "Bearer secret-key-0123456"),)
    assert credentials(None) == ()


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "schlüssel"])
def test_api_key_that_cannot_be_sent_is_refused_without_repeating_it(key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        credentials(key)
    assert caught.value.field == "api_key"
    assert not key or key not in caught.value.message
