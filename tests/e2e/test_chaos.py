"""Requests of every length, half of them cancelled, some of them hostile: one reply each, nothing left."""

import asyncio
import math
import random
from typing import Any

import grpc

from common.errors import KvrelayError
from kvrelay.client import AsyncClient
from kvrelay.v1 import inference_pb2, sampling_pb2
from tests.builders import BLOCK_SIZE, expected_tokens, make_request
from tests.e2e.in_process import running_system

_LARGEST_TOKENS = 960
"""Tokens of the largest requests with their answers."""


def _hostile() -> list[tuple[str, bytes]]:
    """Return (what is wrong, serialized request); some are no valid protobuf at all."""

    def request(**sampling: Any) -> bytes:
        message = inference_pb2.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(**sampling))
        return message.SerializeToString()

    text = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["text"].number
    too_long = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1] * 5000))
    return [
        ("no prompt", b""),
        ("empty prompt", inference_pb2.GenerateRequest(text="").SerializeToString()),
        ("empty token ids", inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds()).SerializeToString()),
        (
            "unknown token",
            inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[9999])).SerializeToString(),
        ),
        ("prompt too long", too_long.SerializeToString()),
        ("negative temperature", request(temperature=-1.0)),
        ("temperature NaN", request(temperature=math.nan)),
        ("temperature inf", request(temperature=math.inf)),
        ("top_p 0", request(top_p=0.0)),
        ("top_p NaN", request(top_p=math.nan)),
        ("100 stop strings", request(stop=[str(i) for i in range(100)])),
        ("empty stop string", request(stop=[""])),
        ("huge n", request(n=2**31)),
        ("n 0", request(n=0)),
        ("huge logprobs", request(logprobs=10**6)),
        ("bias of an unknown token", request(logit_bias={10**6: 1.0})),
        ("min above max", request(min_tokens=9, max_tokens=3)),
        ("max_tokens 0", request(max_tokens=0)),
        ("unknown model", inference_pb2.GenerateRequest(text="x", model="nobody").SerializeToString()),
        (
            "bad role",
            inference_pb2.GenerateRequest(
                chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="\0", content="x")])
            ).SerializeToString(),
        ),
        ("invalid UTF-8", bytes([text << 3 | 2, 2, 0xFF, 0xFE])),
        ("not protobuf", b"\xff" * 40),
        ("oversized message", inference_pb2.GenerateRequest(text="x" * (5 << 20)).SerializeToString()),
    ]


async def _raw_generate(channel: grpc.aio.Channel, payload: bytes) -> grpc.StatusCode:
    method: Any = channel.unary_stream("/kvrelay.v1.InferenceService/Generate")
    try:
        async for _message in method(payload, timeout=240):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _one(client: AsyncClient, rng: random.Random, number: int) -> str:
    """Run one honest request, perhaps cancelled at a random moment; returns how it ended."""
    prompt = [rng.randrange(256) for _ in range(rng.choice([1, 15, 16, 17, 100, 300, 900]))]
    options: dict[str, Any] = {"temperature": 1.0, "seed": number, "max_tokens": rng.randrange(1, 60)}
    events_before_cancel = rng.choice([0, 1, 2, 3, 4, 10, 25]) if number % 2 else None
    stream = client.stream(prompt, **options)
    try:
        if events_before_cancel == 0:
            await asyncio.sleep(rng.random() * 0.2)
            await stream.aclose()
            return "cancelled"
        num_seen = 0
        async for _event in stream:
            num_seen += 1
            if num_seen == events_before_cancel:
                await stream.aclose()
                return "cancelled"
        answer = await stream.result()
    except KvrelayError as error:
        return f"{type(error).__name__}: {error}"
    assert answer.token_ids == tuple(expected_tokens(make_request(prompt, **options)))
    return "completed"


async def test_150_requests_half_cancelled_some_hostile_leave_tight_pools_empty() -> None:
    router = {"local_prefill_max_tokens": 32, "queue_timeout_s": 240.0}  # a busy machine may take long
    shape: dict[str, Any] = {"num_blocks": _LARGEST_TOKENS // BLOCK_SIZE + 2, "max_step_tokens": 256, "max_running": 64}
    hostile = _hostile()
    num_honest = 150 - len(hostile)
    async with (
        running_system(router=router, **shape) as system,
        system.client() as client,
        grpc.aio.insecure_channel(client.address, options=[("grpc.max_send_message_length", 64 << 20)]) as raw,
    ):
        work: list[Any] = [_one(client, random.Random(i), i) for i in range(num_honest)]
        work += [_raw_generate(raw, payload) for _what, payload in hostile]
        order = list(range(len(work)))
        random.Random(1).shuffle(order)
        ended = dict(zip(order, await asyncio.gather(*(work[i] for i in order)), strict=True))
        await system.until_idle()

    honest_ends = [ended[i] for i in range(num_honest)]
    assert set(honest_ends) <= {"completed", "cancelled"}, sorted(set(honest_ends))
    assert honest_ends.count("completed") >= num_honest // 2
    for i, (what, _payload) in enumerate(hostile, num_honest):
        allowed = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
        if what == "oversized message":
            allowed = {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert ended[i] in allowed, (what, ended[i])
