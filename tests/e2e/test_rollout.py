"""`kvrelay rollout` on a real cluster under load: another configuration, a canary that is bad, nothing that fails."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.changes.rollout import RolloutTerms
from cluster.control import preview_rollout, rollout
from cluster.lifecycle import read_info
from common.config import ServingConfig, load_config
from common.errors import EngineFault, InvalidRequest
from kvrelay.client import AsyncClient
from tests.e2e.harness import FAKE_POOL, fake_config, pids, reporting_workers, standing_cluster

pytestmark = pytest.mark.e2e

NUM_STREAMS = 3
NUM_TOKENS = 10
_PAUSE_S = 0.3
"""Time between an answer and the next request of a stream; without it the load alone would fill the cores."""
# Loose: what other tests do to the machine meanwhile must not look like a slow canary.
TERMS = RolloutTerms(canary_s=2.0, max_slowdown=20.0, grace_s=30.0)
# Strict, and with time to measure: a busy machine slows the old workers down, too.
STRICT_TERMS = RolloutTerms(canary_s=5.0, max_slowdown=2.0, grace_s=30.0)


ONE_ROUTER = fake_config(step_ms=15.0)
TWO_ROUTERS = fake_config(step_ms=30.0, router={"port": 0, "count": 2, "local_prefill_max_tokens": 32})


@pytest.fixture(scope="module")
def one_router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a cluster that some tests use, in their order."""
    folder = tmp_path_factory.mktemp("one-router")
    with standing_cluster(folder, ONE_ROUTER):
        yield folder


