"""`ray up cluster.yaml` on four hosts: strangers, a power cut, the controller's death and the head's disturb no stream.

The tests share one cluster. `pytest tests/hosts -s` prints what they saw.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from cluster.processes.state import ClusterPhase
from kvrelay.client import AsyncClient
from tests.e2e.harness import pids
from tests.e2e.streams import answers, running_streams
from tests.hosts.network import Host, why_not
from tests.hosts.rank_steps import lose_a_rank_in_mid_stream
from tests.hosts.ray_cluster import NAME, logs_of
from tests.hosts.site import NUM_TOKENS, Site, site_on, workers_at
from tests.hosts.trust_steps import refuse_strangers_in_mid_stream

_REASON = why_not()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(_REASON is not None, reason=f"hosts out of namespaces: {_REASON}"),
    pytest.mark.timeout(900),
]

_STATE = f"~/.cache/kvrelay/run/{NAME}/state.json"
_WAIT_S = 400
_NUM_WHILE_AWAY = 2
"""Streams at a time while something is away, so that it gets the cores to come back."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with site_on("cluster.yaml", folder, num_decode=2, router={"count": 2}) as made:
        yield made


async def test_strangers_get_nowhere_and_disturb_no_stream(site: Site) -> None:
    async with site.client() as client:
        await refuse_strangers_in_mid_stream(site, client)


async def test_power_cut_of_a_decode_host_loses_no_answer(site: Site) -> None:
    async with site.client() as client:
        await site.cut_power_in_mid_stream(client)


async def test_streams_of_another_hosts_router_survive_controller_and_head(site: Site) -> None:
    head = site.head
    await until_controlled(head)
    state = read_state(head)
    (elsewhere,) = (each["address"] for each in state["processes"] if each["name"] == "router-1")
    assert elsewhere.rpartition(":")[0] not in (head.address, "0.0.0.0")
    async with site.client() as at_head, site.cluster.client(elsewhere) as client:
        await workers_at(client, count=site.num_workers)
        before = await pids(client)

        first = state["supervisor"]["pid"]
        took_s = await stream_until(
            client, lambda: until_controlled(head, not_by=first), lambda: head.run(f"kill -9 {first}")
        )
        site.journal.note(f"the controller was killed in mid-stream; back and in charge {took_s:.1f} s later")
        assert await pids(client) == before

        second = read_state(head)["supervisor"]["pid"]
        took_s = await stream_until(
            client,
            lambda: until_controlled(head, not_by=second),
            lambda: head.run("kill -9 $(pgrep -x gcs_server) $(pgrep -x raylet)"),
        )
        site.journal.note(
            f"the head's Ray was killed in mid-stream; it and its controller were back {took_s:.1f} s later"
        )
        assert await pids(client) == before, "workers of other hosts do not depend on the head"
        assert (await client.status()).router.num_failed == 0

        await workers_at(at_head, count=site.num_workers)
        site.journal.note("the head's own router, which died with its Ray, serves again with every worker")
        await asyncio.to_thread(site.cluster.kvrelay, "scale decode=1")
        assert await pids(client) == {name: pid for name, pid in before.items() if name != "decode-1"}
        site.journal.note("the controller that came back owns the pools: kvrelay scale decode=1")


async def test_worker_that_loses_a_rank_is_replaced_and_answers_as_one_rank_does(site: Site) -> None:
    folder = site.head.state / "ranks"
    folder.mkdir()
    await lose_a_rank_in_mid_stream(site, folder)


def test_ray_down_leaves_no_process(site: Site) -> None:
    site.ray_down()


def read_state(head: Host) -> dict[str, Any]:
    """Return the cluster's state.json."""
    state: dict[str, Any] = json.loads(head.run(f"cat {_STATE}").stdout)
    return state


async def until_controlled(head: Host, *, not_by: int = 0) -> float:
    """Wait until a new controller says that it looks after everything; return how long it took, seconds."""
    # There is no event to wait for, and a connection for each look would cost far more than the look. The depth of a
    # member tells the cluster's phase and its controller from those of processes.
    ready, old = f'^ "phase": "{ClusterPhase.READY}"', f'^  "pid": {not_by},'
    looks = f"state=$(cat {_STATE}) && grep -q '{ready}' <<<\"$state\" && ! grep -q '{old}' <<<\"$state\""
    until = f"until {looks}; do sleep 0.5; done"
    started_s = time.monotonic()
    try:
        await asyncio.to_thread(head.run, until, timeout_s=_WAIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no controller after {_WAIT_S} s\n{logs_of(head)}") from None
    return time.monotonic() - started_s


async def stream_until(
    client: AsyncClient, is_over: Callable[[], Awaitable[float]], strike: Callable[[], object]
) -> float:
    """Strike in mid-stream, then stream on, again and again, until it is over; returns how long that took."""
    async with running_streams(client, num_tokens=NUM_TOKENS):
        await asyncio.to_thread(strike)
        over = asyncio.ensure_future(is_over())
    while not over.done():
        await answers(client, num_tokens=NUM_TOKENS, num_streams=_NUM_WHILE_AWAY)
    return await over
