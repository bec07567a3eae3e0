"""Many calls on one stream: each as if it had a stream of its own."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from common.errors import (
    InvalidRequest,
    KvrelayError,
    Overloaded,
    StaleEpoch,
    WorkerLost,
    from_status_bytes,
    to_status_bytes,
)
from common.structured import TaskTracker
from decode_worker.service import DecodeService
from decode_worker.shared_stream import MESSAGES_PER_ACKNOWLEDGEMENT, Outlet, SharedStream
from engine.request import EngineRequest
from kvrelay.v1 import decode_pb2 as pb
from kvrelay.v1 import sampling_pb2, sequence_pb2
from tests.builders import expected_tokens, make_request
from tests.worker.calls import Answer, Pair, error_of, spec_of
from tests.worker.cluster import held_steps, running_pair, until_taken_in

TIMEOUT_S = 60.0


class Many:
    """The router's side of a shared stream."""

    def __init__(self, pair: Pair) -> None:
        self._epoch = pair.decode.runtime.epoch
        self.call = pair.decode_stub.DecodeMany()
        self.answers: dict[int, Answer] = {}
        self.ends: dict[int, KvrelayError | None] = {}
        self.num_messages = 0
        self.widest = 0
        """Most calls that one message concerned."""

    async def open(self, call_id: int, request: EngineRequest, *, epoch: int | None = None) -> None:
        decode = pb.DecodeRequest(sequence=spec_of(request), epoch=self._epoch if epoch is None else epoch)
        await self.call.write(pb.DecodeManyRequest(call_id=call_id, open=decode))

    async def close(self, call_id: int) -> None:
        await self.call.write(pb.DecodeManyRequest(call_id=call_id, close=pb.CloseCall()))

    async def read(self) -> None:
        message = await self.call.read()
        assert message is not grpc.aio.EOF
        self.num_messages += 1
        self.widest = max(self.widest, len(message.updates))
        for update in message.updates:
            assert update.call_id not in self.ends, "a message behind the end of its call"
            for response in update.responses:
                for token in response.tokens.tokens:
                    self.answers.setdefault(update.call_id, Answer()).take(token)
            if update.HasField("status_code"):
                self.ends[update.call_id] = from_status_bytes(update.status) if update.status_code else None

    async def until_ended(self, *call_ids: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not self.ends.keys() >= set(call_ids):
                await self.read()


def endless(seed: int) -> EngineRequest:
    return make_request([seed] * 9, max_tokens=400, ignore_eos=True)


async def test_calls_side_by_side_answer_like_the_oracle_with_one_message_a_step() -> None:
    async with running_pair(decode={"step_s": 0.02}) as pair:
        many = Many(pair)
        requests = {i: make_request([i % 5] * (3 + i), max_tokens=20, ignore_eos=True) for i in range(8)}
        with held_steps(pair.decode):
            for call_id, request in requests.items():
                await many.open(call_id, request)
            await until_taken_in(pair.decode, len(requests))
        await many.until_ended(*requests)
        assert many.ends == dict.fromkeys(requests)
        for call_id, request in requests.items():
            assert many.answers[call_id].tokens[0] == expected_tokens(request), call_id
        assert many.widest == 8
        assert many.num_messages < 8 * 20


async def test_close_of_one_call_frees_it_and_leaves_the_others() -> None:
    async with running_pair(decode={"num_blocks": 1024}) as pair:
        many = Many(pair)
        mine = make_request(range(7), max_tokens=40, ignore_eos=True)
        with held_steps(pair.decode) as steps:
            for call_id in (1, 2):
                await many.open(call_id, endless(call_id))
            await many.open(3, mine)
            await until_taken_in(pair.decode, 3)
            steps.let_go(8)
            while len(many.answers) < 3:
                await many.read()
            await many.close(1)
            await many.close(2)
            await many.close(77)  # never opened: harmless
            await until(lambda: pair.decode.runtime.calls.num_cancelled == 2)
        await many.until_ended(3)
        assert many.answers[3].tokens[0] == expected_tokens(mine)
        assert 1 not in many.ends
        assert pair.decode.runtime.calls.num_cancelled == 2


async def test_failure_ends_its_own_call_only_and_keeps_its_class() -> None:
    async with running_pair(decode={"num_blocks": 16}) as pair:
        many = Many(pair)
        await many.open(1, make_request([1, 2], max_tokens=3, ignore_eos=True), epoch=5)
        bad = make_request([1], detokenize=False, stop=("x",))
        await many.open(2, bad)
        await many.open(3, make_request(range(9), max_tokens=12, ignore_eos=True))
        await many.until_ended(1, 2, 3)
        assert isinstance(many.ends[1], StaleEpoch)
        assert isinstance(many.ends[2], InvalidRequest)
        assert many.ends[2].field == "sampling.stop"
        assert many.ends[3] is None


async def test_end_of_the_stream_cancels_every_call_on_it() -> None:
    async with running_pair(decode={"step_s": 0.001, "num_blocks": 1024}) as pair:
        many = Many(pair)
        for call_id in range(4):
            await many.open(call_id, endless(call_id))
        while len(many.answers) < 4:
            await many.read()
        many.call.cancel()


async def test_call_id_that_is_in_use_ends_the_stream() -> None:
    async with running_pair() as pair:
        many = Many(pair)
        with held_steps(pair.decode):
            await many.open(1, endless(1))
            await many.open(1, endless(2))
            assert isinstance(await error_of(many.call), InvalidRequest)


async def test_stop_of_a_worker_waits_for_calls_but_not_for_streams() -> None:
    async with running_pair(decode={"num_blocks": 1024}, ends_empty=False) as pair:
        many, idle = Many(pair), Many(pair)
        request = make_request(range(5), max_tokens=60, ignore_eos=True)
        await idle.open(1, make_request([1], max_tokens=1))
        await idle.until_ended(1)
        async with asyncio.timeout(TIMEOUT_S):
            with held_steps(pair.decode) as steps:
                await many.open(1, request)
                steps.let_go(8)
                while not many.answers:
                    await many.read()
                stopping = asyncio.create_task(pair.decode.stop(2 * TIMEOUT_S))
                assert await idle.call.read() is grpc.aio.EOF
                await many.open(2, request)
                await many.until_ended(2)
            await many.until_ended(1)
            await stopping
        assert many.answers[1].tokens[0] == expected_tokens(request)
        assert isinstance(many.ends[2], WorkerLost)


class Script:
    """Drives a SharedStream without a network: calls are outlets, and tests decide how long a write takes."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[pb.DecodeManyRequest] = asyncio.Queue()
        self.outlets: dict[str, Outlet] = {}
        self.messages: list[pb.DecodeManyResponse] = []
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.stream = SharedStream(self._serve, TaskTracker())
        self.running = asyncio.create_task(self.stream.run(self._requests(), self._write))

    async def open(self, call_id: int, name: str) -> Outlet:
        spec = pb.DecodeRequest()
        spec.sequence.request_id = name
        self.requests.put_nowait(pb.DecodeManyRequest(call_id=call_id, open=spec))
        await until(lambda: name in self.outlets)
        return self.outlets[name]

    async def _serve(self, request: pb.DecodeRequest, outlet: Outlet) -> None:
        self.outlets[request.sequence.request_id] = outlet
        await asyncio.Event().wait()

    async def _requests(self) -> AsyncIterator[pb.DecodeManyRequest]:
        while True:
            yield await self.requests.get()

    async def _write(self, message: pb.DecodeManyResponse) -> None:
        self.messages.append(message)
        await self.can_write.wait()


@pytest_asyncio.fixture
async def script() -> AsyncIterator[Script]:
    made = Script()
    yield made
    made.running.cancel()


async def until(condition: Any) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - nothing but turns of the loop is waited for
            await asyncio.sleep(0)


def batch(index: int) -> pb.TokenBatch:
    return pb.TokenBatch(tokens=[sampling_pb2.SampleToken(token_index=index, token_id=index)])


def tokens_in(messages: list[pb.DecodeManyResponse]) -> list[int]:
    updates = [update for message in messages for update in message.updates]
    return [token.token_id for update in updates for each in update.responses for token in each.tokens.tokens]


LARGE = 29 << 20
"""Log-probabilities of 131,072 prompt tokens, 20 for each."""


async def test_large_answers_in_one_step_fail_neither_each_other_nor_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_are_here = asyncio.Barrier(6)

    async def say_much(_service: DecodeService, request: pb.DecodeRequest, outlet: Outlet) -> None:
        await all_are_here.wait()
        text = "x" * (LARGE if request.sequence.request_id == "large" else 1)
        outlet.put_tokens(pb.TokenBatch(tokens=[sampling_pb2.SampleToken(text=text)]))

    monkeypatch.setattr(DecodeService, "_serve", say_much)
    async with running_pair() as pair:
        many = Many(pair)
        for call_id in range(6):
            name = "large" if call_id % 2 else "small"
            spec = pb.DecodeRequest(sequence=sequence_pb2.SequenceSpec(request_id=name))
            await many.call.write(pb.DecodeManyRequest(call_id=call_id, open=spec))
        await many.until_ended(*range(6))
        assert many.ends == dict.fromkeys(range(6))
        assert [len(many.answers[call_id].text[0]) for call_id in range(6)] == [1, LARGE] * 3


async def test_tokens_that_wait_for_a_slow_reader_come_in_messages_of_bounded_size(script: Script) -> None:
    talker, other = await script.open(1, "a"), await script.open(2, "b")
    script.can_write.clear()
    top = [sampling_pb2.TokenLogprob(token_id=150_000, logprob=-1.0)] * 20
    logprobs = sampling_pb2.PositionLogprobs(chosen=top[0], top=top)
    num_tokens = 40_000
    for index in range(num_tokens):
        token = sampling_pb2.SampleToken(token_index=index, token_id=150_000, logprobs=logprobs)
        talker.put_tokens(pb.TokenBatch(tokens=[token]))
        if index == 0:
            await until(lambda: script.messages)
    other.put_tokens(batch(0))
    script.can_write.set()
    seen: list[int] = []
    async with asyncio.timeout(TIMEOUT_S):
        while len(seen) < num_tokens:
            await asyncio.sleep(0)
            seen = [t.token_index for u in updates_of(script, 1) for r in u.responses for t in r.tokens.tokens]
    assert seen == list(range(num_tokens))
    assert max(message.ByteSize() for message in script.messages) < 8 << 20 < logprobs.ByteSize() * num_tokens
    assert script.messages[1].updates[1].call_id == 2, "a short answer does not wait for a long one"


def updates_of(script: Script, call_id: int) -> list[pb.CallUpdate]:
    return [update for message in script.messages for update in message.updates if update.call_id == call_id]


async def test_calls_of_one_message_are_opened_and_closed_in_order(script: Script) -> None:
    await script.open(1, "a")
    opened = pb.DecodeManyRequest(call_id=2)
    opened.open.sequence.request_id = "b"
    script.requests.put_nowait(pb.DecodeManyRequest(call_id=1, close=pb.CloseCall(), others=[opened]))
    await until(lambda: "b" in script.outlets)
    for name in "ab":
        script.outlets[name].put_tokens(batch(0))
    await until(lambda: script.messages)
    assert [update.call_id for update in script.messages[0].updates] == [2]


async def test_empty_request_ends_the_stream(script: Script) -> None:
    script.requests.put_nowait(pb.DecodeManyRequest(call_id=1))
    with pytest.raises(InvalidRequest, match="open, close and acknowledgement"):
        await script.running


def test_refusals_keep_their_retry_hint_on_the_way() -> None:
    code, raw = to_status_bytes(Overloaded("full", retry_after_s=1.5))
    error = from_status_bytes(raw)
    assert (code, type(error), error.message, error.retry_after_s) == (8, Overloaded, "full", 1.5)


async def test_router_that_takes_its_messages_late_gets_few_and_then_all_that_came(script: Script) -> None:
    outlet = await script.open(1, "one")
    acknowledge = pb.DecodeManyRequest(acknowledgement=pb.Acknowledgement())

    async def put(first: int, last: int) -> None:
        for index in range(first, last):
            outlet.put_tokens(batch(index))
            for _ in range(4):  # turns, in which each is written on its own while it may be
                await asyncio.sleep(0)

    await put(0, 1)
    assert script.messages[0].awaits_acknowledgement
    script.requests.put_nowait(acknowledge)
    await put(1, 40)
    assert len(script.messages) <= 2 * MESSAGES_PER_ACKNOWLEDGEMENT
    script.requests.put_nowait(acknowledge)
    await until(lambda: tokens_in(script.messages) == list(range(40)))


async def test_router_that_never_acknowledges_gets_every_message(script: Script) -> None:
    outlet = await script.open(1, "one")
    for index in range(40):
        outlet.put_tokens(batch(index))
        await until(lambda index=index: len(script.messages) == index + 1)


async def test_drained_stream_ends_when_the_router_closes_its_last_call(script: Script) -> None:
    await script.open(1, "one")
    script.stream.drain()
    await asyncio.sleep(0)
    script.requests.put_nowait(pb.DecodeManyRequest(call_id=1, close=pb.CloseCall()))
    async with asyncio.timeout(TIMEOUT_S):
        await script.running
