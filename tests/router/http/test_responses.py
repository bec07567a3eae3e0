"""`/v1/responses`: what its body and its tokens become, and what is left when it fails or its client leaves."""

import itertools
import json
from collections.abc import Sequence
from typing import Any, get_args

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from common.errors import EngineFault, InvalidRequest
from common.wire import MAX_CHAT_MESSAGES
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2
from router.http.json_parts import PART_VALUES
from router.http.responses.call import read_response
from router.http.responses.items import read_input
from router.http.responses.output import ResponseOutput
from router.http.responses.parts import Events
from router.http.styles import call_id
from tests.router.fake_worker import pair
from tests.router.fakes import config_with
from tests.router.http.clients import HttpCluster, http_cluster

PATH = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(get_args(ResponseStreamEvent)[0])
ANSWER = '<think>so it\nis</think>\n\nLook: <tool_call>\n{"name": "now", "arguments": {"a": [1, "é"]}}\n</tool_call>'
TWO_CALLS = ANSWER[ANSWER.index("<tool") :] * 2
CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "12"}]}
USER = {"role": "user", "content": "hi"}


def body_of(**fields: Any) -> bytes:
    return json.dumps({"input": "hi", **fields}).encode()


def output_of(text: str, cuts: set[int], *, is_cut: bool = False) -> tuple[ResponseOutput, str]:
    """Return what an answer that comes in pieces becomes, and its events."""
    events = Events(is_streamed=True)
    answer = pb.AnswerFormat(tools="hermes", reasoning="qwen3")
    output = ResponseOutput(events, request_id="r", answer=answer, texts=None)
    edges = sorted({0, *cuts, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    *begin, end = [sampling_pb2.SampleToken(text=piece) for piece in pieces]
    end.finish_reason = sampling_pb2.FINISH_REASON_LENGTH if is_cut else sampling_pb2.FINISH_REASON_STOP
    for token in (*begin, end):
        output.take([token])
    output.close()
    return output, "".join(events.take())


@given(st.sets(st.integers(1, len(ANSWER) - 1)))
def test_any_split_of_an_answer_gives_the_same_items_and_deltas_that_add_up(cuts: set[int]) -> None:
    output, raw = output_of(ANSWER, cuts)
    thoughts, message, call = output.documents
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "so it\nis"}]
    assert message["content"][0]["text"].strip() == "Look:"
    assert (call["name"], call["arguments"]) == ("now", '{"a": [1, "é"]}')
    assert call["call_id"] == call_id("r", 0, 0)
    told = [json.loads(event.partition("data: ")[2]) for event in raw.split("\n\n") if event]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    for event in told:
        EVENTS.validate_python(event)
    deltas = ["".join(e["delta"] for e in told if e.get("output_index") == i and "delta" in e) for i in range(3)]
    assert deltas == ["so it\nis", message["content"][0]["text"], call["arguments"]]
    assert [e["item"] for e in told if e["type"] == "response.output_item.done"] == output.documents


def test_tokens_of_the_thoughts_are_counted() -> None:
    output, _ = output_of(ANSWER, set(range(1, len(ANSWER))))
    assert output.num_reasoning_tokens == len("<think>so it\nis")


def test_calls_one_after_the_other_are_items_with_ids_of_their_own() -> None:
    output, _ = output_of(TWO_CALLS, set(range(1, len(TWO_CALLS))))
    assert [item["type"] for item in output.documents] == ["function_call"] * 2
    assert len({item["call_id"] for item in output.documents}) == len({item["id"] for item in output.documents}) == 2


def test_last_item_of_an_answer_that_is_cut_is_incomplete() -> None:
    output, _ = output_of(ANSWER[:-20], set(), is_cut=True)
    assert [item["status"] for item in output.documents] == ["completed", "completed", "incomplete"]
    assert output.is_cut


def test_answer_that_fails_has_what_has_come_so_far() -> None:
    output = ResponseOutput(
        Events(is_streamed=True), request_id="r", answer=pb.AnswerFormat(reasoning="qwen3"), texts=None
    )
    assert output.partial() == []
    output.take([sampling_pb2.SampleToken(text=text) for text in ("<think>", "so", "</think>", "It", " is")])
    assert [item["content"][0]["text"] for item in output.partial()] == ["so", "It is"]
    assert [item["status"] for item in output.partial()] == ["completed", "incomplete"]


def test_answer_without_text_is_an_empty_message() -> None:
    output, _ = output_of("<", set())
    assert [item["content"][0]["text"] for item in output.documents] == ["<"]
    empty = ResponseOutput(Events(is_streamed=False), request_id="r", answer=pb.AnswerFormat(), texts=None)
    empty.close()
    assert [item["content"][0]["text"] for item in empty.documents] == [""]


