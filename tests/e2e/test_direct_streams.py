"""Direct streams opened by hand can be resumed, refuse other callers, and end when nobody reads them."""

import asyncio
from typing import Any

import grpc
import pytest

from common.errors import AccessDenied, ClientGone, KvrelayError, from_rpc_error
from common.rpc import client_channel
from decode_worker.direct import DirectAnswer
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.e2e.in_process import System, running_system
from tests.e2e.test_direct import ENGINE, LOCAL, PROMPT, SAMPLING
from tests.served_router import TIMEOUT_S


class Manual:
    """A client that handles its streams itself."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._channels = [client_channel(system.address)]
        self._router: Any = inference_pb2_grpc.InferenceServiceStub(self._channels[0])
        self.call: Any = None

    async def open(self, **sampling: Any) -> inference_pb2.DirectGrant:
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT), direct=True)
        for name, value in {**SAMPLING, **sampling}.items():
            setattr(request.sampling, name, value)
        self.call = self._router.Generate(request, timeout=60)
        while not (message := await self.call.read()).HasField("direct"):
            pass
        grant: inference_pb2.DirectGrant = message.direct
        return grant

    def stream(self, grant: inference_pb2.DirectGrant, *num_received: int) -> Any:
        self._channels.append(client_channel(grant.address))
        stub: Any = decode_pb2_grpc.DirectServiceStub(self._channels[-1])
        return stub.StreamTokens(decode_pb2.StreamTokensRequest(capability=grant.capability, num_received=num_received))

    async def aclose(self) -> None:
        for channel in self._channels:
            await channel.close()


async def read_tokens(stream: Any, at_least: int) -> list[tuple[int, int]]:
    """Read until so many tokens have come, or to the end; (index, id)."""
    seen: list[tuple[int, int]] = []
    while len(seen) < at_least and (message := await stream.read()) is not grpc.aio.EOF:
        seen += [(token.token_index, token.token_id) for token in message.tokens.tokens]
    return seen


async def error_of(stream: Any) -> KvrelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await stream.read() is not grpc.aio.EOF:
            pass
    return from_rpc_error(caught.value)


async def test_a_stream_that_comes_back_goes_on_behind_what_the_client_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("call", "direct"):  # a busy client may come back late
        monkeypatch.setattr(f"decode_worker.{module}.GRACE_S", TIMEOUT_S)
    async with running_system(router=LOCAL, step_s=0.002, **ENGINE) as system:
        client = Manual(system)
        grant = await client.open()
        first = client.stream(grant)
        tokens = await read_tokens(first, 10)
        first.cancel()
        tokens += await read_tokens(client.stream(grant, len(tokens)), 1000)
        assert [index for index, _ in tokens] == list(range(150))
        async with system.client() as reference:
            assert [token for _, token in tokens] == list((await reference.generate(PROMPT, **SAMPLING)).token_ids)
        again = await read_tokens(client.stream(grant, 140), 1000)  # a while it is kept, for what was lost on the way
        assert again == tokens[140:]
        await client.aclose()


async def test_a_second_stream_takes_the_first_ones_place() -> None:
    async with running_system(router=LOCAL, step_s=0.002, **ENGINE) as system:
        client = Manual(system)
        system.pace.slow_down(at=10)
        grant = await client.open()
        first = client.stream(grant)
        await read_tokens(first, 1)
        second = client.stream(grant)
        await read_tokens(second, 1)
        assert isinstance(await error_of(first), AccessDenied)
        system.pace.hurry()
        assert (await read_tokens(second, 1000))[-1][0] == 149
        await client.aclose()


async def test_wrong_capability_is_refused_and_another_requests_opens_nothing() -> None:
    async with running_system(router=LOCAL, step_s=0.002, **ENGINE) as system:
        client = Manual(system)
        grant = await client.open()
        for capability in (b"", bytes(32), grant.capability[:-1], grant.capability + b"x"):
            wrong = inference_pb2.DirectGrant(address=grant.address, capability=capability)
            assert isinstance(await error_of(client.stream(wrong)), AccessDenied)
        client.call.cancel()
        await system.until_idle()
        assert isinstance(await error_of(client.stream(grant)), AccessDenied)
        await client.aclose()


async def test_too_many_counts_are_refused_by_name() -> None:
    async with running_system(router=LOCAL, step_s=0.002, **ENGINE) as system:
        client = Manual(system)
        error = await error_of(client.stream(await client.open(), *range(65)))
        assert error.field == "num_received"
        await client.aclose()


async def test_a_client_that_never_comes_ends_the_request_and_frees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.requests.worker_requests.DIRECT_TTL_S", 0.05)
    async with running_system(router=LOCAL, step_s=0.002, **ENGINE) as system:
        client = Manual(system)
        grant = await client.open()
        assert isinstance(await error_of(client.call), ClientGone)
        await system.until_idle()
        assert isinstance(await error_of(client.stream(grant)), AccessDenied)
        await client.aclose()


@pytest.mark.parametrize("max_tokens", [150, 12], ids=["while it is generated", "when it is generated"])
async def test_a_client_that_leaves_its_stream_alone_ends_the_request(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_worker.direct.GRACE_S", 0.05)
    stream_of, has_left = DirectAnswer.stream, asyncio.Event()

    async def until_left(self: DirectAnswer, *arguments: Any) -> None:
        try:
            await stream_of(self, *arguments)
        finally:
            has_left.set()

    monkeypatch.setattr(DirectAnswer, "stream", until_left)
    async with running_system(router=LOCAL, step_s=0.01, **ENGINE) as system:
        client = Manual(system)
        system.pace.slow_down(at=5)
        stream = client.stream(await client.open(max_tokens=max_tokens))
        await read_tokens(stream, 3)
        stream.cancel()
        await asyncio.wait_for(has_left.wait(), TIMEOUT_S)
        system.pace.hurry()
        assert isinstance(await error_of(client.call), ClientGone)
        await system.until_idle()
        await client.aclose()


async def test_an_unfetched_answer_is_not_reported_complete() -> None:
    async with running_system(router=LOCAL, **ENGINE) as system:
        client = Manual(system)
        grant = await client.open(max_tokens=20)
        async with system.client() as other:
            await other.generate(PROMPT, **SAMPLING)  # meanwhile the answer is generated
            assert (await other.status()).router.num_active == 1
        await read_tokens(client.stream(grant), 1000)
        while not (message := await client.call.read()).HasField("completed"):
            pass
        assert message.completed.usage.num_output_tokens == 20
        await client.aclose()
