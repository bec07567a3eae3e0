"""Clients that stream straight from decode workers: the same answers, whatever happens."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from common.errors import AccessDenied, ClientGone, EngineFault, KvrelayError, from_rpc_error
from common.rpc import client_channel
from decode_worker.direct import DirectAnswer
from kvrelay.client import AsyncClient, Completed, PlanChosen, Token
from kvrelay.client.direct import DirectCall, InOrder
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc
from router.record import RunningRequest
from router.worker_requests import CHECKPOINT_TOKENS
from tests.e2e.in_process import TIMEOUT_S, System, running_system

PROMPT = list(range(40))
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 150, "ignore_eos": True}
LOCAL: dict[str, Any] = {"local_prefill_max_tokens": 64}
REMOTE: dict[str, Any] = {"local_prefill_max_tokens": 0}
ENGINE: dict[str, Any] = {"num_blocks": 512}
LOGPROBS: dict[str, Any] = {"logprobs": 1, "prompt_logprobs": 0}
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"n": 3}, {"detokenize": False}, LOGPROBS)


@contextmanager
def counting_direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the tokens that come from workers."""
    counts: list[int] = []
    read_worker = DirectCall._read_worker  # noqa: SLF001 - nothing public tells which way a token came

    async def counted(self: DirectCall, grant: inference_pb2.DirectGrant) -> None:
        counts.append(grant.attempt)
        await read_worker(self, grant)

    monkeypatch.setattr(DirectCall, "_read_worker", counted)
    yield counts


