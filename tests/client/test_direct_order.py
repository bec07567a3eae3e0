"""Tokens of several streams become one answer."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import EngineFault
from common.tokens import as_tokens
from common.wire import pack_tokens
from kvrelay.client.direct import InOrder
from kvrelay.v1 import decode_pb2, sampling_pb2

LENGTH = 12


def piece(sample: int, first: int, length: int, *, as_run: bool) -> decode_pb2.TokenBatch:
    """Tokens `first` to `first + length` of a sample whose token i is 10 * sample + i."""
    ids = range(10 * sample + first, 10 * sample + first + length)
    ends = first + length == LENGTH
    last = sampling_pb2.FINISH_REASON_LENGTH if ends else sampling_pb2.FINISH_REASON_UNSPECIFIED
    if as_run:
        run = sampling_pb2.TokenRun(
            sample_index=sample, first_token_index=first, tokens=pack_tokens(as_tokens(ids)), finish_reason=last
        )
        return decode_pb2.TokenBatch(runs=[run])
    tokens = [
        sampling_pb2.SampleToken(sample_index=sample, token_index=first + i, token_id=token_id)
        for i, token_id in enumerate(ids)
    ]
    tokens[-1].finish_reason = last
    return decode_pb2.TokenBatch(tokens=tokens)


@example(pieces=[(1, 1, 1, False), (1, 0, 1, True)])
@example(pieces=[(0, 5, 1, False), (0, 5, 4, True), (0, 0, 5, True)])
@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, LENGTH - 1), st.integers(1, LENGTH), st.booleans()), max_size=20
    )
)
def test_tokens_are_taken_once_and_in_order(pieces: list[tuple[int, int, int, bool]]) -> None:
    answer = InOrder(2)
    got: list[list[int]] = [[], []]
    known: list[set[int]] = [set(), set()]
    for sample, first, wanted, as_run in pieces:
        length = min(wanted, LENGTH - first)
        known[sample] |= set(range(first, first + length))
        for message in answer.take(piece(sample, first, length, as_run=as_run)):
            for token in message.tokens.tokens:
                assert token.token_index == len(got[token.sample_index])
                got[token.sample_index].append(token.token_id)
            for run in message.tokens.runs:
                assert run.first_token_index == len(got[run.sample_index])
                got[run.sample_index] += [int(i) for i in memoryview(run.tokens).cast("I")]
    for sample in range(2):
        num_connected = next(i for i in range(LENGTH + 1) if i not in known[sample])
        assert got[sample] == [10 * sample + i for i in range(num_connected)]
    assert answer.num_received == [len(ids) for ids in got]
    assert answer.is_complete == all(len(ids) == LENGTH for ids in got)


def test_token_of_a_sample_beyond_the_requested_ones_is_a_fault() -> None:
    with pytest.raises(EngineFault, match="sample 1"):
        list(InOrder(1).take(piece(1, 0, 1, as_run=False)))
