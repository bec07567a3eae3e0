"""What a worker caches under a hash is what the hash names, whatever it is sent."""

from typing import Any

from common.errors import PromptTooLong
from engine.sequence import EngineRequest
from kvrelay.v1 import prefill_pb2, sequence_pb2
from tests.builders import make_request
from tests.worker.cluster import Pair, error_of, messages, running_pair, spec_of

VICTIM = make_request([1, 2, 3, 4, 5, 6, 7, 8, 9], ignore_eos=True)
OTHER = make_request([9, 8, 7, 6, 5, 4, 3, 2, 1], ignore_eos=True)


def forged_spec(request: EngineRequest) -> sequence_pb2.SequenceSpec:
    """Return a message that names the victim's blocks, in the field that once held hashes."""
    packed = VICTIM.block_hashes.packed
    assert len(packed) < 128
    return sequence_pb2.SequenceSpec.FromString(
        spec_of(request).SerializeToString() + bytes([0x22, len(packed)]) + packed
    )


async def decode(pair: Pair, spec: sequence_pb2.SequenceSpec) -> list[Any]:
    return [message async for message in messages(pair.open_decode_of(spec))]


async def test_request_that_names_another_ones_hashes_does_not_change_its_answer() -> None:
    async with running_pair() as pair:
        await decode(pair, forged_spec(OTHER))

        answer = await pair.generate_locally(VICTIM)

        assert answer.num_cached == 0


async def test_prefill_that_names_another_ones_hashes_does_not_change_its_answer() -> None:
    async with running_pair() as pair:
        forged = prefill_pb2.PrefillRequest(
            sequence=forged_spec(OTHER), handoff_id="forged", epoch=pair.prefill.runtime.epoch
        )
        async for _message in pair.prefill_stub.Prefill(forged):
            pass

        answer = await pair.generate(VICTIM)

        assert answer.num_cached == 0


async def test_blocks_of_prompt_and_answer_are_cached_under_the_hashes_that_a_router_looks_for() -> None:
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