@pytest.mark.parametrize("router", [LOCAL, REMOTE], ids=["local", "remote"])
async def test_direct_answers_equal_those_through_the_router(
    router: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_system(router=router, **ENGINE) as system:
        async with system.client() as client, system.client(direct=True) as direct:
            for number, variant in enumerate(VARIANTS):
                prompt, sampling = [number, *PROMPT], SAMPLING | variant
                expected = await client.generate(prompt, **sampling)
                with counting_direct(monkeypatch) as grants:
                    got = await direct.generate(prompt, **sampling)
                assert got.samples == expected.samples
                assert got.prompt_logprobs == expected.prompt_logprobs
                assert got.usage.num_output_tokens == expected.usage.num_output_tokens == 150 * sampling.get("n", 1)
                assert grants == [1]
        await system.until_idle()


async def test_worker_death_in_the_middle_is_a_pause_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(num_decode=2, router=REMOTE, step_s=0.002, **ENGINE) as system:
        async with system.client() as client:
            expected = await client.generate(PROMPT, **SAMPLING)
        with counting_direct(monkeypatch) as grants:
            async with system.client(direct=True) as client:
                system.pace.slow_down(at=110)
                stream = client.stream(PROMPT, **SAMPLING)
                plan = await _until(stream, num_tokens=100)
                await system.kill(plan.decode_worker_id)
                system.pace.hurry()
                got = await stream.result()
        assert got.samples == expected.samples
        assert len(got.plans) == 2
        assert got.plans[1].decode_worker_id != plan.decode_worker_id
        assert grants == [1, 2]


async def _until(stream: Any, *, num_tokens: int) -> PlanChosen:
    plan = None
    async for event in stream:
        if isinstance(event, PlanChosen):
            plan = event
        if isinstance(event, Token) and event.token_index + 1 == num_tokens:
            break
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    "sampling",
    [{}, {"n": 2}, {"detokenize": False}, LOGPROBS],
    ids=["text", "two samples", "ids", "logprobs"],
)
async def test_tokens_that_were_lost_with_their_worker_come_from_the_next_one(
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints have reached the router, but no token has reached the client."""
    read_worker = DirectCall._read_worker  # noqa: SLF001 - a network that loses what the first worker sends

    async def lossy(self: DirectCall, grant: inference_pb2.DirectGrant) -> None:
        if grant.attempt > 1:
            await read_worker(self, grant)

    note_checkpoint, is_known = RunningRequest.note_checkpoint, asyncio.Event()

    def noting(self: RunningRequest, batch: decode_pb2.TokenBatch, *, expected: range) -> bool:
        has_end = note_checkpoint(self, batch, expected=expected)
        if min(self.ledger.lengths) > CHECKPOINT_TOKENS:
            is_known.set()
        return has_end

    async with running_system(num_decode=2, router=LOCAL, **ENGINE) as system:
        async with system.client() as reference:
            expected = await reference.generate(PROMPT, **SAMPLING, **sampling)
        monkeypatch.setattr(DirectCall, "_read_worker", lossy)
        monkeypatch.setattr(RunningRequest, "note_checkpoint", noting)
        async with system.client(direct=True) as client:
            stream = client.stream(PROMPT, **SAMPLING, **sampling)
            plan = next(event for event in [await anext(stream), await anext(stream)] if isinstance(event, PlanChosen))
            await asyncio.wait_for(is_known.wait(), TIMEOUT_S)
            await system.kill(plan.decode_worker_id)
            got = await stream.result()
    assert got.samples == expected.samples
    assert got.prompt_logprobs == expected.prompt_logprobs


def lose_tails(monkeypatch: pytest.MonkeyPatch, *, num_tails: int, timeout_s: float) -> None:
    """Lose the last token of the first streams on the network, though the worker takes it for delivered.

    `timeout_s`: how long the client waits for it.
    """
    take, num_lost = InOrder.take, 0

    def lossy(self: InOrder, tokens: Any) -> Iterator[inference_pb2.GenerateResponse]:
        nonlocal num_lost
        ends = [run for run in tokens.runs if run.finish_reason] or [
            each for each in tokens.tokens if each.finish_reason
        ]
        if not ends or num_lost == num_tails:
            yield from take(self, tokens)
        else:
            num_lost += 1

    monkeypatch.setattr(InOrder, "take", lossy)
    monkeypatch.setattr("kvrelay.client.direct._TAIL_TIMEOUT_S", timeout_s)


async def test_last_tokens_that_were_lost_with_their_worker_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        running_system(router=LOCAL, **ENGINE) as system,
        system.client() as reference,
        system.client(direct=True) as client,
    ):
        for variant in (VARIANTS[0], *VARIANTS[2:]):
            sampling = SAMPLING | variant
            expected = await reference.generate(PROMPT, **sampling)
            lose_tails(monkeypatch, num_tails=1, timeout_s=1.0)
            got = await client.generate(PROMPT, **sampling)
            assert got.samples == expected.samples
            assert got.prompt_logprobs == expected.prompt_logprobs
            assert got.usage.num_output_tokens == expected.usage.num_output_tokens
            await system.until_idle()


async def test_last_tokens_that_are_lost_every_time_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_system(router=LOCAL, **ENGINE) as system:
        lose_tails(monkeypatch, num_tails=100, timeout_s=0.2)
        async with system.client(direct=True) as client:
            with pytest.raises(EngineFault, match="last tokens could not be fetched"):
                await client.generate(PROMPT, **SAMPLING)
        await system.until_idle()


async def test_cancel_of_the_client_frees_everything() -> None:
    async with running_system(router=LOCAL, step_s=0.001, **ENGINE) as system, system.client(direct=True) as client:
        stream = client.stream(PROMPT, **SAMPLING)
        await _until(stream, num_tokens=20)
        await stream.aclose()
        await system.until_idle()


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
    monkeypatch.setattr("router.worker_requests.DIRECT_TTL_S", 0.05)
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


async def test_events_of_a_direct_answer_come_in_the_same_order() -> None:
    async with running_system(router=REMOTE, **ENGINE) as system, system.client(direct=True) as client:
        async with asyncio.timeout(TIMEOUT_S):
            events = [type(event).__name__ async for event in client.stream(PROMPT, **SAMPLING)]
        assert events[:2] == ["Accepted", "PlanChosen"]
        assert events[2:-1] == ["Token"] * 150
        assert events[-1] == Completed.__name__


async def test_closing_the_client_ends_its_direct_streams() -> None:
    async with running_system(router=LOCAL, step_s=0.002, **ENGINE) as system:
        client: AsyncClient = system.client(direct=True)
        system.pace.slow_down(at=20)
        stream = client.stream(PROMPT, **SAMPLING)
        await _until(stream, num_tokens=5)
        await client.aclose()
        system.pace.hurry()
        with pytest.raises(KvrelayError):
            await stream.result()
        await system.until_idle()
