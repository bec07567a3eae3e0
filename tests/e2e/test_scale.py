"""Pools of a real cluster grow, shrink, exchange workers and lose some by SIGTERM under load; no client notices."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from cluster.control import restart, scale
from cluster.lifecycle import read_info
from common.errors import EngineFault
from kvrelay.client import AsyncClient
from tests.e2e.harness import FAKE_POOL, fake_config, pids, process_of, standing_cluster, until, worker
from tests.e2e.streams import repeated_streams, running_streams

pytestmark = pytest.mark.e2e

NUM_TOKENS = 60
"""Tokens of an answer; it lasts for seconds."""


async def resize(folder: Path, grace_s: float = 30.0, **wanted: int) -> list[str]:
    """Ask for other sizes and return the steps."""

    def ask(sizes: Mapping[str, int]) -> list[str]:
        return [step.text for step in scale(folder / "run", sizes, grace_s=grace_s, force=True)]

    return await asyncio.to_thread(ask, wanted)


async def members(client: AsyncClient) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"prefill": set(), "decode": set()}
    for view in (await client.status()).workers:
        found[view.role].add(view.worker_id)
    return found


def told_to_end(folder: Path, name: str) -> None:
    identity = process_of(folder / "run", name).identity
    assert identity is not None
    os.kill(identity.pid, signal.SIGTERM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a cluster that several tests use, in their order."""
    folder = tmp_path_factory.mktemp("standing")
    pools = {role: FAKE_POOL | {"count": 2, "max_running": room} for role, room in (("prefill", 64), ("decode", 48))}
    # This policy has nothing pulled from decode workers: only prefill workers' caches count.
    router = {"port": 0, "local_prefill_max_tokens": 0, "policy": "longest_prefix"}
    with standing_cluster(folder, fake_config(step_ms=80.0, pools=pools, router=router)):
        yield folder


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[AsyncClient]:
    info = read_info(folder / "run")
    assert info is not None
    async with AsyncClient(info.address, timeout_s=120) as client:
        yield client


async def assert_nothing_was_lost(client: AsyncClient) -> None:
    status = (await client.status()).router
    assert status.num_failed == status.num_replans == 0


async def test_workers_change_their_pools_under_streams_unnoticed(folder: Path, client: AsyncClient) -> None:
    before = await pids(client)
    async with repeated_streams(client, num_tokens=NUM_TOKENS // 3):
        for prefill, decode in ((1, 3), (3, 1), (2, 2)):
            steps = await resize(folder, prefill=prefill, decode=decode)
            assert not [step for step in steps if step.startswith(("starting", "draining"))]
            assert {role: len(names) for role, names in (await members(client)).items()} == {
                "prefill": prefill,
                "decode": decode,
            }

    assert await pids(client) == before
    assert await members(client) == {"prefill": {"prefill-0", "prefill-1"}, "decode": {"decode-0", "decode-1"}}
    await assert_nothing_was_lost(client)


async def cached_share(client: AsyncClient) -> float:
    """Return the share of some chats' prompt tokens that were found in a cache."""
    num_cached = num_all = 0
    for number in range(6):
        prompt = f"you are the keeper of a lighthouse; ship number {number} passes by night; " * 4
        usage = (await client.generate(prompt, max_tokens=2, ignore_eos=True)).usage
        num_cached, num_all = num_cached + usage.num_cached_tokens, num_all + usage.num_prompt_tokens
    return num_cached / num_all


async def test_workers_told_to_end_leave_no_trace_in_answers_and_their_caches_to_others(
    folder: Path, client: AsyncClient
) -> None:
    async def are_replaced(*names: str) -> bool:
        # A worker that is away is no member.
        workers = {view.worker_id: view.state for view in (await client.status()).workers}
        return all(
            process_of(folder / "run", name).num_restarts == 1 and workers.get(name) == "ready" for name in names
        )

    await cached_share(client)
    before = await cached_share(client)
    async with running_streams(client, num_tokens=NUM_TOKENS):
        told_to_end(folder, "decode-0")
        told_to_end(folder, "prefill-0")
        await until(lambda: are_replaced("decode-0", "prefill-0"), timeout_s=120, what="both are started again")
    # Either prefill worker may have held the prefixes; the other one got them.
    told_to_end(folder, "prefill-1")
    await until(lambda: are_replaced("prefill-1"), timeout_s=120, what="it is started again")
    after = await cached_share(client)

    assert before > 0.9
    assert after > before - 0.1
    assert {process_of(folder / "run", name).last_exit for name in ("decode-0", "prefill-0", "prefill-1")} == {
        "terminated"
    }
    await assert_nothing_was_lost(client)


async def test_second_signal_ends_a_worker_that_waits_at_once(folder: Path, client: AsyncClient) -> None:
    await resize(folder, prefill=1, decode=1)

    async def is_draining() -> bool:
        return (await worker(client, "decode")).state == "draining"

    async with running_streams(client, num_tokens=NUM_TOKENS) as running:
        told_to_end(folder, "decode-0")
        await until(is_draining, timeout_s=60, what="it has announced that it leaves")
        assert not any(each.done() for each in running)
        told_to_end(folder, "decode-0")

    assert process_of(folder / "run", "decode-0").last_exit == "killed by SIGTERM"
    assert (await client.status()).router.num_failed == 0


async def test_rolling_restart_replaces_every_worker_without_a_trace_in_the_answers(
    folder: Path, client: AsyncClient
) -> None:
    before, num_replans = await pids(client), (await client.status()).router.num_replans
    async with running_streams(client, num_tokens=NUM_TOKENS):
        await asyncio.to_thread(lambda: list(restart(folder / "run", grace_s=30.0)))
    after, status = await pids(client), (await client.status()).router

    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert (status.num_failed, status.num_replans) == (0, num_replans)


async def test_worker_that_does_not_start_is_told_and_the_cluster_serves_on(folder: Path, client: AsyncClient) -> None:
    before = await members(client)
    # Workers read the resolved file: a model that is not there makes new ones fail.
    path = folder / "run" / "serving.yaml"
    text = path.read_text(encoding="utf-8").replace("engine: fake", "engine: torch")
    path.write_text(text.replace("id: default", "id: /no/such/model"), encoding="utf-8")
    new = len(before["decode"])
    with pytest.raises(EngineFault, match=f"cannot start decode-{new}"):
        await resize(folder, decode=new + 1)

    assert await members(client) == before
    assert (await client.generate("still here", max_tokens=4, ignore_eos=True)).token_ids
