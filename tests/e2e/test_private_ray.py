"""A cluster in a Ray of its own: its pools and configuration change under streams, its processes die; then all go."""

import asyncio
from collections.abc import Iterator

import pytest

from cluster.control import scale
from cluster.lifecycle import ClusterInfo
from kvrelay.client import AsyncClient
from tests.cluster.test_cluster_e2e import kill_every_process
from tests.e2e.harness import fake_config, pids, standing_cluster
from tests.e2e.streams import NUM_STREAMS, repeated_streams
from tests.e2e.test_rollout import (
    LOAD,
    assert_nothing_was_lost,
    client_of,
    roll_out,
    running_config,
    with_decode,
)

pytestmark = pytest.mark.e2e

CONFIG = fake_config(launcher="ray", step_ms=30.0)


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterInfo]:
    """The cluster that both tests use, in their order."""
    with standing_cluster(tmp_path_factory.mktemp("private-ray"), CONFIG) as info:
        yield info


async def resize(info: ClusterInfo, client: AsyncClient, *, size: int) -> None:
    """Ask for pools of a size, and see that they have it."""
    sizes = dict.fromkeys(("prefill", "decode"), size)
    await asyncio.to_thread(lambda: list(scale(info.run_dir, sizes, grace_s=30.0, force=True)))
    assert set(await pids(client)) == {f"{pool}-{number}" for pool in sizes for number in range(size)}


async def test_other_sizes_and_configuration_over_ray_fail_no_request_and_change_no_text(info: ClusterInfo) -> None:
    folder = info.run_dir.parent
    async with client_of(folder) as client:
        before = await pids(client)
        async with repeated_streams(client, **LOAD) as load:
            await resize(info, client, size=2)
            await resize(info, client, size=1)
            assert await pids(client) == before
            steps = await roll_out(folder, with_decode(CONFIG, max_running=32))
        after = await pids(client)

        assert load.num_answers >= NUM_STREAMS
        assert "decode-1 beside the old workers for 2 s" in steps
        assert after.keys() == before.keys()
        assert (after["prefill-0"], after["decode-0"] != before["decode-0"]) == (before["prefill-0"], True)
        assert running_config(folder).pools.decode.max_running == 32
        await assert_nothing_was_lost(client)


def test_every_process_killed_comes_back_and_all_go_without_supervisor_on_ray(info: ClusterInfo) -> None:
    kill_every_process(info)