@pytest.fixture(scope="module")
def two_routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a cluster that some tests use, in their order."""
    folder = tmp_path_factory.mktemp("two-routers")
    with standing_cluster(folder, TWO_ROUTERS):
        yield folder


def client_of(folder: Path) -> AsyncClient:
    info = read_info(folder / "run")
    assert info is not None
    return AsyncClient(info.address, timeout_s=120)


def with_decode(config: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return config | {"pools": config["pools"] | {"decode": FAKE_POOL | keys}}


def running_config(folder: Path) -> ServingConfig:
    return load_config(folder / "run" / "serving.yaml")


async def roll_out(folder: Path, config: dict[str, Any], terms: RolloutTerms = TERMS) -> list[str]:
    path = folder / "next.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    steps = await asyncio.to_thread(lambda: list(rollout(folder / "run", load_config(path), terms)))
    return [step.text for step in steps]


async def generate(client: AsyncClient, number: int) -> str:
    done = await client.generate(f"stream {number} " * 8, max_tokens=NUM_TOKENS, ignore_eos=True, seed=number)
    return done.text


@dataclass
class Load:
    """Clients that ask again and again; a failure ends the test."""

    expected: list[str]
    num_answers: int = 0
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(self, client: AsyncClient, number: int) -> None:
        while not self.over.is_set():
            assert await generate(client, number) == self.expected[number]
            self.num_answers += 1
            self.answered.set()
            await asyncio.sleep(_PAUSE_S)

    async def next_answer(self) -> None:
        self.answered.clear()
        await self.answered.wait()


@asynccontextmanager
async def busy_streams(client: AsyncClient) -> AsyncIterator[Load]:
    """Keep the cluster busy inside the block; every answer has to be the one of an undisturbed cluster."""
    load = Load(expected=await asyncio.gather(*(generate(client, n) for n in range(NUM_STREAMS))))
    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_STREAMS):
            tasks.create_task(load.stream(client, number))
        await load.next_answer()
        try:
            yield load
        finally:
            load.over.set()


async def policy_of(address: str) -> str:
    async with AsyncClient(address, timeout_s=120) as client:
        return (await client.status()).router.policy


async def fingerprint_of(address: str) -> str:
    async with AsyncClient(address, timeout_s=120) as client:
        (model,) = await client.models()
        return model.fingerprint


async def assert_nothing_was_lost(client: AsyncClient) -> None:
    status = (await client.status()).router
    assert status.num_failed == status.num_replans == 0


async def test_canary_ten_times_as_slow_is_rolled_back_under_streams(one_router: Path) -> None:
    async with client_of(one_router) as client:
        before = await pids(client)
        async with busy_streams(client):
            with pytest.raises(EngineFault, match="rolled back, the old configuration serves: the canary is bad"):
                slow = ONE_ROUTER | {"model": ONE_ROUTER["model"] | {"fake_step_ms": 150.0}}
                await roll_out(one_router, slow, STRICT_TERMS)

        assert await pids(client) == before
        assert running_config(one_router).model.fake_step_ms == 15.0
        await assert_nothing_was_lost(client)


async def test_preview_and_refusals_change_nothing_and_a_second_rollout_goes_on(one_router: Path) -> None:
    async with client_of(one_router) as client:
        before = await pids(client)
        wanted = ServingConfig.model_validate(with_decode(ONE_ROUTER, num_blocks=300))
        preview = await asyncio.to_thread(lambda: list(preview_rollout(one_router / "run", wanted)))
        with pytest.raises(InvalidRequest) as refused:
            await roll_out(one_router, ONE_ROUTER | {"model": ONE_ROUTER["model"] | {"max_model_len": 512}})

        change = "pools.decode.num_blocks: 512 → 300: new decode workers, one after the other"
        assert [step.text for step in preview] == [change]
        assert refused.value.field == "model.max_model_len"
        assert await pids(client) == before

        terms = RolloutTerms(canary_s=0.0, max_slowdown=1.0, grace_s=30.0)
        await roll_out(one_router, with_decode(ONE_ROUTER, num_blocks=300), terms)
        steps = await roll_out(one_router, with_decode(ONE_ROUTER, num_blocks=200), terms)
        (view,) = [each for each in await reporting_workers(client) if each.worker_id == "decode-0"]

        assert steps[0].startswith("pools.decode.num_blocks: 300 → 200: ")
        assert view.status is not None and view.status.load.num_blocks == 200


async def num_completed(folder: Path) -> list[int]:
    """Return how many requests each router of a cluster has completed."""
    info = read_info(folder / "run")
    assert info is not None
    counts = []
    for address in info.addresses:
        async with AsyncClient(address, tls=info.tls) as client:
            counts.append((await client.status()).router.num_completed)
    return counts


async def test_two_clusters_side_by_side_do_not_meet(one_router: Path, two_routers: Path) -> None:
    async with client_of(one_router) as one, client_of(two_routers) as other:
        before = await num_completed(two_routers)
        await generate(one, 0)

        assert await num_completed(two_routers) == before
        assert not set((await pids(one)).values()) & set((await pids(other)).values())


async def test_routers_with_another_policy_lose_no_request_of_clients_that_know_both(two_routers: Path) -> None:
    async with client_of(two_routers) as client:

        async def short_connections(load: Load) -> None:
            while not load.over.is_set():
                async with client_of(two_routers) as fresh:
                    assert await generate(fresh, 0) == load.expected[0]
                await asyncio.sleep(_PAUSE_S)

        async with asyncio.TaskGroup() as tasks, busy_streams(client) as load:
            tasks.create_task(short_connections(load))
            router = TWO_ROUTERS["router"] | {"policy": "least_load"}
            steps = await roll_out(two_routers, TWO_ROUTERS | {"router": router})
        policies = [await policy_of(address) for address in client.addresses]

        assert steps[1:3] == ["replacing router-0", "replacing router-1"]
        assert policies == ["least_load", "least_load"]


async def test_another_block_size_fails_no_request_of_clients_that_know_both_routers(two_routers: Path) -> None:
    other = TWO_ROUTERS | {"pools": {pool: FAKE_POOL | {"block_size": 32} for pool in ("prefill", "decode")}}
    async with client_of(two_routers) as client:
        old_model = await fingerprint_of(client.address)
        async with busy_streams(client) as load:
            steps = await roll_out(two_routers, other)
            num_answers = load.num_answers
            while load.num_answers < num_answers + NUM_STREAMS:
                await load.next_answer()
        workers = await pids(client)
        models = {await fingerprint_of(address) for address in client.addresses}

        assert [step for step in steps if step.startswith("replacing ")] == [
            "replacing router-0",
            "replacing router-1",
        ]
        assert len(models) == 1 and models != {old_model}
        assert set(workers) == {"prefill-1", "decode-1"}
        assert running_config(two_routers).pools.decode.block_size == 32
        await assert_nothing_was_lost(client)
