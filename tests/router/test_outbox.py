"""The outbox of a client, and the merge window of a busy router."""

import asyncio

from common.errors import EngineFault
from common.wire import pack_tokens
from kvrelay.v1 import inference_pb2, sampling_pb2
from router.outbox import BUSY, CALM, MAX_WINDOW_S, MIN_WINDOW_S, MergeWindow, Outbox


def token(index: int, sample: int = 0) -> sampling_pb2.SampleToken:
    return sampling_pb2.SampleToken(sample_index=sample, token_index=index, token_id=index, text=f"{index} ")


def run(first: int, *ids: int, sample: int = 0, ends: bool = False) -> sampling_pb2.TokenRun:
    reason = sampling_pb2.FINISH_REASON_LENGTH if ends else sampling_pb2.FINISH_REASON_UNSPECIFIED
    return sampling_pb2.TokenRun(
        sample_index=sample, first_token_index=first, tokens=pack_tokens(ids), finish_reason=reason
    )


async def test_outbox_delivers_what_was_put_before_an_error() -> None:
    outbox = Outbox()
    outbox.put(inference_pb2.GenerateResponse(accepted=inference_pb2.Accepted(num_prompt_tokens=3)))
    outbox.close(EngineFault("step"))
    message = await outbox.get()
    assert message is not None
    assert message.accepted.num_prompt_tokens == 3
    assert await outbox.get() is None
    assert isinstance(outbox.error, EngineFault)


async def test_tokens_that_wait_become_one_message_in_order_and_others_keep_their_place() -> None:
    outbox = Outbox()
    outbox.put_tokens([token(0), token(0, sample=1)], [])
    outbox.put_tokens([token(1)], [])
    outbox.put(inference_pb2.GenerateResponse(plan=inference_pb2.PlanChosen(attempt=2)))
    outbox.put_tokens([token(2)], [])
    outbox.close(None)
    messages = [await outbox.get() for _ in range(4)]
    assert [m and m.WhichOneof("event") for m in messages] == ["tokens", "plan", "tokens", None]
    assert messages[0] is not None
    assert list(messages[0].tokens.tokens) == [token(0), token(0, sample=1), token(1)]


async def test_runs_that_wait_become_one_per_sample() -> None:
    outbox = Outbox()
    outbox.put_tokens([], [run(0, 5), run(0, 8, sample=1)])
    outbox.put_tokens([], [run(1, 6, 7, ends=True), run(1, 9, sample=1)])
    message = await outbox.get()
    assert message is not None
    assert list(message.tokens.runs) == [run(0, 5, 6, 7, ends=True), run(0, 8, 9, sample=1)]


async def test_a_message_that_was_taken_does_not_change_any_more() -> None:
    outbox = Outbox()
    outbox.put_tokens([token(0)], [])
    first = await outbox.get()
    outbox.put_tokens([token(1)], [])
    second = await outbox.get()
    assert first is not None
    assert second is not None
    assert (list(first.tokens.tokens), list(second.tokens.tokens)) == ([token(0)], [token(1)])


async def test_a_reader_that_waits_is_woken_by_tokens_and_by_the_end() -> None:
    outbox = Outbox()
    reading = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.put_tokens([token(0)], [])
    assert await reading is not None
    reading = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.close(None)
    assert await reading is None


async def test_tokens_that_wait_for_long_become_messages_that_can_be_sent() -> None:
    outbox = Outbox()
    for index in range(10_000):
        outbox.put_tokens([token(index)], [])
    outbox.close(None)
    messages = []
    while (message := await outbox.get()) is not None:
        messages.append(message.tokens.tokens)
    assert [len(tokens) for tokens in messages] == [4096, 4096, 10_000 - 2 * 4096]
    assert [each.token_index for tokens in messages for each in tokens] == list(range(10_000))


def test_window_grows_while_busy_stays_between_and_shrinks_to_nothing_when_calm() -> None:
    window = MergeWindow()
    window.adapt((BUSY + CALM) / 2)
    assert window.window_s == 0
    seen = []
    for _ in range(6):
        window.adapt(1.0)
        seen.append(window.window_s)
    assert seen == [MIN_WINDOW_S, 2 * MIN_WINDOW_S, 4 * MIN_WINDOW_S, *[MAX_WINDOW_S] * 3]
    window.adapt((BUSY + CALM) / 2)
    assert window.window_s == MAX_WINDOW_S
    for _ in range(4):
        window.adapt(0.0)
    assert window.window_s == 0


async def test_over_without_a_window_returns_at_once() -> None:
    await asyncio.wait_for(MergeWindow().over(), 0.001)


async def test_waiting_clients_share_one_window_that_outlives_one_of_them() -> None:
    window = MergeWindow()
    window.adapt(1.0)
    waiting = [asyncio.create_task(window.over()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not waiting[1].done()
    loop, started_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    await asyncio.gather(*waiting[1:])
    assert 0 < loop.time() - started_s < 1.0
    assert waiting[0].cancelled()
