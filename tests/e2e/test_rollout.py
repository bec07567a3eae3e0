"""`kvrelay rollout` on a real cluster under load: another configuration, a canary that is bad, nothing that fails."""

import asyncio
from collections.abc import Iterator
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
from tests.e2e.streams import repeated_streams

pytestmark = pytest.mark.e2e

LOAD: dict[str, Any] = {"num_tokens": 10, "pause_s": 0.3}
"""Streams again and again, with pauses: without them the load alone would fill the cores."""
# Loose: what other tests do to the machine meanwhile must not look like a slow canary.
TERMS = RolloutTerms(canary_s=2.0, max_slowdown=20.0, grace_s=30.0)
# Strict, and with time to measure: a busy machine slows the old workers down, too.
STRICT_TERMS = RolloutTerms(canary_s=5.0, max_slowdown=2.0, grace_s=30.0)

CONFIG = fake_config(step_ms=15.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of a cluster that the tests use, in their order."""
    folder = tmp_path_factory.mktemp("rollout")
    with standing_cluster(folder, CONFIG):
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


async def assert_nothing_was_lost(client: AsyncClient) -> None:
    status = (await client.status()).router
    assert status.num_failed == status.num_replans == 0


async def test_canary_ten_times_as_slow_is_rolled_back_under_streams(folder: Path) -> None:
    async with client_of(folder) as client:
        before = await pids(client)
        async with repeated_streams(client, **LOAD):
            with pytest.raises(EngineFault, match="rolled back, the old configuration serves: the canary is bad"):
                slow = CONFIG | {"model": CONFIG["model"] | {"fake_step_ms": 150.0}}
                await roll_out(folder, slow, STRICT_TERMS)

        assert await pids(client) == before
        assert running_config(folder).model.fake_step_ms == 15.0
        await assert_nothing_was_lost(client)


async def test_preview_and_refusals_change_nothing_and_a_second_rollout_goes_on(folder: Path) -> None:
    async with client_of(folder) as client:
        before = await pids(client)
        wanted = ServingConfig.model_validate(with_decode(CONFIG, num_blocks=300))
        preview = await asyncio.to_thread(lambda: list(preview_rollout(folder / "run", wanted)))
        with pytest.raises(InvalidRequest) as refused:
            await roll_out(folder, CONFIG | {"model": CONFIG["model"] | {"max_model_len": 512}})

        change = "pools.decode.num_blocks: 512 → 300: new decode workers, one after the other"
        assert [step.text for step in preview] == [change]
        assert refused.value.field == "model.max_model_len"
        assert await pids(client) == before

        terms = RolloutTerms(canary_s=0.0, max_slowdown=1.0, grace_s=30.0)
        await roll_out(folder, with_decode(CONFIG, num_blocks=300), terms)
        steps = await roll_out(folder, with_decode(CONFIG, num_blocks=200), terms)
        (view,) = [each for each in await reporting_workers(client) if each.worker_id == "decode-0"]

        assert steps[0].startswith("pools.decode.num_blocks: 300 → 200: ")
        assert view.status is not None and view.status.load.num_blocks == 200
