"""Flips of workers between the pools, and workers that cannot flip."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cluster.changes.flipping import flip_obstacle, flip_workers
from common.errors import EngineFault, Overloaded
from tests.clock import ManualClock
from tests.cluster.rollout_bench import DECODE, PREFILL, FakeWorkforce, process
from tests.cluster.support import make_config, make_spec


def force_of(*, prefill: int, decode: int) -> FakeWorkforce:
    pools = ((PREFILL, prefill), (DECODE, decode))
    return FakeWorkforce([process(make_spec(f"{role}-{i}", role)) for role, count in pools for i in range(count)])


def shape(force: FakeWorkforce) -> dict[str, list[str]]:
    return {str(role): [worker.spec.name for worker in force.workers(role)] for role in (PREFILL, DECODE)}


async def flip(force: FakeWorkforce, *, prefill: int, decode: int, pools: Mapping[str, Any] | None = None) -> list[str]:
    steps: list[str] = []
    first, latest = make_config(), make_config(pools=pools or {})
    await flip_workers(
        force,
        {PREFILL: prefill, DECODE: decode},
        obstacle=partial(flip_obstacle, first=first, latest=latest),
        grace_s=1,
        report=steps.append,
    )
    return steps


async def test_last_worker_of_the_shrinking_pool_drains_and_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.changes.flipping.time", ManualClock())
    force = force_of(prefill=2, decode=2)

    steps = await flip(force, prefill=1, decode=3)

    assert force.done == ["drain prefill-1", "prefill-1 to decode"]
    assert shape(force) == {"prefill": ["prefill-0"], "decode": ["decode-0", "decode-1", "prefill-1"]}
    assert steps == ["flipping prefill-1 to decode", "prefill-1 serves decode after 0.00 s"]


async def test_flipped_worker_returns_to_its_pool_first() -> None:
    force = force_of(prefill=2, decode=2)

    await flip(force, prefill=1, decode=3)
    await flip(force, prefill=2, decode=2)

    assert shape(force) == {"prefill": ["prefill-0", "prefill-1"], "decode": ["decode-0", "decode-1"]}


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ((1, 3), (3, 1), (3, 1)),
        ((2, 2), (1, 2), (2, 2)),
        ((2, 2), (2, 4), (2, 2)),
        ((2, 2), (1, 5), (1, 3)),
        ((4, 1), (1, 2), (3, 2)),
        ((2, 1), (0, 3), (1, 2)),
        ((1, 1), (0, 2), (1, 1)),
        ((0, 2), (1, 1), (1, 1)),
    ],
)
async def test_surplus_workers_flip_up_to_the_deficit_but_never_the_last(
    before: tuple[int, int], wanted: tuple[int, int], after: tuple[int, int]
) -> None:
    force = force_of(prefill=before[0], decode=before[1])

    await flip(force, prefill=wanted[0], decode=wanted[1])

    assert (len(force.workers(PREFILL)), len(force.workers(DECODE))) == after


async def test_worker_that_is_not_empty_in_time_stays_and_the_others_flip() -> None:
    force = force_of(prefill=3, decode=1)
    force.failures["prefill-2"] = Overloaded("still has 3 calls")

    steps = await flip(force, prefill=1, decode=3)

    assert shape(force) == {"prefill": ["prefill-0", "prefill-2"], "decode": ["decode-0", "prefill-1"]}
    assert "prefill-2 stays in prefill with 3 requests that had not moved: still has 3 calls" in steps


async def test_worker_that_the_routers_do_not_use_afterwards_is_an_error() -> None:
    force = force_of(prefill=2, decode=1)
    force.failures["prefill-1"] = EngineFault("the routers do not use it")

    with pytest.raises(EngineFault, match="do not use it"):
        await flip(force, prefill=1, decode=2)


@pytest.mark.parametrize("key", ["num_gpus", "num_cpus", "threads"])
async def test_pools_of_different_workers_keep_theirs_and_the_reason_names_the_key(key: str) -> None:
    force = force_of(prefill=2, decode=2)

    steps = await flip(force, prefill=1, decode=3, pools={"prefill": {key: 2}, "decode": {key: 4}})

    assert force.done == []
    assert len(steps) == 1
    assert f"pools.prefill.{key} is 2" in steps[0]


async def test_worker_that_was_started_before_the_other_pool_changed_keeps_its_own() -> None:
    force = force_of(prefill=3, decode=1)
    changed = {"decode": {"max_running": 8, "count": 7}}
    force.pool[2].spec = replace(force.pool[2].spec, config=make_config(pools=changed))

    steps = await flip(force, prefill=1, decode=3, pools=changed)

    assert shape(force) == {"prefill": ["prefill-0", "prefill-1"], "decode": ["decode-0", "prefill-2"]}
    assert steps[0] == "not every worker can change its pool: prefill-1 was started with another pools.decode"
