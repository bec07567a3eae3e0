"""`kvrelay scale` on a real cluster: pools grow and shrink under load, and no client notices but by a pause."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from cluster.control import restart, scale
from cluster.lifecycle import read_info
from common.errors import EngineFault, InvalidRequest
from kvrelay.client import AsyncClient, Generation, Token
from tests.e2e.harness import fake_config, pids, running_cluster, standing_cluster

pytestmark = pytest.mark.e2e

NUM_STREAMS = 8
NUM_TOKENS = 125
_undisturbed_texts: list[str] = []


async def resize(folder: Path, grace_s: float = 30.0, **wanted: int) -> list[str]:
    """Ask for other sizes and return the steps."""

    def ask(sizes: Mapping[str, int]) -> list[str]:
        return [step.text for step in scale(folder / "run", sizes, grace_s=grace_s, force=True)]

    return await asyncio.to_thread(ask, wanted)


async def answer(client: AsyncClient, number: int, begun: asyncio.Event, *, num_tokens: int) -> Generation:
    async with client.stream(f"stream {number} " * 20, max_tokens=num_tokens, ignore_eos=True, seed=number) as events:
        async for event in events:
            if isinstance(event, Token):
                begun.set()
        return await events.result()


async def answers(client: AsyncClient, begun: asyncio.Event, *, num_tokens: int) -> list[Generation]:
    return await asyncio.gather(*(answer(client, n, begun, num_tokens=num_tokens) for n in range(NUM_STREAMS)))


async def undisturbed_texts(client: AsyncClient) -> list[str]:
    """Return the texts of the streams when nothing disturbs them: the same ones on every cluster of this file."""
    if not _undisturbed_texts:
        seen = await answers(client, asyncio.Event(), num_tokens=NUM_TOKENS)
        _undisturbed_texts.extend(each.text for each in seen)
    return _undisturbed_texts


async def workers(client: AsyncClient) -> set[str]:
    return {view.worker_id for view in (await client.status()).workers}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a cluster that several tests use, in their order."""
    folder = tmp_path_factory.mktemp("standing")
    with standing_cluster(folder, fake_config(step_ms=40.0)):
        yield folder


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[AsyncClient]:
    info = read_info(folder / "run")
    assert info is not None
    async with AsyncClient(info.address, timeout_s=120) as client:
        yield client


async def grow_and_shrink_under_streams(folder: Path, client: AsyncClient, *, num_rounds: int) -> None:
    expected = await undisturbed_texts(client)
    begun = asyncio.Event()
    running = asyncio.create_task(answers(client, begun, num_tokens=NUM_TOKENS))
    await begun.wait()
    for _ in range(num_rounds):
        await resize(folder, prefill=2, decode=2)
        assert await workers(client) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
        await resize(folder, prefill=1, decode=1)
        assert await workers(client) == {"prefill-0", "decode-0"}
    done = await running
    status = (await client.status()).router

    assert [each.text for each in done] == expected
    assert status.num_failed == status.num_replans == 0


async def test_pools_grow_and_shrink_without_a_trace_in_the_answers(folder: Path, client: AsyncClient) -> None:
    await grow_and_shrink_under_streams(folder, client, num_rounds=2)


async def test_pools_over_ray_grow_and_shrink_without_a_trace_in_the_answers(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, fake_config(launcher="ray", step_ms=40.0)) as client:
        await grow_and_shrink_under_streams(tmp_path, client, num_rounds=1)


async def test_rolling_restart_replaces_every_worker_without_a_trace_in_the_answers(
    folder: Path, client: AsyncClient
) -> None:
    expected = await undisturbed_texts(client)
    before = await pids(client)
    begun = asyncio.Event()
    running = asyncio.create_task(answers(client, begun, num_tokens=NUM_TOKENS))
    await begun.wait()
    await asyncio.to_thread(lambda: list(restart(folder / "run", grace_s=30.0)))
    done = await running
    after, status = await pids(client), (await client.status()).router

    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert [each.text for each in done] == expected
    assert status.num_failed == status.num_replans == 0


async def test_sizes_that_cannot_be_are_refused_by_field(folder: Path, client: AsyncClient) -> None:
    for wanted, field in (({"decode": 0}, "decode"), ({"prefill": 5000}, "prefill")):
        with pytest.raises(InvalidRequest) as caught:
            await resize(folder, **wanted)
        assert caught.value.field == field
    assert await workers(client) == {"prefill-0", "decode-0"}


async def test_worker_that_does_not_start_is_told_and_the_cluster_serves_on(folder: Path, client: AsyncClient) -> None:
    before = await workers(client)
    # Workers read the resolved file: a model that is not there makes new ones fail.
    path = folder / "run" / "serving.yaml"
    text = path.read_text(encoding="utf-8").replace("engine: fake", "engine: torch")
    path.write_text(text.replace("id: default", "id: /no/such/model"), encoding="utf-8")
    with pytest.raises(EngineFault, match="cannot start decode-1"):
        await resize(folder, decode=2)

    assert await workers(client) == before
    assert (await client.generate("still here", max_tokens=4, ignore_eos=True)).token_ids
