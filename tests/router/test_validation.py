"""What a request may ask for, beyond what a test cluster's model could answer."""

import pytest

from common.block_hash import hash_root
from common.errors import InvalidRequest
from common.ids import RequestId
from kvrelay.v1 import inference_pb2, sampling_pb2
from router.facts import ModelFacts
from router.fake_codec import ByteCodec
from router.record import Job
from router.tenants import ANYBODY
from router.validation import RequestReader

MODEL = ModelFacts(
    name="long",
    fingerprint="long",
    block_size=16,
    vocab_size=256,
    max_model_len=1 << 20,
    max_decode_blocks=1 << 20,
    root=hash_root(model_fingerprint="long"),
)


async def read(num_tokens: int, prompt_logprobs: int) -> Job:
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[1] * num_tokens),
        sampling=sampling_pb2.SamplingParams(prompt_logprobs=prompt_logprobs, max_tokens=1),
    )
    reader = RequestReader(ByteCodec(), default_max_tokens=1)
    return await reader.read(request, request_id=RequestId("req-1"), model=MODEL, tenant=ANYBODY)


async def test_log_probabilities_of_a_prompt_that_fit_in_no_message_are_refused_at_the_door() -> None:
    assert (await read(131_072, 20)).sampling.num_prompt_logprobs == 20
    assert (await read(600_000, 0)).sampling.num_prompt_logprobs == 0
    with pytest.raises(InvalidRequest, match="20 for each of 262144 tokens do not fit") as caught:
        await read(262_144, 20)
    assert caught.value.field == "sampling.prompt_logprobs"


def test_largest_log_probabilities_on_the_wire_take_no_more_than_what_is_reckoned_with() -> None:
    entry = sampling_pb2.TokenLogprob(token_id=2**32 - 1, logprob=-1.0)
    position = sampling_pb2.PositionLogprobs(chosen=entry, top=[entry] * 20)
    message = inference_pb2.TokenDelta(prompt_logprobs=[position] * 100)
    assert message.ByteSize() <= 100 * (8 + 13 * 21)
