"""The search of the line: which waiting requests it tries, and when, with a chooser that only counts pages."""

import asyncio
import math

import pytest

from common.errors import EngineFault
from router.line.plan_finder import JUDGE_AGAIN_S
from router.line.pool_line import MAX_CANDIDATES, MAX_OVERTAKEN, MAX_PASSED
from router.placement.answer_pool import AnswerPool
from router.placement.waits import WaitCause
from router.tenants import Tenant
from tests.router.line import PATIENCE_S, REST_S, A, B, Line, turns


async def test_large_request_without_a_plan_lets_small_ones_pass_but_not_for_ever() -> None:
    line = Line(num_pages=4)
    await line.come("running", 1)
    await line.come("large", 4, B)
    num_passed = 0
    while True:
        line.clock.advance(0.1)
        await line.come("small", 1)
        if "small" not in line.served:
            break
        await line.end("small")
        num_passed += 1
    # The first of them has the same claim as the large one: it does not overtake.
    assert num_passed == MAX_OVERTAKEN + 1
    await line.end("running")
    assert line.served == {"large"}
    await line.end("large")
    assert line.served == {"small"}


@pytest.mark.parametrize(
    ("waited_s", "objective_s", "answer_s", "served"),
    [
        (5.0, 30.0, 0.0, "short"),
        (5.0, 30.0, 9.0, "long"),  # its equal came later
        (0.0, 30.0, 0.0, "long"),  # nothing has waited for answers so far
        (5.0, math.inf, 0.0, "long"),
    ],
)
async def test_short_answer_goes_first_after_a_wait_for_answers(
    waited_s: float, objective_s: float, answer_s: float, served: str
) -> None:
    line = Line(num_pages=2)
    line.chooser.answers_s = {"long": 9.0, "short": answer_s}
    await line.come("running", 2)
    if waited_s:
        await line.come("first", 3)  # it waits for room
        line.clock.advance(waited_s)
    for name in ("long", "short"):
        await line.come(name, 2, ttft_slo_s=objective_s)
    await line.end("running")
    assert line.served == {served}


async def test_request_that_its_worker_has_refused_never_holds_up_those_behind_it() -> None:
    line = Line(num_pages=4)
    line.chooser.unwanted.add("refused")
    await line.come("refused", 1, B)
    for _ in range(2 * MAX_OVERTAKEN):
        await line.come("small", 1)
        assert "small" in line.served, "a request that its worker cannot take would starve all others"
        await line.end("small")


async def test_request_for_which_the_policy_raises_fails_alone() -> None:
    line = Line(num_pages=2)
    await line.come("running", 2)
    for name in ("before", "defective", "behind"):
        await line.come(name, 1)
    line.chooser.defective.add("defective")
    await line.end("running")
    with pytest.raises(EngineFault, match="cannot choose workers: ZeroDivisionError: division by zero"):
        await line.waiting.pop("defective")
    assert line.served == {"before", "behind"}
    await line.end("before")
    await line.come("later", 1)
    assert line.served == {"behind", "later"}


@pytest.mark.parametrize(
    ("lack", "cause"),
    [("is_closed", WaitCause.DECODE_PACE), ("is_saturated", WaitCause.DECODE_ROOM), ("is_empty", WaitCause.WORKER)],
)
async def test_plan_says_what_its_request_waited_for_and_how_long(lack: str, cause: WaitCause) -> None:
    line = Line(num_pages=MAX_CANDIDATES + 2, gap_s=0.0)
    await line.come("at once", 1)
    assert line.waits("at once") == {}
    setattr(line.chooser, lack, True)
    for number in range(MAX_CANDIDATES + 1):  # one more than the line asks about
        await line.come(f"a{number}", 1)
    line.clock.advance(5.0)
    setattr(line.chooser, lack, False)
    line.chooser.change()
    await turns()
    for number in range(MAX_CANDIDATES + 1):
        assert line.waits(f"a{number}") == {cause: pytest.approx(5.0)}, "the diagnosis would blame prefill"


