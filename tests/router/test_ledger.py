"""Token delivery: once, in order, or not at all."""

import pytest

from common.clock import ManualClock
from common.errors import EngineFault
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
    assert mine.output(0) == (100, 101, 102)


def test_accept_at_a_gap_takes_nothing() -> None:
    mine = ledger()
    with pytest.raises(EngineFault, match="jumps from token 0 to 2"):
        mine.accept([token(0), token(2)], expected=range(1))
    assert (mine.output(0), mine.num_tokens) == ((), 0)


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
    assert (mine.gaps_s, mine.first_token_s, mine.last_token_s) == ([0.75, 2.25], 1.0, 4.25)