def test_log_probabilities_of_an_answer_without_text_are_not_all_made_at_its_end() -> None:
    made: list[int] = []

    def texts(token_ids: Sequence[int]) -> list[str]:
        made.extend(token_ids)
        return ["x"] * len(token_ids)

    events = Events(is_streamed=True)
    output = ResponseOutput(events, request_id="r", answer=pb.AnswerFormat(), texts=texts)
    output.take([sampling_pb2.SampleToken()] * PART_VALUES)
    made.clear()
    output.close()
    assert not made
    parts = list(events.take())
    told = [json.loads(event.partition("data: ")[2]) for event in "".join(parts).split("\n\n") if event]
    assert [len(event["logprobs"]) for event in told if event["type"].endswith("delta")] == [PART_VALUES]
    assert max(part.count('"logprob"') for part in parts) < PART_VALUES


def test_items_of_an_assistants_turn_become_one_message() -> None:
    thought = {"type": "reasoning", "id": "x", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
    again = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    calls = [CALL, {**CALL, "call_id": "c2"}]
    turns = read_input([USER, thought, said, *calls, RESULT, again, {**said, "content": "Noon."}])
    function = {"name": "now", "arguments": "{}"}
    assert turns == [
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning": "hm",
            "tool_calls": [{"id": each, "type": "function", "function": function} for each in ("c1", "c2")],
        },
        {"role": "tool", "content": "12", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Noon.", "reasoning": "short"},
    ]


def test_two_messages_of_an_assistant_remain_two() -> None:
    said = {"role": "assistant", "content": "one"}
    assert read_input([said, {**said, "content": "two"}]) == [said, {**said, "content": "two"}]


def test_body_becomes_the_request_of_the_chat_that_it_stands_for() -> None:
    call = read_response(
        body_of(
            instructions="Be brief.",
            max_output_tokens=5,
            min_p=0.5,
            reasoning={"effort": "low"},
            tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}],
            tool_choice={"type": "function", "name": "f"},
            parallel_tool_calls=False,
            kvrelay={"timeout_s": 3, "ttft_s": 1},
        )
    )
    (request,) = call.requests
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", "Be brief."), ("user", "hi")]
    assert (request.sampling.max_tokens, request.sampling.min_p, request.objective.ttft_s) == (5, 0.5, 1)
    function = {"name": "f", "parameters": {"type": "object"}}
    assert [json.loads(tool) for tool in request.chat.tools] == [{"type": "function", "function": function}]
    assert (request.chat.tool_choice.name, request.chat.tool_choice.is_single) == ("f", True)
    assert json.loads(request.chat.template_variables) == {"reasoning_effort": "low"}
    assert call.timeout_s == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [USER] * (MAX_CHAT_MESSAGES + 1)}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": "web_search_calls"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": ["user"], "content": "a"}]}, "input[0].role"),
        ({"input": [USER, {"role": "user"}]}, "input[1].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name"),
        ({"input": [{**RESULT, "call_id": 1}]}, "input[0].call_id"),
        ({"input": [{**RESULT, "output": 12}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": [{"text": "a"}]}]}, "input[0].content[0]"),
        ({"input": [CALL] * 129}, "input"),
        ({"instructions": ["a"]}, "instructions"),
        ({"tools": [{"type": None}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"format": {}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"text": {"format": {"type": "text", "schemas": {}}}}, "text.format.schemas"),
        ({"text": {"formats": {}}}, "text.formats"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"json": {}}}, "text.format"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"efforts": 1}}, "reasoning.efforts"),
        ({"include": ["x"] * 17}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
        ({"kvrelay": {"timeout_s": 0}}, "kvrelay.timeout_s"),
        ({"priority": 2**31}, "priority"),
    ],
)
def test_bad_field_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_response(body_of(**fields))
    assert caught.value.field == param, caught.value


def test_what_is_not_stored_is_refused_with_a_way_out() -> None:
    with pytest.raises(InvalidRequest, match="send the whole conversation in input"):
        read_response(body_of(previous_response_id="resp_1"))


async def test_error_in_mid_stream_tells_what_has_come_and_the_client_raises() -> None:
    prefill, decode = pair()
    decode.faults["token 3"] = EngineFault("a step failed")
    async with http_cluster(prefill, decode, config=config_with(http_port=0, max_attempts=1)) as http:
        stream = await http.client.responses.create(model="fake", input="hi", stream=True)
        events: list[Any] = []
        with pytest.raises(openai.APIError, match="a step failed") as caught:
            async for event in stream:
                events.append(event)
        assert caught.value.code == "engine_fault"
        last = events[-1]
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert (last.response.error.code, last.response.error.message) == ("server_error", "a step failed")
        assert (await http.cluster.until_idle()).num_failed == 1


async def test_prompt_that_is_too_long_names_the_input(http: HttpCluster) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await http.client.responses.create(model="fake", input="a" * 200)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
