"""Token delivery: once, in order, or not at all; the outbox of a client, and the merge window of a busy router."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import EngineFault, Overloaded
from common.wire import pack_tokens, unpack_tokens
from kvrelay.v1 import inference_pb2, sampling_pb2
from router.record.budget import Budget
from router.record.ledger import TokenLedger
from router.record.outbox import BUSY, CALM, MAX_ENTRIES, MAX_WINDOW_S, MIN_WINDOW_S, MergeWindow, Outbox
from router.tenants import ANYBODY
from tests.clock import ManualClock


def token(index: int, sample: int = 0, *, ends: bool = False) -> sampling_pb2.SampleToken:
    reason = sampling_pb2.FINISH_REASON_STOP if ends else sampling_pb2.FINISH_REASON_UNSPECIFIED
    return sampling_pb2.SampleToken(sample_index=sample, token_index=index, token_id=100 + index, finish_reason=reason)


def run(first: int, length: int, sample: int = 0, *, ends: bool = False) -> sampling_pb2.TokenRun:
    return sampling_pb2.TokenRun(
        sample_index=sample,
        first_token_index=first,
        tokens=pack_tokens(range(100 + first, 100 + first + length)),
        finish_reason=sampling_pb2.FINISH_REASON_LENGTH if ends else sampling_pb2.FINISH_REASON_UNSPECIFIED,
    )


def ledger(num_samples: int = 1) -> TokenLedger:
    return TokenLedger(num_samples=num_samples, clock=ManualClock())


def test_accept_drops_duplicates_also_inside_one_batch() -> None:
    mine = ledger()
    assert mine.accept([token(0), token(0), token(1)], expected=range(1)) == [token(0), token(1)]
    assert mine.accept([token(1), token(2)], expected=range(1)) == [token(2)]
    assert mine.output(0).tolist() == [100, 101, 102]


def test_accept_at_a_gap_takes_nothing() -> None:
    mine = ledger()
    with pytest.raises(EngineFault, match="jumps from token 0 to 2"):
        mine.accept([token(0), token(2)], expected=range(1))
    with pytest.raises(EngineFault, match="jumps from token 1 to 3"):
        mine.accept_runs([run(0, 2), run(3, 1)], expected=range(1))
    assert (mine.output(0).tolist(), mine.num_tokens) == ([], 0)


def test_accept_of_a_sample_that_is_not_expected_or_of_half_a_token_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="sample 1"):
        ledger(2).accept([token(0, sample=1)], expected=range(1))
    with pytest.raises(EngineFault, match="sample 1"):
        ledger(2).accept_runs([run(0, 1, sample=1)], expected=range(1))
    with pytest.raises(EngineFault, match="3 bytes"):
        ledger().accept_runs([sampling_pb2.TokenRun(tokens=b"abc")], expected=range(1))


def test_accept_after_the_end_drops() -> None:
    mine = ledger(2)
    mine.accept([token(0, ends=True), token(0, sample=1)], expected=range(2))
    assert mine.accept([token(1)], expected=range(2)) == []
    assert mine.unfinished(range(2)) == [1]
    mine.accept_runs([run(1, 2, sample=1, ends=True)], expected=range(2))
    assert mine.accept_runs([run(3, 1, sample=1)], expected=range(2)) == mine.unfinished(range(2)) == []


def test_gaps_are_those_of_the_first_sample() -> None:
    clock = ManualClock()
    mine = TokenLedger(num_samples=2, clock=clock)
    for index, seconds in enumerate((1.0, 0.5, 2.0)):
        clock.advance(seconds)
        mine.accept([token(index)], expected=range(2))
        clock.advance(0.25)
        mine.accept([token(index, sample=1)], expected=range(2))
    assert mine.gaps == [(0.75, 1), (2.25, 1)]
    assert (mine.first_token_s, mine.last_token_s) == (1.0, 4.25)


def test_gaps_of_a_run_are_even() -> None:
    clock = ManualClock(1.0)
    mine = TokenLedger(num_samples=1, clock=clock)
    mine.accept_runs([run(0, 1)], expected=range(1))
    clock.advance(2.0)
    mine.accept_runs([run(1, 4)], expected=range(1))
    assert mine.gaps == [(0.5, 4)]


@given(
    cuts=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6), st.booleans()), max_size=12),
)
def test_tokens_and_runs_in_any_mixture_deliver_each_index_once(cuts: list[tuple[int, int, bool]]) -> None:
    """Only the next piece of the one true sequence is ever accepted."""
    mine = ledger()
    delivered: list[int] = []
    for first, length, as_tokens in cuts:
        try:
            if as_tokens:
                tokens = [token(index) for index in range(first, first + length)]
                delivered += [t.token_id for t in mine.accept(tokens, expected=range(1))]
            else:
                for new in mine.accept_runs([run(first, length)], expected=range(1)):
                    assert new.first_token_index == len(delivered)
                    delivered += unpack_tokens(new.tokens, vocab_size=1000, field="")
        except EngineFault:
            assert first > len(delivered)
    assert delivered == list(range(100, 100 + len(delivered)))
    assert mine.output(0).tolist() == delivered


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
    outbox.put_tokens([], [run(0, 1), run(0, 1, sample=1)])
    outbox.put_tokens([], [run(1, 2, ends=True), run(1, 1, sample=1)])
    message = await outbox.get()
    assert message is not None
    assert list(message.tokens.runs) == [run(0, 3, ends=True), run(0, 2, sample=1)]


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


async def test_tokens_that_wait_for_long_become_messages_that_are_formatted_at_once() -> None:
    outbox = Outbox()
    for index in range(2500):
        outbox.put_tokens([token(index)], [])
    outbox.close(None)
    messages = []
    while (message := await outbox.get()) is not None:
        messages.append(message.tokens.tokens)
    assert [len(tokens) for tokens in messages] == [MAX_ENTRIES, MAX_ENTRIES, 2500 - 2 * MAX_ENTRIES]
    assert [each.token_index for tokens in messages for each in tokens] == list(range(2500))


async def test_tokens_of_one_batch_with_log_probabilities_become_several_messages() -> None:
    outbox, num_top = Outbox(), 19
    tokens = [token(index) for index in range(120)]
    for each in tokens:
        each.logprobs.top.extend([sampling_pb2.TokenLogprob()] * num_top)
    outbox.put_tokens(tokens, [])
    outbox.close(None)
    messages = []
    while (message := await outbox.get()) is not None:
        messages.append(message.tokens.tokens)
    assert [len(tokens) for tokens in messages] == [51, 51, 18]


async def test_client_that_does_not_read_is_noticed_and_one_that_does_holds_nothing() -> None:
    budget = Budget("tokens", most=3 * MAX_ENTRIES, most_in_all=3 * MAX_ENTRIES)
    ends: list[bool] = []
    outbox = Outbox()
    with budget.holding(ANYBODY, outbox.overflow) as holding:
        outbox.holding, outbox.on_overflow = holding, lambda: ends.append(True)
        for index in range(10 * MAX_ENTRIES):
            outbox.put_tokens([token(index)], [])
            if index % 64 == 0:
                await outbox.get()
        assert not budget.num_held
        while not ends:
            outbox.put_tokens([token(index)], [])
        outbox.put_tokens([token(index)], [])  # comes before the request has ended
        outbox.close(None)
        assert await outbox.get() is None, "what is not read is kept"
        assert isinstance(outbox.error, Overloaded)
        assert ends == [True]
    assert holding.grow(1) is not None  # as by bytes that come when their request is over
    assert not budget.num_held


async def test_prompt_log_probabilities_that_are_not_read_are_bounded_until_sent() -> None:
    budget = Budget("log-probabilities", most=3 * MAX_ENTRIES, most_in_all=3 * MAX_ENTRIES)
    prompt = [sampling_pb2.PositionLogprobs()] * (2 * MAX_ENTRIES)
    with budget.holding(ANYBODY) as first, budget.holding(ANYBODY) as second:
        outbox, other = Outbox(), Outbox()
        outbox.holding, other.holding = first, second
        outbox.put_tokens([token(0)], [], prompt)
        other.put_tokens([token(0)], [], prompt)
        other.close(None)
        assert await other.get() is None
        assert isinstance(other.error, Overloaded)
        message = await outbox.get()
        assert message is not None
        assert len(message.tokens.prompt_logprobs) == len(prompt)
        assert budget.num_held > len(prompt), "it is being sent"
        outbox.close(None)
        assert await outbox.get() is None
        assert not budget.num_held


async def test_answer_whose_memory_goes_to_another_tenant_ends_with_the_reason() -> None:
    budget = Budget("tokens", most=4 * MAX_ENTRIES, most_in_all=4 * MAX_ENTRIES)
    outbox = Outbox()
    with budget.holding(ANYBODY, outbox.overflow) as holding, budget.holding(replace(ANYBODY, name="b")) as other:
        outbox.holding = holding
        for index in range(4 * MAX_ENTRIES):
            outbox.put_tokens([token(index)], [])
        outbox.close(None)
        assert other.grow(2 * MAX_ENTRIES) is None
        assert await outbox.get() is None
        assert isinstance(outbox.error, Overloaded)


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
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting[1:])
    assert waiting[0].cancelled()
