"""Hostile requests to a worker: forged hashes, sequences that no router sends, malformed messages."""

from typing import Any

import pytest

from common.errors import InvalidRequest, PromptTooLong
from common.prefix_chains import MAX_BLOCKS, chains_from_proto
from engine.fake import FakeExecutor
from engine.request import EngineRequest
from kvrelay.v1 import inference_pb2, prefix_pb2, sequence_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.trust import as_router, as_worker
from tests.worker.calls import error_of, spec_of
from tests.worker.cluster import running_pair
from worker.request import engine_request

TIMEOUT_S = 60.0
EXECUTOR = FakeExecutor(num_blocks=8, block_size=BLOCK_SIZE)
VICTIM = make_request([1, 2, 3, 4, 5, 6, 7, 8, 9], ignore_eos=True)


async def test_prompt_and_answer_are_cached_under_the_hashes_that_routers_look_for() -> None:
    async with running_pair() as pair:
        answer = await pair.generate_locally(VICTIM)
        turn = make_request([*VICTIM.prompt_token_ids, *answer.tokens[0], 1, 2, 3], ignore_eos=True)
        again = await pair.generate_locally(turn)
        assert again.num_cached == (9 + 8 - 1) // 4 * 4  # the last token is never computed


async def test_prompt_beyond_the_context_is_refused_before_it_is_hashed() -> None:
    async with running_pair() as pair:
        spec = spec_of(make_request([1] * 4))
        spec.prompt_tokens = bytes(4 * 1024)
        error = await error_of(pair.open_decode_of(spec))
        assert isinstance(error, PromptTooLong)
        assert "1024 tokens; this model takes 1023" in error.message


@pytest.mark.parametrize(("first_sample_index", "n"), [(2**32 - 1, 3), (2**32 - 1, 1), (64, 1), (62, 3)])
def test_samples_beyond_the_limit_of_a_request_are_refused(first_sample_index: int, n: int) -> None:
    spec = spec_of(make_request([1, 2, 3], n=n))
    spec.first_sample_index = first_sample_index
    with pytest.raises(InvalidRequest) as raised:
        engine_request(spec, EXECUTOR)
    assert raised.value.field == "sequence.first_sample_index"


def test_last_sample_that_a_request_may_have_is_taken() -> None:
    spec = spec_of(make_request([1, 2, 3], n=1, first_sample_index=63))
    assert engine_request(spec, EXECUTOR).first_sample_index == 63


@pytest.mark.parametrize(
    ("num_blocks", "num_values", "field"),
    [(1, 1_000_000, "chains[0].values"), (MAX_BLOCKS + 1, MAX_BLOCKS + 1, "chains")],
)
def test_values_of_a_chain_are_not_read_when_their_number_is_wrong(
    num_blocks: int, num_values: int, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.prefix_chains.pairwise", pytest.fail)
    chain = prefix_pb2.PrefixChain(block_hashes=bytes(16 * num_blocks), values=[1.0] * num_values)
    with pytest.raises(InvalidRequest) as raised:
        chains_from_proto([chain])
    assert raised.value.field == field


@pytest.mark.parametrize(
    "method", ["/kvrelay.v1.DecodeService/DecodeMany", "/kvrelay.v1.KvTransferService/FetchBlocks"]
)
@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x04\x0a\x02\xff\xfe"], ids=["garbage", "invalid UTF-8"])
async def test_malformed_message_on_a_stream_is_an_invalid_request(method: str, raw: bytes) -> None:
    async with running_pair() as pair:
        is_pull = method.endswith("FetchBlocks")
        decode = pair.decode
        channel: Any = as_worker(decode.kv_address, "prefill-0") if is_pull else as_router(decode.address)
        async with channel:
            call = channel.stream_stream(method)(timeout=TIMEOUT_S)
            await call.write(raw)
            error = await error_of(call)
        assert isinstance(error, InvalidRequest), error
        assert error.field == "message"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"answer_format": inference_pb2.AnswerFormat(tools="harmony")}, "answer_format"),
        ({"answer_format": inference_pb2.AnswerFormat(reasoning="none such")}, "answer_format"),
        *(({"tpot_slo_s": seconds}, "tpot_slo_s") for seconds in (0.0, -1.0, float("nan"))),
    ],
)
def test_unknown_markup_and_objectives_that_are_no_times_are_refused_by_field(
    changes: dict[str, Any], field: str
) -> None:
    spec = spec_of(make_request([1, 2, 3]))
    spec.MergeFrom(sequence_pb2.SequenceSpec(**changes))
    with pytest.raises(InvalidRequest) as raised:
        engine_request(spec, EXECUTOR)
    assert raised.value.field == f"sequence.{field}"


BEAMS = make_request(range(9), n=2, use_beam_search=True, max_tokens=6)
BEAM = sequence_pb2.Beam(tokens=b"a\0\0\0b\0\0\0", score=-1.0)


@pytest.mark.parametrize(
    ("state", "field"),
    [
        (sequence_pb2.BeamState(), ""),
        (sequence_pb2.BeamState(live=[BEAM] * 3), ""),
        (sequence_pb2.BeamState(live=[BEAM], complete=[BEAM] * 3), ""),
        (sequence_pb2.BeamState(live=[BEAM, sequence_pb2.Beam(tokens=bytes(4))]), ".live"),
        (sequence_pb2.BeamState(live=[sequence_pb2.Beam()]), ".tokens"),
        (sequence_pb2.BeamState(live=[sequence_pb2.Beam(tokens=bytes(7))]), ".tokens"),
        (sequence_pb2.BeamState(live=[sequence_pb2.Beam(tokens=bytes(4 * 6))]), ".tokens"),
        (sequence_pb2.BeamState(live=[sequence_pb2.Beam(tokens=b"\xff" * 4)]), ".tokens"),
        (sequence_pb2.BeamState(live=[BEAM], complete=[sequence_pb2.Beam(tokens=bytes(4 * 7))]), ".tokens"),
        (sequence_pb2.BeamState(live=[sequence_pb2.Beam(tokens=bytes(4), score=float("nan"))]), ".score"),
    ],
)
def test_beams_that_no_search_could_have_are_refused(state: sequence_pb2.BeamState, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        engine_request(spec_with(BEAMS, state), EXECUTOR)
    assert raised.value.field == f"sequence.beams{field}"
    assert engine_request(spec_with(BEAMS, sequence_pb2.BeamState(live=[BEAM])), EXECUTOR).beams is not None


def test_beams_are_refused_without_beam_search() -> None:
    with pytest.raises(InvalidRequest, match="sampling asks for none"):
        engine_request(spec_with(VICTIM, sequence_pb2.BeamState(live=[BEAM])), EXECUTOR)


def spec_with(request: EngineRequest, state: sequence_pb2.BeamState) -> sequence_pb2.SequenceSpec:
    """Return the message for a request that continues a search."""
    spec = spec_of(request)
    spec.beams.CopyFrom(state)
    return spec
