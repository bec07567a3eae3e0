"""The controller dies, then the whole Ray head, while clients stream through a router that lives elsewhere.

`pytest tests/hosts/test_controller.py -s` prints what they saw.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import AsyncClient
from tests.hosts.network import Host, Journal, hosts, why_not
from tests.hosts.ray_cluster import NAME, ROUTER_PORT, RayCluster
from tests.hosts.streams import Seen, describe, stream_all
from tests.hosts.test_ray_up import POOL, workers_at

_REASON = why_not()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(_REASON is not None, reason=f"hosts out of namespaces: {_REASON}"),
    pytest.mark.timeout(800),
]

SERVING: dict[str, Any] = {
    "name": NAME,
    "launcher": "ray",
    "model": {"engine": "fake", "fake_step_ms": 20.0, "max_model_len": 4096},
    "pools": {"prefill": {"count": 1, **POOL}, "decode": {"count": 2, **POOL}},
    "router": {
        "host": "0.0.0.0",
        "port": ROUTER_PORT,
        "count": 2,
        "http_port": 8000,
        "policy": "least_load",
        "local_prefill_max_tokens": 0,
    },
}
_STATE = f"cat ~/.cache/kvrelay/run/{NAME}/state.json"
_LOGS = (
    f"cat ~/kvrelay-up.log; tail -n 40 ~/.cache/kvrelay/run/{NAME}/logs/supervisor.log ~/kvrelay-head.log; "
    "cd /tmp/ray/session_latest/logs && tail -n 25 $(ls -t raylet*.out gcs_server*.out *agent*.log | head -n 6); "
    "ps -eo pid,ppid,etimes,stat,args | cut -c1-200"
)
_WAIT_S = 400
_NUM_WORKERS = 3


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Host]]:
    (tmp_path / "hosts").mkdir()
    with hosts(("head", "prefill-a", "decode-a", "decode-b"), tmp_path / "hosts") as made:
        yield made


def read_state(head: Host) -> dict[str, Any]:
    """Return the cluster's state.json; {} while there is none."""
    told = head.run(_STATE, check=False).stdout
    state: dict[str, Any] = json.loads(told) if told else {}
    return state


async def until_controlled(head: Host, *, not_by: int = 0) -> float:
    """Wait until a new controller says that it looks after everything; return how long it took, seconds."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < _WAIT_S:
        state = await asyncio.to_thread(read_state, head)
        if state and state["supervisor"]["pid"] != not_by and state["phase"] == "ready":
            return time.monotonic() - started_s
        await asyncio.sleep(0.1)  # there is no event to wait for
    raise AssertionError(f"no controller after {_WAIT_S} s\n{head.run(_LOGS, check=False).stdout}")


async def pids(client: AsyncClient) -> dict[str, int]:
    return {view.worker_id: view.status.pid for view in (await client.status()).workers if view.status}


class Clients:
    """Streams through one router, whose texts must not change."""

    def __init__(self, client: AsyncClient, undisturbed: list[Seen], journal: Journal) -> None:
        self._client = client
        self._texts = [each.answer.text for each in undisturbed]
        self._journal = journal

    async def stream_until(self, is_over: Callable[[], Awaitable[float]], strike: Callable[[], object]) -> float:
        """Strike in mid-stream, then stream on, again and again, until it is over; returns how long that took."""
        over: asyncio.Future[float] | None = None

        async def strike_and_watch() -> None:
            nonlocal over
            await asyncio.to_thread(strike)
            over = asyncio.ensure_future(is_over())

        seen = await stream_all(self._client, strike_and_watch)
        assert over is not None, "every stream has had tokens"
        while not over.done():
            seen += await stream_all(self._client)
        texts = [each.answer.text for each in seen]
        assert texts == self._texts * (len(texts) // len(self._texts))
        self._journal.note(describe(seen))
        return await over


async def test_streams_through_another_hosts_router_notice_neither_the_controllers_death_nor_the_heads(
    machines: dict[str, Host], tmp_path: Path
) -> None:
    head = machines["head"]
    cluster = RayCluster(list(machines.values()), file="cluster.yaml", serving=SERVING, folder=tmp_path, pools={})
    journal = Journal(machines.values())
    journal.title("the controller dies, then the head")
    await asyncio.to_thread(cluster.up)
    await until_controlled(head)
    await asyncio.to_thread(cluster.fetch_ca)
    state = read_state(head)
    (elsewhere,) = (each["address"] for each in state["processes"] if each["name"] == "router-1")
    assert elsewhere.rpartition(":")[0] not in (head.address, "0.0.0.0")
    async with cluster.client(elsewhere) as client:
        await workers_at(client, count=_NUM_WORKERS)
        before = await pids(client)
        undisturbed = await stream_all(client)
        journal.note(f"all is well; {describe(undisturbed)}")
        clients = Clients(client, undisturbed, journal)

        first = state["supervisor"]["pid"]
        took_s = await clients.stream_until(
            lambda: until_controlled(head, not_by=first), lambda: head.run(f"kill -9 {first}")
        )
        journal.note(f"the controller was killed in mid-stream; back and in charge {took_s:.1f} s later")
        assert await pids(client) == before

        second = read_state(head)["supervisor"]["pid"]
        took_s = await clients.stream_until(
            lambda: until_controlled(head, not_by=second),
            lambda: head.run("kill -9 $(pgrep -x gcs_server) $(pgrep -x raylet)"),
        )
        journal.note(f"the head's Ray was killed in mid-stream; it and its controller were back {took_s:.1f} s later")
        assert await pids(client) == before, "workers of other hosts do not depend on the head"
        assert (await client.status()).router.num_failed == 0

        async with cluster.client() as at_head:
            await workers_at(at_head, count=_NUM_WORKERS)
            journal.note("the head's own router, which died with its Ray, serves again with every worker")
        await asyncio.to_thread(cluster.kvrelay, "scale decode=1")
        assert await pids(client) == {name: pid for name, pid in before.items() if name != "decode-1"}
        journal.note("the controller that came back owns the pools: kvrelay scale decode=1")
    await asyncio.to_thread(cluster.down)
    left = {host.name: cluster.leftovers(host) for host in machines.values()}
    assert not any(left.values()), left