async def test_request_waits_for_its_tenants_limit_while_that_holds_it_then_for_workers() -> None:
    line = Line(num_pages=1, gap_s=0.0)
    capped = Tenant(name="capped", max_concurrent=1)
    await line.come("first", 1, capped)
    await line.come("other", 1, B)
    await line.come("second", 1, capped)
    line.clock.advance(3.0)
    line.chooser.is_saturated = True
    await line.end("first")
    line.clock.advance(2.0)
    line.chooser.is_saturated = False
    line.chooser.num_free = 2
    line.chooser.change()
    await turns()
    assert line.waits("other") == {WaitCause.DECODE_ROOM: pytest.approx(5.0)}
    assert line.waits("second") == {
        WaitCause.TENANT_LIMIT: pytest.approx(3.0),
        WaitCause.DECODE_ROOM: pytest.approx(2.0),
    }


async def test_embedding_that_finds_no_pages_waits_for_prefill_not_for_a_decode_worker() -> None:
    line = Line(num_pages=0, gap_s=0.0)
    await line.come("embedding", 1, pool=AnswerPool.PREFILL)
    line.clock.advance(5.0)
    line.chooser.num_free = 1
    line.chooser.change()
    await turns()
    assert line.waits("embedding") == {WaitCause.PREFILL: pytest.approx(5.0)}


async def test_requests_that_need_room_are_asked_about_again_when_some_may_be_there() -> None:
    line = Line(num_pages=0)
    for number in range(MAX_CANDIDATES + 2):
        await line.come(f"a{number}", 2)
    line.clock.advance(JUDGE_AGAIN_S)
    line.chooser.change()
    line.chooser.asked.clear()
    line.chooser.num_free = 1
    line.chooser.change()
    assert line.chooser.asked == []
    line.chooser.num_free = 2
    line.chooser.change()
    await turns()
    assert line.served == {"a0"}
    # The one behind the candidates becomes one, and was never asked about.
    assert line.chooser.asked == ["a0", f"a{MAX_CANDIDATES}"]


async def test_line_that_searched_in_vain_rests_and_then_sees_all_that_has_changed() -> None:
    line = Line(num_pages=0)
    await line.come("x", 1)
    line.chooser.asked.clear()
    for num_free in (0, 0, 1):
        line.chooser.num_free = num_free
        line.fleet.set_workers([])
    assert line.chooser.asked == []
    line.clock.advance(REST_S)
    await line.waiting["x"]  # though nothing changes any more
    assert line.chooser.asked == ["x"]


async def test_line_wakes_after_its_rest_though_it_meant_to_wake_later() -> None:
    line = Line(num_pages=0)
    line.chooser.unwanted.add("x")
    await line.come("x", 1)
    await line.come("y", 1)
    line.chooser.num_free = 1
    line.fleet.set_workers([])
    line.clock.advance(REST_S)
    await asyncio.wait_for(line.waiting["y"], PATIENCE_S / 2)


async def test_request_that_fits_is_served_behind_one_that_does_not_once_slots_are_free() -> None:
    line = Line(num_pages=2)
    line.chooser.is_saturated = True
    await line.come("large", 5, priority=1)
    await line.come("small", 2)
    line.chooser.is_saturated = False
    line.chooser.change()
    await turns()
    assert line.served == {"small"}


async def test_embedding_is_served_at_once_while_the_line_rests_from_generations() -> None:
    line = Line(num_pages=1)
    await line.come("large", 2)
    await line.come("embedding", 1, after_s=0.0, pool=AnswerPool.PREFILL)
    assert line.served == {"embedding"}


async def test_sample_that_waits_beside_another_of_its_request_gets_a_plan_of_its_own() -> None:
    line = Line(num_pages=0)
    line.tickets["first"] = line.tickets["second"] = line.admit()
    for name in ("first", "second"):
        await line.place(name, 1)
    for name in ("first", "second"):
        line.chooser.num_free = 1
        line.chooser.change()
        await turns()
        assert name in line.served


