"""Clients with nothing but the proto: messages come parsed, and go on in the middle after their router is gone."""

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from common.errors import InvalidRequest, KvrelayError, from_rpc_error
from common.rpc import client_channel
from common.wire import pack_tokens
from kvrelay.client.chat import set_chat_options
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc
from router.reading.parsed_answers import ParsedAnswer
from tests.e2e.in_process import System, running_system
from tests.e2e.test_tools import CLOCK, OPTIONS, TURNS, WEATHER

pytestmark = pytest.mark.asyncio(loop_scope="module")


def asked(*, n: int = 1) -> pb.GenerateRequest:
    """Return a request whose answers call tools."""
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(**turn) for turn in TURNS], parse_answer=True)
    set_chat_options(chat, {"tools": [WEATHER, CLOCK], "tool_choice": "required"})
    request = pb.GenerateRequest(chat=chat)
    for name, value in {**OPTIONS, "n": n}.items():
        setattr(request.sampling, name, value)
    return request


async def messages_of(system: System, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Return the whole stream. Raises KvrelayError."""
    async with client_channel(system.address) as channel:
        try:
            return [message async for message in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


def joined(deltas: Sequence[pb.MessageDelta], index: int = 0) -> list[tuple[str, str, str]]:
    """Return id, name and arguments of every call of a sample."""
    calls: dict[int, tuple[str, str, str]] = {}
    for delta in deltas:
        assert not delta.reasoning
        if delta.sample_index == index:
            for call in delta.tool_calls:
                call_id, name, arguments = calls.get(call.index, (call.id, call.name, ""))
                calls[call.index] = (call_id, name, arguments + call.arguments)
    return list(calls.values())


async def test_messages_of_all_samples_are_those_that_the_python_client_parses() -> None:
    async with running_system(num_blocks=400, step_s=0.02) as system, system.client() as client:
        replies = await messages_of(system, asked(n=3))
        wanted = await client.chat(TURNS, tools=[WEATHER, CLOCK], tool_choice="required", **{**OPTIONS, "n": 3})
    deltas = [delta for reply in replies for delta in reply.tokens.messages]
    for index, sample in enumerate(wanted.samples):
        assert sample.message is not None
        assert joined(deltas, index) == [(call.id, call.name, call.arguments) for call in sample.message.tool_calls]
    assert len(deltas) > 6, "deltas come while the answers are generated"


async def test_text_alone_brings_no_messages(system: System) -> None:
    request = asked()
    request.chat.parse_answer = False
    assert not any(reply.tokens.messages for reply in await messages_of(system, request))


def resumed(request: pb.GenerateRequest, accepted: pb.Accepted) -> pb.GenerateRequest:
    """Return a request that goes on with an answer, without its samples."""
    request.sampling.MergeFrom(accepted.defaults)
    request.sampling.seed = accepted.seed
    request.resume.fingerprint = accepted.fingerprint
    request.resume.rendered_unix_s = accepted.rendered_unix_s
    request.resume.answer_format.CopyFrom(accepted.answer_format)
    return request


async def test_message_goes_on_behind_every_token_of_an_answer_that_another_router_began(system: System) -> None:
    first, *replies = await messages_of(system, asked())
    tokens = [token for reply in replies for token in reply.tokens.tokens]
    whole = joined([delta for reply in replies for delta in reply.tokens.messages])
    for num_known in range(1, len(tokens), 3):
        known = tokens[:num_known]
        request = resumed(asked(), first.accepted)
        request.resume.samples.add(tokens=packed(known), text="".join(token.text for token in known))
        rest = [delta for reply in await messages_of(system, request) for delta in reply.tokens.messages]
        begun = joined(await _parsed(known, first.accepted.answer_format))
        assert _concatenated(begun, joined(rest)) == whole, num_known


async def test_sample_that_has_ended_says_nothing_more_and_the_other_goes_on(system: System) -> None:
    first, *replies = await messages_of(system, asked(n=2))
    whole = joined([delta for reply in replies for delta in reply.tokens.messages], 1)
    tokens = [token for reply in replies for token in reply.tokens.tokens if token.sample_index == 0]
    request = resumed(asked(n=2), first.accepted)
    request.resume.samples.add(tokens=packed(tokens), text="".join(token.text for token in tokens), is_finished=True)
    rest = [delta for reply in await messages_of(system, request) for delta in reply.tokens.messages]
    assert {delta.sample_index for delta in rest} == {1}
    assert joined(rest, 1) == whole


@pytest.mark.parametrize(("text", "fault"), [(None, "resumed with its text"), ("x" * 5000, "at most")])
async def test_resumed_answer_without_its_text_or_with_too_much_of_it_is_refused(
    system: System, text: str | None, fault: str
) -> None:
    first, *replies = await messages_of(system, asked())
    tokens = [token for reply in replies for token in reply.tokens.tokens][:3]
    request = resumed(asked(), first.accepted)
    request.resume.samples.add(tokens=packed(tokens), text=text)
    with pytest.raises(InvalidRequest, match=fault) as caught:
        await messages_of(system, request)
    assert caught.value.field == "resume.samples[0].text"


def packed(tokens: Sequence[Any]) -> bytes:
    return pack_tokens([token.token_id for token in tokens])


async def _parsed(known: Sequence[Any], answer: pb.AnswerFormat) -> list[pb.MessageDelta]:
    """Return what a client had been told with these tokens."""
    delta = pb.TokenDelta(tokens=known)
    await ParsedAnswer(answer).add_to(delta)
    return list(delta.messages)


def _concatenated(begun: list[tuple[str, str, str]], rest: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return all calls; one that the rest goes on with has no name there."""
    if rest and not rest[0][1]:
        (call_id, name, arguments), more = begun[-1], rest[0][2]
        return [*begun[:-1], (call_id, name, arguments + more), *rest[1:]]
    return begun + rest


@pytest.mark.parametrize("how", ["direct", "no text"])
async def test_answer_that_cannot_be_parsed_is_refused(system: System, how: str) -> None:
    request = asked()
    if how == "direct":
        request.direct = True
    else:
        request.sampling.detokenize = False
    with pytest.raises(KvrelayError, match=r"parse") as caught:
        await messages_of(system, request)
    assert caught.value.field == "chat.parse_answer"
