"""Sequences and chains that no router of ours sends: refused as the caller's fault, before anything is computed."""

import pytest

from common.errors import InvalidRequest
from common.prefix_wire import MAX_BLOCKS, chains_from_proto
from engine.fake import FakeExecutor
from kvrelay.v1 import prefix_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.worker.cluster import spec_of
from worker.request import engine_request


@pytest.mark.parametrize(("first_sample_index", "n"), [(2**32 - 1, 3), (2**32 - 1, 1), (64, 1), (62, 3)])
def test_samples_beyond_those_that_a_request_may_have_are_refused(first_sample_index: int, n: int) -> None:
    spec = spec_of(make_request([1, 2, 3], n=n))
    spec.first_sample_index = first_sample_index
    with pytest.raises(InvalidRequest) as raised:
        engine_request(spec, FakeExecutor(num_blocks=8, block_size=BLOCK_SIZE))
    assert raised.value.field == "sequence.first_sample_index"


def test_last_sample_that_a_request_may_have_is_taken() -> None:
    spec = spec_of(make_request([1, 2, 3], n=1, first_sample_index=63))
    assert engine_request(spec, FakeExecutor(num_blocks=8, block_size=BLOCK_SIZE)).first_sample_index == 63


@pytest.mark.parametrize(
    ("num_blocks", "num_values", "field"),
    [(1, 1_000_000, "chains[0].values"), (MAX_BLOCKS + 1, MAX_BLOCKS + 1, "chains")],
)
def test_values_of_a_chain_are_not_walked_through_when_their_number_is_wrong(
    num_blocks: int, num_values: int, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.prefix_wire.pairwise", pytest.fail)
    chain = prefix_pb2.PrefixChain(block_hashes=bytes(16 * num_blocks), values=[1.0] * num_values)
    with pytest.raises(InvalidRequest) as raised:
        chains_from_proto([chain])
    assert raised.value.field == field