async def test_line_is_not_searched_while_no_worker_takes_anybody() -> None:
    line = Line(num_pages=0)
    line.chooser.is_saturated = True
    for name in ("a", "b", "c"):
        await line.come(name, 1, B if name == "c" else A)
    line.clock.advance(JUDGE_AGAIN_S)
    line.chooser.change()
    assert line.chooser.asked == ["a", "a"]


async def test_request_is_tried_at_every_change_of_a_worker_that_has_refused_it() -> None:
    line = Line()
    line.chooser.unwanted.add("x")
    await line.come("x", 1)
    line.chooser.asked.clear()
    line.chooser.change()
    assert line.chooser.asked == ["x"]


async def test_waiting_request_of_a_tenant_at_its_cap_is_tried_as_soon_as_another_ends() -> None:
    line = Line(num_pages=2)
    capped = Tenant(name="capped", max_concurrent=1)
    await line.come("x", 1, capped)
    await line.come("y", 1, capped)
    await line.come("large", 3)
    await line.end("x")  # its pages come free first, which are too few for the large one, and its place after that
    assert line.served == {"y"}


async def test_small_request_is_served_when_one_of_the_large_before_it_leaves() -> None:
    line = Line(num_pages=1)
    names = [f"large {number}" for number in range(MAX_CANDIDATES)]
    for name in names:
        await line.come(name, 2, priority=1)
    await line.come("small", 1)
    assert line.served == set()
    await line.leave(names[0])
    assert line.served == {"small"}


async def test_request_behind_those_that_wait_for_a_busy_worker_goes_once_they_are_late() -> None:
    line = Line(num_pages=2)
    for number in range(MAX_CANDIDATES):
        line.chooser.busy.add(f"{number}")
        await line.come(f"{number}", 1, ttft_slo_s=1.0 + JUDGE_AGAIN_S)  # a page is a second of work
    await line.come("longer", 2)
    assert line.served == set()
    line.clock.advance(2 * JUDGE_AGAIN_S)
    line.chooser.change()
    await turns()
    assert line.served == {"longer"}


async def test_full_fleet_is_searched_for_few_of_many_tenants_and_for_each_pool() -> None:
    line = Line(num_pages=0, max_queued=1000)
    for number in range(MAX_PASSED):
        for name in ("one", "other"):
            await line.come(f"{name} of {number}", 1, Tenant(name=f"{number}"))
    embeddings = {f"embedding {number}" for number in range(3)}
    for name in embeddings:
        await line.come(name, 1, Tenant(name=name), pool=AnswerPool.PREFILL)
    line.chooser.asked.clear()
    line.clock.advance(JUDGE_AGAIN_S)
    line.chooser.change()
    assert len(line.chooser.asked) == MAX_PASSED + len(embeddings)
    assert embeddings < set(line.chooser.asked)


async def test_request_that_waits_for_a_busy_worker_is_not_asked_about_changes_of_others() -> None:
    line = Line()
    line.chooser.busy.add("x")
    await line.come("x", 1)
    line.chooser.asked.clear()
    for _ in range(3):
        line.chooser.change()
    assert line.chooser.asked == []
    line.chooser.differs = True
    line.chooser.change()
    assert line.chooser.asked == ["x"]


async def test_request_that_waits_for_a_busy_worker_is_offered_another_that_becomes_free() -> None:
    line = Line()
    line.chooser.busy.add("x")
    line.chooser.opens_s = line.clock.monotonic() + 1.0
    await line.come("x", 1)
    line.chooser.asked.clear()
    line.chooser.change()
    assert line.chooser.asked == []
    line.chooser.opens_s = 0.0
    line.chooser.busy.clear()
    line.chooser.change()
    await turns()
    assert line.served == {"x"}
