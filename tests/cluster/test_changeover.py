"""Changeovers to another model over fake processes: order, generations, rollback."""

import pytest

from cluster.processes.diff import generation_of
from cluster.processes.plan import MEMORY_ENV
from common.config import ServingConfig
from common.errors import EngineFault, InvalidRequest
from tests.cluster.rollout_bench import DECODE, PREFILL, ROUTER, Bench, FakeWorkforce
from tests.cluster.support import make_config


def with_length(max_model_len: int, *, decode: int = 2, routers: int = 2) -> ServingConfig:
    return make_config(
        model={"engine": "fake", "max_model_len": max_model_len},
        pools={"decode": {"count": decode}},
        router={"count": routers},
    )


BEFORE, AFTER = with_length(4096), with_length(512)
ALL_OLD = {"prefill-0": None, "decode-0": None, "decode-1": None}


def router_configs(bench: Bench) -> dict[str, ServingConfig | None]:
    return {process.spec.name: process.spec.config for process in bench.workforce.workers(ROUTER)}


async def test_new_workers_come_first_then_each_router_then_the_old_workers_go() -> None:
    bench = Bench(BEFORE)
    await bench.run(AFTER)

    assert bench.workforce.done == [
        *("+prefill-1", "+decode-2", "+decode-3"),
        *("drain router-0", "-router-0", "+router-0", "drain router-1", "-router-1", "+router-1"),
        *("drain prefill-0", "-prefill-0", "drain decode-0", "-decode-0", "drain decode-1", "-decode-1"),
    ]
    assert bench.workforce.configs() == dict.fromkeys(("prefill-1", "decode-2", "decode-3"), AFTER)
    assert router_configs(bench) == {"router-0": AFTER, "router-1": AFTER}
    assert bench.slept_s == 0


async def test_configuration_is_kept_after_the_last_router_and_before_an_old_worker_goes() -> None:
    bench = Bench(BEFORE)
    when: list[str] = []
    bench.while_kept = lambda: when.append(bench.workforce.done[-1])
    await bench.run(AFTER)

    assert (bench.kept, when) == ([AFTER], ["+router-1"])


async def test_later_workers_and_the_pool_sizes_are_those_of_the_new_generation() -> None:
    bench = Bench(BEFORE)
    after = with_length(512, decode=1)
    await bench.run(after)
    assert bench.scaler.sizes() == {PREFILL: 1, DECODE: 1}

    await bench.scaler.scale({DECODE: 2}, grace_s=1.0, report=bench.reports.append)
    assert bench.workforce.configs() == dict.fromkeys(("prefill-1", "decode-2", "decode-0"), after)


async def test_change_back_brings_the_first_generation() -> None:
    bench = Bench(BEFORE)
    await bench.run(AFTER)
    await bench.run(BEFORE)

    generations = {generation_of(process.spec.config or BEFORE) for process in bench.workforce.pool}
    assert generations == {generation_of(BEFORE)}
    assert set(bench.workforce.configs()) == set(ALL_OLD)


async def test_new_worker_that_does_not_start_changes_no_router_and_leaves_nothing() -> None:
    bench = Bench(BEFORE, FakeWorkforce(fails=lambda spec: spec.name == "decode-3"))
    with pytest.raises(EngineFault, match="rolled back, the old configuration serves: cannot start decode-3"):
        await bench.run(AFTER)

    assert not any("router" in step for step in bench.workforce.done)
    assert bench.workforce.configs() == ALL_OLD
    assert (bench.kept, bench.scaler.config) == ([], BEFORE)


async def test_failed_new_router_brings_old_routers_back_before_new_workers_stop() -> None:
    fails = FakeWorkforce(fails=lambda spec: spec.name == "router-1" and spec.config is not None)
    bench = Bench(BEFORE, fails)
    with pytest.raises(EngineFault, match="rolled back, the old configuration serves: cannot start router-1"):
        await bench.run(AFTER)

    assert router_configs(bench) == {"router-0": None, "router-1": None}
    assert bench.workforce.configs() == ALL_OLD
    done = bench.workforce.done
    assert max(done.index(step) for step in ("+router-1", "-router-0")) < done.index("drain prefill-1")
    assert bench.kept == []


async def test_clients_of_an_only_router_would_lose_it_so_it_is_refused_by_key() -> None:
    bench = Bench(with_length(4096, routers=1))
    with pytest.raises(InvalidRequest, match=r"router\.count: 2") as caught:
        await bench.run(with_length(512, routers=1))

    assert caught.value.field == "model.max_model_len"
    assert bench.workforce.done == []


async def test_preview_reports_the_second_set_of_workers() -> None:
    bench = Bench(BEFORE)
    await bench.rollouts.preview(AFTER, report=bench.reports.append)

    assert bench.reports[-1] == "3 new workers beside the 3 that serve: room for both is needed"
    assert bench.workforce.done == []


async def test_second_set_has_the_threads_of_a_set_alone_and_the_memory_of_half_the_host() -> None:
    bench = Bench(BEFORE)
    alone = {spec.name: spec.env for spec in bench.scaler.plan(BEFORE, bench.scaler.sizes())}["decode-0"]
    new = [spec.env for spec in bench.scaler.plan_beside(AFTER)]

    assert {env["OMP_NUM_THREADS"] for env in new} == {alone["OMP_NUM_THREADS"]} == {"4"}
    assert {int(env[MEMORY_ENV]) for env in new} == {int(alone[MEMORY_ENV]) // 2}
