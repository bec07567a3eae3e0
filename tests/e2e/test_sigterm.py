"""SIGTERM on a worker of a real cluster is a drain: no client notices, and the worker is started again."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cluster.processes.state import ProcessState, StateFile
from kvrelay.client import AsyncClient
from tests.e2e.harness import FAKE_POOL, fake_config, running_cluster, until, worker
from tests.e2e.test_scale import answers

pytestmark = pytest.mark.e2e


def process(folder: Path, name: str) -> ProcessState:
    """Return what the supervisor tells of a process."""
    state = StateFile(folder / "run").read()
    assert state is not None
    (found,) = [each for each in state.processes if each.name == name]
    return found


def told_to_end(folder: Path, name: str) -> None:
    identity = process(folder, name).identity
    assert identity is not None
    os.kill(identity.pid, signal.SIGTERM)


async def until_draining(client: AsyncClient, role: str) -> None:
    async def is_draining() -> bool:
        return (await worker(client, role)).state == "draining"

    await until(is_draining, timeout_s=60, what="it has announced that it leaves")


async def test_workers_told_to_end_under_streams_leave_no_trace_in_the_answers(tmp_path: Path) -> None:
    pools = {"prefill": FAKE_POOL | {"count": 2}, "decode": FAKE_POOL | {"count": 2}}
    router = {"port": 0, "local_prefill_max_tokens": 0}
    names = ("decode-0", "prefill-0")
    async with running_cluster(tmp_path, fake_config(step_ms=40.0, pools=pools, router=router)) as client:
        expected = [each.text for each in await answers(client, asyncio.Event(), num_tokens=75)]
        begun = asyncio.Event()
        running = asyncio.create_task(answers(client, begun, num_tokens=75))
        await begun.wait()
        for name in names:
            told_to_end(tmp_path, name)

        async def are_replaced() -> bool:
            return all(process(tmp_path, name).num_restarts == 1 for name in names)

        await until(are_replaced, timeout_s=120, what="both are started again")
        done = await running
        status = (await client.status()).router

        assert [each.text for each in done] == expected
        assert status.num_failed == status.num_replans == 0
        assert {process(tmp_path, name).last_exit for name in names} == {"terminated"}


async def test_second_signal_ends_a_worker_that_waits_at_once(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, fake_config(step_ms=40.0)) as client:
        begun = asyncio.Event()
        running = asyncio.create_task(answers(client, begun, num_tokens=200))
        await begun.wait()
        told_to_end(tmp_path, "decode-0")
        await until_draining(client, "decode")
        assert not running.done()
        told_to_end(tmp_path, "decode-0")
        await running

        assert process(tmp_path, "decode-0").last_exit == "killed by SIGTERM"
        assert (await client.status()).router.num_failed == 0


async def cached_share(client: AsyncClient) -> float:
    """Return the share of some chats' prompt tokens that were found in a cache."""
    num_cached = num_all = 0
    for number in range(12):
        prompt = f"you are the keeper of a lighthouse; ship number {number} passes by night; " * 4
        usage = (await client.generate(prompt, max_tokens=2, ignore_eos=True)).usage
        num_cached, num_all = num_cached + usage.num_cached_tokens, num_all + usage.num_prompt_tokens
    return num_cached / num_all


async def test_worker_told_to_end_leaves_what_its_chats_had_cached_to_the_others(tmp_path: Path) -> None:
    pools = {"prefill": FAKE_POOL | {"count": 2}, "decode": FAKE_POOL}
    # This policy has nothing pulled from decode workers: only prefill workers' caches count.
    router = {"port": 0, "local_prefill_max_tokens": 0, "policy": "longest_prefix"}
    async with running_cluster(tmp_path, fake_config(pools=pools, router=router)) as client:
        await cached_share(client)
        before = await cached_share(client)
        for name in ("prefill-0", "prefill-1"):  # either worker may hold them; the other one gets them
            told_to_end(tmp_path, name)

            async def is_replaced(name: str = name) -> bool:
                workers = {view.worker_id: view for view in (await client.status()).workers}
                is_ready = name in workers and workers[name].state == "ready"  # while it is away it is no member
                return is_ready and process(tmp_path, name).num_restarts == 1

            await until(is_replaced, timeout_s=120, what=f"{name} is started again")
        after = await cached_share(client)

        assert before > 0.9
        assert after > before - 0.1
