"""No answer that a client can ask for holds the event loop of a worker, and so all its other calls, for 50 ms."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from common.ids import mint_handoff_id
from common.structured import TaskTracker, end_all, one_turn
from common.token_batches import num_tokens_in
from decode_worker.direct import CAPABILITY_BYTES, DirectAnswer
from decode_worker.shared_stream import Outlet, SharedStream
from engine.executor import Logprobs
from engine.fake import FakeExecutor
from kvrelay.v1 import decode_pb2 as pb
from kvrelay.v1 import sampling_pb2
from tests.builders import make_request
from tests.router.heartbeat import BEAT_S, Heart, HeldLoop
from tests.worker.calls import Pair
from tests.worker.cluster import running_pair
from worker.output import fill_prompt_logprobs

MAX_HELD_S = 0.05
_NUM_TRIES = 5
"""The shortest hold counts: a busy machine computes slowly at times."""
_NUM_TOKENS, _NUM_TOP = 12_800, 20
_REQUEST = make_request(
    [number % 250 for number in range(_NUM_TOKENS)], max_tokens=2, num_prompt_logprobs=_NUM_TOP, block_size=16
)

pytestmark = pytest.mark.e2e


@pytest.fixture
async def held(tmp_path: Path) -> Any:
    """A heart in the loop of the test."""
    told = HeldLoop(tmp_path / "held")
    heart = Heart(told)
    yield told
    heart.stop()


async def longest_s(held: HeldLoop, work: Callable[[], Awaitable[None]]) -> float:
    """Return how long the work held the loop at the least."""
    shortest_s = float("inf")
    for _ in range(_NUM_TRIES):
        await _beats(held)
        held.forget()
        await work()
        await _beats(held)
        shortest_s = min(shortest_s, held.longest_s)
        if shortest_s < MAX_HELD_S:
            break
    return shortest_s


async def _beats(held: HeldLoop) -> None:
    num_before = held.num_beats
    while held.num_beats < num_before + 3:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(BEAT_S)


def fake() -> dict[str, Any]:
    executor = FakeExecutor(num_blocks=4_000, block_size=16, max_model_len=1 << 15)
    return {"executor": executor, "max_step_tokens": 1024}


def check(positions: Any) -> None:
    """Check that the log-probabilities of the whole prompt came, in order."""
    assert [each.chosen.token_id for each in positions] == [0, *_REQUEST.prompt_token_ids[1:]]
    assert not positions[0].HasField("chosen")
    assert all(len(each.top) == _NUM_TOP for each in positions[1:])


async def test_prompts_log_probabilities_hold_no_other_call_of_a_prefill_worker_up(held: HeldLoop) -> None:
    async with running_pair(prefill=fake(), decode=fake()) as pair:
        found = []

        async def prefill() -> None:
            call = pair.open_prefill(_REQUEST, mint_handoff_id())
            while not (message := await call.read()).HasField("finished"):
                pass
            found.append(message.finished)
            call.cancel()

        assert await longest_s(held, prefill) < MAX_HELD_S, held.stacks
    check(found[-1].prompt_logprobs)


async def test_prompts_log_probabilities_hold_no_other_call_of_a_decode_worker_up(held: HeldLoop) -> None:
    async with running_pair(prefill=fake(), decode=fake()) as pair:
        found: list[pb.TokenBatch] = []

        async def decode() -> None:
            found.clear()
            found.extend(await _batches(pair))

        assert await longest_s(held, decode) < MAX_HELD_S, held.stacks
    check(found[0].prompt_logprobs)
    assert [token.token_index for batch in found for token in batch.tokens] == [0, 1]
    assert not any(batch.prompt_logprobs for batch in found[1:])


async def _batches(pair: Pair) -> list[pb.TokenBatch]:
    call = pair.open_decode(_REQUEST, None)
    found = []
    while isinstance(message := await call.read(), pb.DecodeResponse):
        if message.HasField("tokens"):
            found.append(message.tokens)
    return found


def filled(num_tokens: int) -> pb.TokenBatch:
    """Return a token with the log-probabilities of a prompt."""
    entry = Logprobs(token_id=1, logprob=-1.0, top=tuple((token_id, -1.0) for token_id in range(_NUM_TOP)))
    batch = pb.TokenBatch(tokens=[sampling_pb2.SampleToken(token_id=5, finish_reason=sampling_pb2.FINISH_REASON_STOP)])
    for _ in fill_prompt_logprobs(batch, [entry] * num_tokens):
        pass
    return batch


async def test_prompts_log_probabilities_of_many_calls_hold_no_other_one_up(held: HeldLoop) -> None:
    num_calls, tokens = 12, filled(5_000)
    responses: list[pb.DecodeResponse] = []
    sent: list[tuple[int, int]] = []

    async def requests() -> AsyncIterator[pb.DecodeManyRequest]:
        for call_id in range(1, 1 + num_calls):
            yield pb.DecodeManyRequest(call_id=call_id, open=pb.DecodeRequest())
        await asyncio.Event().wait()

    async def serve(_request: pb.DecodeRequest, outlet: Outlet) -> None:
        outlet.put(responses.pop())

    async def write(message: pb.DecodeManyResponse) -> None:
        sent.extend((update.call_id, len(update.responses[0].tokens.prompt_logprobs)) for update in message.updates)

    async def answer() -> None:
        sent.clear()
        while len(responses) < num_calls:
            responses.append(pb.DecodeResponse(tokens=tokens))
            await one_turn()
        stream = SharedStream(serve, TaskTracker())
        running = asyncio.create_task(stream.run(requests(), write))
        async with asyncio.timeout(60):
            while len(sent) < num_calls:  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(BEAT_S)
        await end_all((running,))

    assert await longest_s(held, answer) < MAX_HELD_S, held.stacks
    assert sent == [(call_id, 5_001) for call_id in range(1, 1 + num_calls)]


async def test_prompts_log_probabilities_hold_no_other_direct_stream_up(held: HeldLoop) -> None:
    batch = filled(3 * _NUM_TOKENS)
    sent = []

    async def write(message: pb.StreamTokensResponse) -> None:
        sent.append((num_tokens_in(message.tokens.tokens, ()), len(message.tokens.prompt_logprobs)))

    async def stream() -> None:
        access = pb.DirectAccess(capability=bytes(CAPABILITY_BYTES), ttl_s=60.0, checkpoint_tokens=1)
        answer = DirectAnswer(access, range(1), (), lambda _batch: None, lambda _error: None)
        answer.put(batch)
        delivered = asyncio.ensure_future(answer.delivered())
        await answer.stream((), write)
        await delivered

    assert await longest_s(held, stream) < MAX_HELD_S, held.stacks
    assert set(sent) == {(1, 1 + 3 * _NUM_TOKENS)}
