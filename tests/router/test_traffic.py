"""`RecordTraffic` through a real router: which requests are recorded, when, and what they do not reveal."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from common.errors import EngineFault, InvalidRequest, Overloaded, Unauthenticated
from kvrelay.client import AsyncClient, RecordedRequest
from kvrelay.client.traffic import AsyncTrafficStream
from router.observe import traffic
from router.observe.traffic import MAX_RECORDINGS, TrafficRecordings
from router.record.record import RunningRequest
from tests.clock import ManualClock
from tests.router.fake_worker import BLOCK_SIZE, TIMEOUT_S, FakeWorker, hashes_of, pair
from tests.router.fakes import TestCluster, config_with, prompt_of, running_cluster
from tests.router.http.clients import http_cluster
from tests.router.test_lengths import make_record
from tests.router.test_tenants import KEYS, serving


async def ask(client: AsyncClient, prompt: Sequence[int], *, max_tokens: int = 6, n: int = 1) -> None:
    await client.generate(list(prompt), max_tokens=max_tokens, n=n, temperature=0, timeout_s=TIMEOUT_S)


async def read(stream: AsyncTrafficStream, count: int) -> list[RecordedRequest]:
    async with asyncio.timeout(TIMEOUT_S):
        return [await anext(stream) for _ in range(count)]


@contextlib.asynccontextmanager
async def recorded(
    *workers: FakeWorker, duration_s: float | None = None
) -> AsyncIterator[tuple[TestCluster, AsyncClient, AsyncTrafficStream]]:
    """Run a cluster whose requests are recorded from now on."""
    async with (
        running_cluster(*(workers or pair()), config=config_with(max_attempts=1)) as cluster,
        cluster.client() as client,
        client.record(duration_s=duration_s) as stream,
        asyncio.timeout(TIMEOUT_S),
    ):
        yield cluster, client, stream


async def test_recording_has_length_order_and_outcome_of_each_request() -> None:
    async with recorded() as (_cluster, client, stream):
        await ask(client, prompt_of(10), max_tokens=6)
        await ask(client, prompt_of(8), max_tokens=3, n=2)
        first, second = await read(stream, 2)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.outcome) == (10, 6, "completed")
    assert (second.num_prompt_tokens, second.num_output_tokens, second.outcome) == (8, 3, "completed")
    assert 0 <= first.arrival_s < second.arrival_s
    assert first.block_size == BLOCK_SIZE
    assert (len(first.block_keys), len(second.block_keys)) == (3, 2)


async def test_requests_of_both_doors_are_recorded_with_equal_keys() -> None:
    prompt = prompt_of(10)
    async with (
        http_cluster(*pair()) as http,
        http.cluster.client() as client,
        client.record() as stream,
    ):
        await ask(client, prompt)
        await http.client.completions.create(model="fake", prompt=prompt, max_tokens=6, temperature=0)
        grpc_request, http_request = await read(stream, 2)
    assert http_request.block_keys == grpc_request.block_keys
    assert (http_request.num_output_tokens, http_request.outcome) == (6, "completed")


async def test_keys_are_equal_exactly_as_far_as_prompts_are() -> None:
    prompts = [prompt_of(10), prompt_of(10), prompt_of(11), prompt_of(12), [*prompt_of(5), 99, 98, 97], [7]]
    async with recorded() as (_cluster, client, stream):
        for prompt in prompts:
            await ask(client, prompt)
        keys = [request.block_keys for request in await read(stream, len(prompts))]
    assert keys[0] == keys[1]
    assert [len(set(keys[0]) & set(other)) for other in keys[1:]] == [3, 2, 2, 1, 0]
    assert keys[4][0] == keys[0][0]


async def test_keys_link_neither_two_recordings_nor_a_recording_and_the_cache() -> None:
    prefill, decode = pair()
    async with recorded(prefill, decode) as (_cluster, client, one), client.record() as two:
        await ask(client, prompt_of(40))
        ((first,), (second,)) = await read(one, 1), await read(two, 1)
    assert set(first.block_keys).isdisjoint(second.block_keys)
    known = hashes_of(prefill.requests[0].sequence).packed
    parts = {known[start : start + 8] for start in range(len(known) - 7)}
    assert parts.isdisjoint(key.to_bytes(8, "little") for key in (*first.block_keys, *second.block_keys))


async def test_recording_has_only_requests_of_the_callers_tenant() -> None:
    async with running_cluster(*pair(), config=serving()) as cluster:
        async with cluster.client(api_key=KEYS["a"]) as a, cluster.client(api_key=KEYS["b"]) as b, a.record() as stream:
            await ask(b, prompt_of(4))
            await ask(a, prompt_of(9))
            await ask(b, prompt_of(5))
            await ask(a, prompt_of(6))
            assert [request.num_prompt_tokens for request in await read(stream, 2)] == [9, 6]
        async with cluster.client() as nobody:
            with pytest.raises(Unauthenticated):
                await anext(nobody.record())


async def test_request_that_ran_when_the_recording_began_is_left_out() -> None:
    prefill, decode = pair()
    prefill.gates.close("first_token")
    async with running_cluster(prefill, decode) as cluster, cluster.client() as client:
        early = asyncio.create_task(ask(client, prompt_of(5)))
        await prefill.gates.reached("first_token")
        async with client.record() as stream:
            prefill.gates.open("first_token")
            await early
            await ask(client, prompt_of(7))
            (request,) = await read(stream, 1)
    assert request.num_prompt_tokens == 7


async def test_recording_that_is_over_waits_for_what_runs_and_takes_nothing_more() -> None:
    prefill, decode = pair()
    prefill.gates.close("first_token")
    async with recorded(prefill, decode) as (cluster, client, stream):
        running = asyncio.create_task(ask(client, prompt_of(5)))
        await prefill.gates.reached("first_token")
        cluster.router.recordings.finish()
        late = asyncio.create_task(ask(client, prompt_of(7)))
        prefill.gates.open("first_token")
        await asyncio.gather(running, late)
        seen = [request async for request in stream]
    assert [request.num_prompt_tokens for request in seen] == [5]


async def test_recording_ends_by_itself_after_its_duration() -> None:
    async with recorded(duration_s=1e-6) as (_cluster, _client, stream):
        assert [request async for request in stream] == []


async def test_cancelled_and_failed_requests_are_recorded_with_their_outcome() -> None:
    prefill, decode = pair()
    async with recorded(prefill, decode) as (_cluster, client, stream):
        prefill.gates.close("first_token")
        gone = asyncio.create_task(ask(client, prompt_of(5)))
        await prefill.gates.reached("first_token")
        gone.cancel()
        (cancelled,) = await read(stream, 1)
        prefill.gates.open("first_token")
        prefill.faults["prefill"] = EngineFault("broken")
        with pytest.raises(EngineFault):
            await ask(client, prompt_of(6))
        (failed,) = await read(stream, 1)
    assert (cancelled.num_prompt_tokens, cancelled.num_output_tokens, cancelled.outcome) == (5, 0, "cancelled")
    assert (failed.num_prompt_tokens, failed.num_output_tokens, failed.outcome) == (6, 0, "EngineFault")


async def test_recorder_that_leaves_frees_its_recording() -> None:
    async with running_cluster(*pair()) as cluster, cluster.client() as client:
        for _ in range(2 * MAX_RECORDINGS):
            async with client.record():
                pass
            await cluster.until(lambda _router: not cluster.router.recordings.num_open)
        await ask(client, prompt_of(5))


async def test_tenant_has_only_so_many_recordings_at_a_time() -> None:
    async with running_cluster(*pair(), config=serving()) as cluster, contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(cluster.client(api_key=KEYS[name])) for name in "ab"]
        for _ in range(MAX_RECORDINGS):
            await stack.enter_async_context(a.record())
        with pytest.raises(Overloaded, match="4 recordings of this tenant run already"):
            await stack.enter_async_context(a.record())
        await stack.enter_async_context(b.record())


@pytest.mark.parametrize("duration_s", [-1.0, float("inf"), float("nan")])
async def test_duration_that_is_not_a_time_is_refused(duration_s: float) -> None:
    async with running_cluster(*pair()) as cluster, cluster.client() as client:
        with pytest.raises(InvalidRequest) as caught:
            await anext(client.record(duration_s=duration_s))
    assert caught.value.field == "duration_s"


async def test_router_that_stops_ends_its_recordings() -> None:
    async with recorded() as (cluster, _client, stream):
        await cluster.router.stop(TIMEOUT_S)
        assert [request async for request in stream] == []


# Without a reader.


def ended(num_blocks: int, *, at_s: float = 0.0) -> RunningRequest:
    return make_record(ManualClock(at_s), num_blocks=num_blocks)


def run(recordings: TrafficRecordings, record: RunningRequest) -> None:
    with recordings.following(record):
        pass


@pytest.mark.parametrize(
    ("limit", "value", "num_kept"), [("MAX_WAITING", 3, 3), ("MAX_WAITING_BYTES", 16 * 5 * 4 - 1, 3)]
)
async def test_requests_beyond_what_a_recording_holds_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int, num_kept: int
) -> None:
    monkeypatch.setattr(traffic, limit, value)
    recordings = TrafficRecordings(ManualClock())
    with recordings.open("t") as recording:
        for _ in range(5):
            run(recordings, ended(5))
        first, *_ = [await recording.next() for _ in range(num_kept)]
        assert first is not None
        assert first.num_dropped == 5 - num_kept
        run(recordings, ended(5))
        assert await recording.next() is not None
        recording.finish()
        assert await recording.next() is None
        assert recording.message().num_dropped == 5 - num_kept


async def test_long_prompt_lets_others_run_while_its_keys_are_made() -> None:
    recordings = TrafficRecordings(ManualClock())
    with recordings.open("t") as recording:
        run(recordings, ended(1000))
        keys = asyncio.create_task(recording.next())
        num_turns = 0
        while not keys.done():
            num_turns += 1
            await asyncio.sleep(0)
    assert num_turns >= 4
    message = keys.result()
    assert message is not None
    assert len(message.request.block_keys) == 8 * 1001, "eight bytes for each block, and for the token behind them"


async def test_arrival_counts_from_the_beginning_of_the_recording() -> None:
    recordings = TrafficRecordings(ManualClock(100.0))
    with recordings.open("t") as recording:
        for at_s in (99.0, 100.0, 103.5):
            run(recordings, ended(1, at_s=at_s))
        recording.finish()
        messages = []
        while (message := await recording.next()) is not None:
            messages.append(message)
    assert [message.request.arrival_s for message in messages] == [0.0, 3.5]
