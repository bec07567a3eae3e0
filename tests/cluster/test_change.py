"""Changes of a cluster: their order by pools, their cancellation, and what the command line hears of them."""

import asyncio
import stat
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from cluster import control
from cluster.changes.change import ChangeKind, Changes, ChangeState, ClusterChange
from cluster.changes.scaling import Report
from cluster.control_service import Controls, serving_control
from cluster.processes.plan import POOLS, ProcessRole
from common.errors import Cancelled, EngineFault, InvalidRequest
from tests.clock import ManualClock
from tests.cluster.rollout_bench import DECODE, PREFILL, Bench, FakeWorkforce, pools
from tests.cluster.support import make_config


class Work:
    """The work of a change, which the test ends."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self, report: Report) -> None:
        self.begun.set()
        report("begun")
        await self.may_end.wait()


def begin(changes: Changes, pools: Collection[ProcessRole], work: Any) -> ClusterChange:
    return changes.begin(ChangeKind.SCALE, "decode=2", pools, work)


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [([PREFILL], [DECODE], True), ([DECODE], [DECODE], False), (POOLS, [DECODE], False), ([PREFILL], POOLS, False)],
)
async def test_changes_run_side_by_side_only_where_they_share_no_pool(
    first: Collection[ProcessRole], second: Collection[ProcessRole], *, together: bool
) -> None:
    changes, one, two = Changes(), Work(), Work()
    begin(changes, first, one)
    later = begin(changes, second, two)
    await settle()
    assert (one.begun.is_set(), two.begun.is_set()) == (True, together)

    one.may_end.set()
    await settle()
    assert later.state is ChangeState.RUNNING
    two.may_end.set()
    await later.result()


async def test_changes_of_a_pool_keep_their_order_when_one_between_is_cancelled() -> None:
    changes = Changes()
    works = [Work() for _ in range(3)]
    _, second, third = (begin(changes, [DECODE], work) for work in works)
    await settle()
    changes.cancel(second)
    await settle()
    assert (second.state, third.state) == (ChangeState.CANCELLED, ChangeState.WAITING)

    works[0].may_end.set()
    await settle()
    assert [work.begun.is_set() for work in works] == [True, False, True]
    assert third.steps == ["waits for change 1 (scale decode=2), change 2 (scale decode=2)", "begun"]
    await changes.close()


async def test_change_cancelled_before_its_first_step_never_runs() -> None:
    changes, work = Changes(), Work()
    change = begin(changes, [DECODE], work)
    changes.cancel(change)
    with pytest.raises(Cancelled, match="change 1 was cancelled"):
        await change.result()
    assert not work.begun.is_set()


async def test_second_cancellation_does_not_disturb_the_way_back() -> None:
    changes, may_return = Changes(), asyncio.Event()

    async def work(report: Report) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await may_return.wait()
            report("went back")
            raise

    change = begin(changes, [DECODE], work)
    await settle()
    for _ in range(2):
        changes.cancel(change)
        await settle()
    assert change.state is ChangeState.CANCELLING
    may_return.set()
    with pytest.raises(Cancelled, match="went back"):
        await change.result()


async def test_failure_is_raised_to_the_caller_and_ends_the_wait_of_others() -> None:
    async def fail(report: Report) -> None:
        raise EngineFault("no host")

    changes, work = Changes(), Work()
    change = begin(changes, [DECODE], fail)
    other = begin(changes, [DECODE], work)
    with pytest.raises(EngineFault, match="no host"):
        await change.result()
    await settle()
    assert (change.state, other.state) == (ChangeState.FAILED, ChangeState.RUNNING)
    with pytest.raises(InvalidRequest, match=r"change 1 .* has ended: failed"):
        changes.cancel(change)
    await changes.close()


async def test_closing_cancels_what_runs_and_waits_and_lets_nothing_begin() -> None:
    changes = Changes()
    works = [Work(), Work()]
    begun = [begin(changes, POOLS, work) for work in works]
    await settle()
    await changes.close()

    assert [change.state for change in begun] == [ChangeState.CANCELLED] * 2
    with pytest.raises(Cancelled, match="being stopped"):
        begin(changes, POOLS, Work())


async def test_duration_of_a_change_ends_with_it() -> None:
    clock = ManualClock()
    changes, work = Changes(clock=clock), Work()
    change = begin(changes, [DECODE], work)
    clock.advance(3.0)
    work.may_end.set()
    await change.result()
    clock.advance(5.0)
    assert changes.took_s(change) == 3.0


# A scale that is cancelled.


async def cancelled_scale(bench: Bench, wanted: dict[ProcessRole, int], *, at: str) -> None:
    bench.workforce.blocked.add(at)
    scaling = asyncio.ensure_future(bench.scaler.scale(wanted, grace_s=1.0, report=bench.reports.append))
    async with asyncio.timeout(60):
        await bench.workforce.begun.wait()
    await settle()
    scaling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scaling


async def test_cancelled_growth_keeps_the_workers_that_serve_and_says_how_many() -> None:
    bench = Bench(pools())
    await cancelled_scale(bench, {DECODE: 5}, at="+decode-3")

    assert set(bench.workforce.configs()) == {"prefill-0", "decode-0", "decode-1", "decode-2", "decode-4"}
    assert bench.reports[-1] == "stays at decode=4"
    await bench.scaler.scale({DECODE: 4}, grace_s=1.0, report=bench.reports.append)
    assert bench.scaler.sizes() == {PREFILL: 1, DECODE: 4}


async def test_cancelled_drain_gives_the_worker_requests_again() -> None:
    bench = Bench(pools(decode=3))
    await cancelled_scale(bench, {DECODE: 1}, at="drain decode-2")

    assert bench.workforce.done[-1] == "keep decode-2"
    assert set(bench.workforce.configs()) == {"prefill-0", "decode-0", "decode-2"}, "decode-1 had left already"


async def test_cancelled_flip_leaves_the_worker_in_its_pool() -> None:
    bench = Bench(pools(prefill=2))
    await cancelled_scale(bench, {PREFILL: 1, DECODE: 3}, at="drain prefill-1")

    assert bench.workforce.done == ["drain prefill-1", "keep prefill-1"]
    assert bench.scaler.sizes() == {PREFILL: 2, DECODE: 2}


async def test_pools_that_grow_at_the_same_time_reach_both_sizes() -> None:
    bench = Bench(pools())
    sizes: list[dict[ProcessRole, int]] = [{DECODE: 4}, {PREFILL: 3}]
    await asyncio.gather(*(bench.scaler.scale(each, grace_s=1.0, report=bench.reports.append) for each in sizes))

    assert bench.scaler.sizes() == {PREFILL: 3, DECODE: 4}


# The command line.


@asynccontextmanager
async def controlled(
    run_dir: Path, workforce: FakeWorkforce, *, stop: Callable[[], None] = lambda: None
) -> AsyncIterator[Changes]:
    """Serve the control socket of fake processes."""
    changes, unused = Changes(), cast("Any", None)
    bench = Bench(make_config(), workforce)
    controls = Controls(scaler=bench.scaler, rollouts=bench.rollouts, planning=unused, changes=changes, stop=stop)
    async with serving_control(controls, run_dir):
        yield changes
        await changes.close()


def scale(run_dir: Path, **wanted: int) -> list[control.ChangeStep]:
    return list(control.scale(run_dir, wanted, grace_s=1.0, force=True))


async def test_growth_without_a_host_is_cancelled_and_holds_up_no_other_pool(tmp_path: Path) -> None:
    async with asyncio.timeout(60), controlled(tmp_path, FakeWorkforce(blocked={"+decode-1"})) as changes:
        growth = asyncio.ensure_future(asyncio.to_thread(scale, tmp_path, decode=2))
        await changes_begun(changes, 1)
        (other, *_) = await asyncio.to_thread(scale, tmp_path, prefill=2)
        behind = asyncio.ensure_future(asyncio.to_thread(scale, tmp_path, decode=3))
        await changes_begun(changes, 3)
        await settle()
        listed = (await asyncio.to_thread(control.read_changes, tmp_path)).changes

        steps = [step.text for step in await asyncio.to_thread(lambda: list(control.cancel(tmp_path, 1)))]
        with pytest.raises(Cancelled, match="change 1 was cancelled: stays at decode=1"):
            await growth

        assert other.change_id == 2
        assert [(each.id, each.state, list(each.waits_for)) for each in listed] == [
            (3, "waiting", [1]),
            (2, "done", []),
            (1, "running", []),
        ]
        assert (listed[2].kind, listed[2].description, listed[2].latest_step) == (
            "scale",
            "decode=2",
            "starting decode-1",
        )
        assert steps == ["stays at decode=1", "change 1 (scale decode=2) is cancelled"]
        await asyncio.to_thread(lambda: list(control.cancel(tmp_path, 3)))
        with pytest.raises(Cancelled):
            await behind


async def changes_begun(changes: Changes, count: int) -> None:
    while len(changes.newest_first()) < count:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)


async def test_caller_that_leaves_does_not_end_its_change(tmp_path: Path) -> None:
    async with asyncio.timeout(60), controlled(tmp_path, FakeWorkforce(blocked={"+decode-1"})) as changes:

        def leave_after_the_first_step() -> None:
            steps = iter(control.scale(tmp_path, {"decode": 2}, grace_s=1.0, force=True))
            next(steps)
            cast("Any", steps).close()

        await asyncio.to_thread(leave_after_the_first_step)
        assert changes[1].state is ChangeState.RUNNING


@pytest.mark.parametrize(("number", "reason"), [(7, "there is no change 7"), (1, "has ended: done")])
async def test_change_that_cannot_be_cancelled_says_why(tmp_path: Path, number: int, reason: str) -> None:
    async with asyncio.timeout(60), controlled(tmp_path, FakeWorkforce()):
        await asyncio.to_thread(scale, tmp_path, decode=2)
        with pytest.raises(InvalidRequest, match=reason) as caught:
            await asyncio.to_thread(lambda: list(control.cancel(tmp_path, number)))
        assert caught.value.field == "id"


async def test_sizes_that_cannot_be_are_refused_at_once_and_are_no_change(tmp_path: Path) -> None:
    async with asyncio.timeout(60), controlled(tmp_path, FakeWorkforce()) as changes:
        with pytest.raises(InvalidRequest, match="at least one worker must decode"):
            await asyncio.to_thread(scale, tmp_path, decode=0)
        assert changes.newest_first() == []


async def test_supervisor_that_does_not_serve_yet_is_named_as_the_reason(tmp_path: Path) -> None:
    with pytest.raises(control.SupervisorAway):
        await asyncio.to_thread(control.read_changes, tmp_path)


@pytest.mark.parametrize(
    "name", ["short", pytest.param("scratch/" * 30, id="longer than a socket's path"), "with space, % 41 # and ü?"]
)
async def test_cluster_is_controlled_in_any_run_folder(tmp_path: Path, name: str) -> None:
    run_dir, stopping = tmp_path / name, asyncio.Event()
    run_dir.mkdir(parents=True)
    async with controlled(run_dir, FakeWorkforce(), stop=stopping.set):
        assert stat.S_IMODE(control.socket_path(run_dir).stat().st_mode) == 0o600
        assert not (await asyncio.to_thread(control.read_changes, run_dir)).changes
        await asyncio.to_thread(control.stop, run_dir)
    assert stopping.is_set()
    assert not control.socket_path(run_dir).exists()


def test_supervisor_of_a_deleted_run_folder_is_away(tmp_path: Path) -> None:
    with pytest.raises(control.SupervisorAway, match="is gone"):
        control.stop(tmp_path / "deleted")
