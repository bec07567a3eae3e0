"""Rollouts and restarts over fake processes: order, capacity, canaries, rollback, requests of the command line."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.changes.change import Changes
from cluster.changes.rollout import RolloutTerms
from cluster.changes.scaling import Report
from cluster.control import rollout
from cluster.control_service import Controls, serving_control
from cluster.processes.plan import with_sizes
from cluster.processes.state import ClusterPhase
from common.config import ServingConfig
from common.errors import EngineFault, InvalidRequest
from tests.cluster.rollout_bench import DECODE, PREFILL, ROUTER, TERMS, Bench, FakeWorkforce, pools, snapshot
from tests.cluster.support import make_config


async def test_canary_serves_first_and_capacity_never_falls_below_the_old_size() -> None:
    bench = Bench(pools())
    after = pools(max_running=8)
    await bench.run(after)

    assert bench.workforce.done == [
        *("+decode-2", "drain decode-0", "-decode-0", "+decode-0", "drain decode-1", "-decode-1", "+decode-1"),
        *("drain decode-2", "-decode-2"),
    ]
    assert min(sizes[DECODE] for sizes in bench.workforce.sizes) == 2
    assert bench.slept_s == TERMS.canary_s
    assert bench.workforce.configs() == {"prefill-0": None, "decode-0": after, "decode-1": after}
    assert bench.kept == [after]
    assert any(line.startswith("canary good: decode-2 served") for line in bench.reports)


async def test_workers_that_come_later_serve_by_the_new_configuration() -> None:
    bench = Bench(pools())
    after = pools(max_running=8)
    await bench.run(after)
    await bench.scaler.scale({DECODE: 3, PREFILL: 2}, grace_s=1.0, report=bench.reports.append)

    assert bench.workforce.configs()["decode-2"] == bench.workforce.configs()["prefill-1"] == after


async def test_change_of_both_pools_has_a_canary_in_each() -> None:
    bench = Bench(pools(decode=1))
    await bench.run(make_config(transfer={"lease_ttl_s": 5.0}))

    assert bench.workforce.done[:2] == ["+prefill-1", "+decode-1"]
    assert bench.slept_s == TERMS.canary_s
    assert set(bench.workforce.configs()) == {"prefill-0", "decode-0"}


async def test_slow_canary_is_rolled_back_before_another_worker_changes() -> None:
    bench = Bench(pools(), snapshots={"decode-2": snapshot(step_s=0.1)})
    with pytest.raises(EngineFault, match=r"rolled back.*decode-2 served: a gap between tokens is 100\.0 ms"):
        await bench.run(pools(max_running=8))

    assert bench.workforce.done == ["+decode-2", "drain decode-2", "-decode-2"]
    assert bench.workforce.configs() == {"prefill-0": None, "decode-0": None, "decode-1": None}
    assert bench.kept == []
    assert bench.scaler.config == bench.before


async def test_canary_that_dies_is_rolled_back_at_once() -> None:
    bench = Bench(pools())

    def die() -> None:
        bench.workforce.named("decode-2").address = None

    bench.while_asleep = die
    with pytest.raises(EngineFault, match="decode-2 died 1 times"):
        await bench.run(pools(max_running=8), RolloutTerms(canary_s=1000.0, max_slowdown=1.5, grace_s=9.0))

    assert bench.slept_s < 2.0
    assert set(bench.workforce.configs()) == {"prefill-0", "decode-0", "decode-1"}


async def test_canary_that_does_not_start_changes_nothing() -> None:
    bench = Bench(make_config(), FakeWorkforce(fails=lambda spec: spec.name == "decode-1"))
    with pytest.raises(EngineFault, match="rolled back, the old configuration serves: cannot start decode-1"):
        await bench.run(make_config(transfer={"lease_ttl_s": 5.0}))

    assert bench.workforce.configs() == {"prefill-0": None, "decode-0": None}
    assert bench.kept == []


async def test_later_worker_that_does_not_start_brings_back_those_that_were_replaced() -> None:
    bench = Bench(pools(), FakeWorkforce(fails=lambda spec: spec.name == "decode-1" and spec.config is not None))
    with pytest.raises(EngineFault, match="rolled back, the old configuration serves: cannot start decode-1"):
        await bench.run(pools(max_running=8))

    assert bench.workforce.configs() == {"prefill-0": None, "decode-0": None, "decode-1": None}
    assert min(sizes[DECODE] for sizes in bench.workforce.sizes) == 2
    assert bench.kept == []


async def test_rollout_without_canary_time_neither_waits_nor_judges() -> None:
    bench = Bench(pools(), snapshots={"decode-2": snapshot(step_s=0.1)})
    await bench.run(pools(max_running=8), RolloutTerms(canary_s=0.0, max_slowdown=1.5, grace_s=9.0))

    assert bench.slept_s == 0
    assert len(bench.kept) == 1


async def test_counts_of_the_file_are_reached_after_the_workers_are_new() -> None:
    bench = Bench(pools())
    await bench.run(pools(prefill=2, decode=1, max_running=8))

    assert bench.workforce.done[-2:] == ["drain decode-1", "decode-1 to prefill"]
    assert set(bench.workforce.configs()) == {"prefill-0", "decode-0", "decode-1"}


async def test_counts_alone_need_no_new_worker_of_those_that_stay() -> None:
    bench = Bench(pools())
    await bench.run(pools(decode=3))

    assert bench.workforce.done == ["+decode-2"]


async def test_sizes_are_compared_with_the_pools_as_they_are() -> None:
    bench = Bench(pools())
    await bench.scaler.scale({DECODE: 3}, grace_s=1.0, report=bench.reports.append)
    await bench.rollouts.preview(pools(decode=1), report=bench.reports.append)

    assert bench.reports[-1].startswith("pools.decode.count: 3 → 1: ")


def with_length(max_model_len: int) -> ServingConfig:
    """Return a configuration of two routers; another length needs a second set of workers."""
    model, counts = (
        {"engine": "fake", "max_model_len": max_model_len},
        {"prefill": {"count": 1}, "decode": {"count": 2}},
    )
    return make_config(model=model, router={"count": 2}, pools=counts)


@pytest.mark.parametrize(
    ("before", "file"),
    [(pools(), pools()), (pools(), pools(max_running=8)), (with_length(4096), with_length(512))],
    ids=["unedited", "workers", "generation"],
)
async def test_rollout_keeps_a_scale_until_the_count_itself_is_edited(
    before: ServingConfig, file: ServingConfig
) -> None:
    bench = Bench(before)
    await bench.scaler.scale({DECODE: 3}, grace_s=1.0, report=bench.reports.append)
    for _ in range(2):
        bench.reports.clear()
        await bench.run(file, replace(TERMS, canary_s=0.0))
        assert bench.scaler.sizes()[DECODE] == 3
        assert bench.reports[0].startswith("decode stays at 3: it was scaled, and the file still says 2; ")
        assert bench.kept[-1] == file
    await bench.run(with_sizes(file, {DECODE: 1}), replace(TERMS, canary_s=0.0))
    assert bench.scaler.sizes()[DECODE] == 1


async def test_routers_are_replaced_one_by_one_behind_the_canaries_and_before_the_workers() -> None:
    bench = Bench(make_config(router={"count": 2}))
    after = make_config(router={"count": 2, "policy": "least_load"}, pools={"decode": {"max_running": 8}})
    await bench.run(after)

    assert bench.workforce.done[:5] == ["+decode-1", "-router-0", "+router-0", "-router-1", "+router-1"]
    assert [each.spec.config for each in bench.workforce.workers(ROUTER)] == [after, after]
    assert bench.workforce.configs() == {"prefill-0": None, "decode-0": after}


async def test_change_of_routers_alone_touches_no_worker() -> None:
    bench = Bench(make_config(router={"count": 2}))
    await bench.run(make_config(router={"count": 2}, slo={"ttft_s": 1.0}))

    assert bench.workforce.done == ["-router-0", "+router-0", "-router-1", "+router-1"]
    assert bench.slept_s == 0


async def test_router_that_does_not_start_brings_the_old_ones_back() -> None:
    bench = Bench(
        make_config(router={"count": 2}),
        FakeWorkforce(fails=lambda spec: spec.name == "router-1" and spec.config is not None),
    )
    with pytest.raises(EngineFault, match="rolled back, the old configuration serves: cannot start router-1"):
        await bench.run(make_config(router={"count": 2}, slo={"ttft_s": 1.0}))

    assert {each.spec.name: each.spec.config for each in bench.workforce.workers(ROUTER)} == {
        "router-0": None,
        "router-1": None,
    }
    assert bench.kept == []


async def test_only_router_cannot_be_replaced() -> None:
    bench = Bench(make_config())
    with pytest.raises(InvalidRequest, match=r"router\.count: 2") as caught:
        await bench.run(make_config(router={"policy": "least_load"}))

    assert caught.value.field == "router.policy"
    assert bench.workforce.done == []


async def test_impossible_change_is_refused_by_key_and_changes_nothing() -> None:
    bench = Bench(pools())
    with pytest.raises(InvalidRequest, match=r"router\.host") as caught:
        await bench.run(make_config(router={"host": "0.0.0.0"}, pools={"decode": {"count": 2, "max_running": 8}}))

    assert caught.value.field == "router.host"
    assert (bench.workforce.done, bench.kept) == ([], [])


async def test_preview_reports_and_changes_nothing() -> None:
    bench = Bench(pools())
    await bench.rollouts.preview(pools(max_running=8), report=bench.reports.append)

    assert bench.reports == ["pools.decode.max_running: 64 → 8: new decode workers, one after the other"]
    assert (bench.workforce.done, bench.kept) == ([], [])


async def test_sizes_below_the_load_are_refused_before_anything_changes_unless_forced() -> None:
    bench = Bench(pools(), least_decode=2)
    fewer = pools(decode=1, max_running=8)
    with pytest.raises(InvalidRequest, match="the load needs more"):
        await bench.run(fewer)
    assert (bench.workforce.done, bench.kept) == ([], [])

    await bench.run(fewer, replace(TERMS, is_forced=True))
    assert bench.kept == [fewer]


async def test_restart_replaces_every_worker_beside_one_more_and_keeps_the_configuration() -> None:
    bench = Bench(pools(decode=1))
    await bench.rollouts.restart(grace_s=9.0, report=bench.reports.append)

    assert bench.workforce.done == [
        *("+prefill-1", "+decode-1"),
        *("drain prefill-0", "-prefill-0", "+prefill-0", "drain decode-0", "-decode-0", "+decode-0"),
        *("drain prefill-1", "-prefill-1", "drain decode-1", "-decode-1"),
    ]
    assert bench.workforce.configs() == {"prefill-0": None, "decode-0": None}
    assert bench.kept == []


async def cancelled(bench: Bench, work: Coroutine[Any, Any, None], *, at: str) -> None:
    """Cancel a change when it has come to a step that does not end, and wait for what it does then."""
    bench.workforce.blocked.add(at)
    running = asyncio.ensure_future(work)
    async with asyncio.timeout(60):
        await bench.workforce.begun.wait()
    bench.workforce.blocked.clear()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("at", ["+decode-2", "drain decode-0", "+decode-0", "drain decode-1", "+decode-1"])
async def test_cancelled_rollout_brings_every_old_worker_back(at: str) -> None:
    bench = Bench(pools())
    await cancelled(bench, bench.run(pools(max_running=8)), at=at)

    assert bench.workforce.configs() == {"prefill-0": None, "decode-0": None, "decode-1": None}
    assert (bench.kept, bench.scaler.config) == ([], bench.before)
    assert min((sizes[DECODE] for sizes in bench.workforce.sizes), default=2) >= 2
    assert bench.reports[-1] == "the old configuration serves"


async def test_rollout_cancelled_after_the_last_worker_keeps_the_new_configuration() -> None:
    bench = Bench(pools())
    after = pools(prefill=2, max_running=8)
    await cancelled(bench, bench.run(after), at="+prefill-1")

    assert bench.workforce.configs() == {"prefill-0": None, "decode-0": after, "decode-1": after}
    assert bench.kept == [after]
    assert bench.reports[-1] == "stays at prefill=1 decode=2"


async def test_rollout_cancelled_because_the_cluster_stops_starts_nothing_again() -> None:
    bench = Bench(pools())
    bench.workforce.blocked.add("+decode-0")
    running = asyncio.ensure_future(bench.run(pools(max_running=8)))
    await bench.workforce.begun.wait()
    bench.workforce.phase = ClusterPhase.STOPPING
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert bench.workforce.done[-1] == "-decode-0"


class RecordingRollouts:
    """Records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[ServingConfig, RolloutTerms]] = []

    async def run(self, config: ServingConfig, terms: RolloutTerms, report: Report) -> None:
        self.asked.append((config, terms))
        report("begun")
        raise EngineFault("the canary is bad")


@pytest.mark.parametrize("is_forced", [True, False])
async def test_rollout_receives_every_term_and_returns_steps_and_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_forced: bool
) -> None:
    rollouts = RecordingRollouts()
    terms = RolloutTerms(canary_s=3.0, max_slowdown=2.0, grace_s=7.0, is_forced=is_forced)
    unused, config = cast("Any", None), make_config(router={"port": 1})
    controls = Controls(
        scaler=unused, rollouts=cast("Any", rollouts), planning=unused, changes=Changes(), stop=lambda: None
    )

    async with serving_control(controls, tmp_path):
        with pytest.raises(EngineFault, match="the canary is bad"):
            await asyncio.to_thread(lambda: list(rollout(tmp_path, config, terms)))

    assert rollouts.asked == [(config, terms)]
    assert "change failed: the canary is bad" in caplog.text  # in case the caller has disconnected
