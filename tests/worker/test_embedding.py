"""Embeddings of a worker, as a router asks for them."""

from typing import Any

import pytest

from common.errors import InvalidRequest, KvrelayError
from common.pooling import Pooling
from common.wire import pack_tokens, unpack_floats
from kvrelay.v1 import prefill_pb2, sampling_pb2, sequence_pb2
from tests.builders import expected_embedding, make_request
from tests.worker.calls import Pair, error_of, messages, spec_of
from tests.worker.cluster import executor_of, running_pair, until_empty

PROMPT = range(40, 70)


def embedding_spec(pooling: int = sampling_pb2.POOLING_LAST, **fields: Any) -> sequence_pb2.SequenceSpec:
    spec = spec_of(make_request(PROMPT))
    spec.MergeFrom(sequence_pb2.SequenceSpec(pooling=pooling, **fields))  # type: ignore[arg-type]
    return spec


def open_embedding(pair: Pair, spec: sequence_pb2.SequenceSpec) -> Any:
    return pair.prefill_stub.Prefill(prefill_pb2.PrefillRequest(sequence=spec, epoch=pair.prefill.runtime.epoch))


async def test_embedding_comes_with_the_last_message_and_nothing_is_kept() -> None:
    async with running_pair() as pair:
        for number, pooling in ((sampling_pb2.POOLING_LAST, Pooling.LAST), (sampling_pb2.POOLING_MEAN, Pooling.MEAN)):
            started, finished = [m async for m in messages(open_embedding(pair, embedding_spec(number)))]
            assert started.HasField("started")
            vector = unpack_floats(finished.finished.embedding)
            assert vector.tolist() == expected_embedding(PROMPT, pooling).tolist()
            assert not finished.finished.first_tokens
        assert pair.prefill.runtime.handoffs.num_leases == 0


async def test_call_that_is_closed_frees_its_pages() -> None:
    async with running_pair(prefill={"step_s": 0.05, "max_step_tokens": 16}) as pair:
        call = open_embedding(pair, embedding_spec())
        await call.read()
        call.cancel()
        await until_empty(pair.prefill)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (embedding_spec(9), "sequence.pooling"),
        (embedding_spec(output_tokens=pack_tokens([1])), "sequence.output_tokens"),
    ],
)
async def test_request_that_no_router_sends_is_refused_by_field(spec: sequence_pb2.SequenceSpec, field: str) -> None:
    async with running_pair() as pair:
        error: KvrelayError = await error_of(open_embedding(pair, spec))
        assert (type(error), error.field) == (InvalidRequest, field)


async def test_model_without_hidden_states_refuses() -> None:
    async with running_pair() as pair:
        executor_of(pair.prefill).hidden_size = 0
        error = await error_of(open_embedding(pair, embedding_spec()))
        assert (type(error), error.field) == (InvalidRequest, "sequence.pooling")


async def test_decode_worker_computes_no_embeddings() -> None:
    async with running_pair() as pair:
        error = await error_of(pair.open_decode_of(embedding_spec()))
        assert (type(error), error.field) == (InvalidRequest, "sequence.pooling")
