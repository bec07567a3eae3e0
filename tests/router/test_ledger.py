"""Token delivery: once, in order, or not at all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.clock import ManualClock
from common.errors import EngineFault
from common.wire import pack_tokens, unpack_tokens
from kvrelay.v1 import sampling_pb2
from router.ledger import TokenLedger


def token(index: int, sample: int = 0, *, ends: bool = False) -> sampling_pb2.SampleToken:
    reason = sampling_pb2.FINISH_REASON_STOP if ends else sampling_pb2.FINISH_REASON_UNSPECIFIED
    return sampling_pb2.SampleToken(sample_index=sample, token_index=index, token_id=100 + index, finish_reason=reason)


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
    assert (mine.output(0).tolist(), mine.num_tokens) == ([], 0)


def test_accept_of_a_sample_that_is_not_expected_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="sample 1"):
        ledger(2).accept([token(0, sample=1)], expected=range(1))


def test_accept_after_the_end_drops() -> None:
    mine = ledger(2)
    mine.accept([token(0, ends=True), token(0, sample=1)], expected=range(2))
    assert mine.accept([token(1)], expected=range(2)) == []
    assert mine.unfinished(range(2)) == [1]


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


def run(first: int, length: int, sample: int = 0, *, ends: bool = False) -> sampling_pb2.TokenRun:
    return sampling_pb2.TokenRun(
        sample_index=sample,
        first_token_index=first,
        tokens=pack_tokens(range(100 + first, 100 + first + length)),
        finish_reason=sampling_pb2.FINISH_REASON_LENGTH if ends else sampling_pb2.FINISH_REASON_UNSPECIFIED,
    )


def test_accept_runs_cuts_what_is_known() -> None:
    mine = ledger()
    assert mine.accept_runs([run(0, 3), run(1, 2), run(2, 3)], expected=range(1)) == [run(0, 3), run(3, 2)]
    assert mine.output(0).tolist() == [100, 101, 102, 103, 104]


def test_accept_runs_at_a_gap_takes_nothing() -> None:
    mine = ledger()
    with pytest.raises(EngineFault, match="jumps from token 1 to 3"):
        mine.accept_runs([run(0, 2), run(3, 1)], expected=range(1))
    assert mine.num_tokens == 0


def test_accept_runs_of_a_sample_that_is_not_expected_or_of_half_a_token_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="sample 1"):
        ledger(2).accept_runs([run(0, 1, sample=1)], expected=range(1))
    with pytest.raises(EngineFault, match="3 bytes"):
        ledger().accept_runs([sampling_pb2.TokenRun(tokens=b"abc")], expected=range(1))


def test_accept_runs_after_the_end_drops() -> None:
    mine = ledger(2)
    mine.accept_runs([run(0, 2, ends=True)], expected=range(2))
    assert mine.accept_runs([run(2, 1)], expected=range(2)) == []
    assert mine.unfinished(range(2)) == [1]


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
