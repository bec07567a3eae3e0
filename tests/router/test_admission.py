"""Admission: who may wait, who goes first and what a tenant is charged, with a chooser that only counts pages."""

from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from common.errors import Overloaded, RefusalCause, WorkerLost
from common.ids import WorkerId
from kvrelay.v1 import worker_pb2
from router.fleet.facts import WorkerEndpoint
from router.line.admission import MAX_ARRIVING, MIN_QUEUED, QUEUED_PER_WORKER
from router.line.plan_finder import JUDGE_AGAIN_S
from router.observe.metrics import MAX_LABELS, OTHERS, TenantMetrics
from router.record.account import Service
from router.tenants import Tenant
from tests.router.line import A, B, Line, turns


async def test_full_line_refuses_and_says_when_by_the_pace_it_measured() -> None:
    line = Line(num_pages=1, max_queued=2)
    await line.come("x", 1)
    for name in "yz":
        await line.come(name, 1)
    guessed = line.refusal()
    for _ in range(20):
        line.clock.advance(0.5)
        await line.end(min(line.served))
        await line.come(f"z{line.clock.monotonic()}", 1)
    refused = [line.refusal() for _ in range(2)]
    assert {refusal.cause for refusal in (guessed, *refused)} == {RefusalCause.QUEUE_FULL}
    assert "2 requests are waiting; the limit is 2" in refused[0].reason
    assert [refusal.retry_after_s for refusal in refused] == pytest.approx([0.5, 1.0], rel=0.1)
    assert line.counts == (2, 1)


async def test_newcomer_that_waits_is_told_when_by_the_work_of_those_before_it() -> None:
    line = Line(num_pages=4)
    await line.come("running", 4)
    assert line.told == []
    await line.come("x", 2)
    await line.come("y", 3)
    assert line.told == [("x", 2.0), ("y", 2.0 + 3.0)]
    await line.leave("x")
    await line.come("z", 1)  # shorter: it goes before y
    assert line.told[2:] == [("z", 1.0)]
    line.waiting.pop("running").result().answering.num_blocks = 0  # its worker died: it waits again, but is no newcomer
    await line.place("running", 4)
    await line.come("w", 4)
    assert line.told[3:] == [("w", 4.0 + 1.0 + 3.0 + 4.0)]


@pytest.mark.parametrize("lack", ["is_closed", "is_saturated"])
async def test_newcomer_is_told_to_wait_for_the_answers_that_must_end_before_its_own(lack: str) -> None:
    line = Line(gap_s=0.0)
    setattr(line.chooser, lack, True)
    line.chooser.place_s = 10.0
    for name in ("x", "y", "z"):
        await line.come(name, 1)
    assert line.told == [("x", 10.0), ("y", 20.0), ("z", 30.0)], "a client would wait for seconds and be told none"


async def test_request_that_is_refused_or_gives_up_is_before_no_other_any_more() -> None:
    line = Line(num_pages=0)
    await line.come("x", 2)
    line.chooser.hopeless.add("x")
    line.clock.advance(JUDGE_AGAIN_S)
    line.chooser.change()
    await turns()
    assert line.waiting["x"].exception() is not None
    await line.come("y", 3)
    assert line.told[-1] == ("y", 3.0)


async def test_line_of_a_large_fleet_has_places_for_each_worker_unless_configured() -> None:
    line = Line(max_queued=None)
    assert line.admission.max_queued == MIN_QUEUED
    line.fleet.set_workers(
        [
            WorkerEndpoint(worker_id=WorkerId(f"d{idx}"), role=worker_pb2.WORKER_ROLE_DECODE, address="127.0.0.1:1")
            for idx in range(MIN_QUEUED)
        ]
    )
    assert line.admission.max_queued == QUEUED_PER_WORKER * MIN_QUEUED
    await line.fleet.aclose()


async def test_tenant_with_a_full_line_of_its_own_does_not_fill_that_of_others() -> None:
    line = Line(num_pages=0)
    small = Tenant(name="small", max_queued=1)
    await line.come("x", 1, small)
    assert line.refusal(small).cause is RefusalCause.TENANT_QUEUE_FULL
    await line.come("y", 1, B)
    assert line.counts == (2, 0)


async def test_request_that_lost_its_worker_goes_before_newcomers_past_all_limits() -> None:
    line = Line(num_pages=1)
    tight = Tenant(name="tight", max_queued=2, max_concurrent=1)
    await line.come("x", 1, tight)
    await line.come("y", 1, tight, priority=9)
    line.waiting.pop("x").result().answering.num_blocks = 0  # its worker died: its pages do not come back
    await line.place("x", 1)
    assert line.counts == (2, 1)
    line.chooser.num_free = 1
    line.chooser.change()
    await turns()
    assert line.served == {"x"}
    await line.end("x")
    assert line.served == {"y"}


async def test_newcomer_that_a_worker_refused_waits_behind_more_urgent_ones_again() -> None:
    line = Line(num_pages=1)
    await line.come("refused", 1)
    await line.come("urgent", 1, priority=1)
    line.chooser.is_saturated = True
    await line.refuse("refused")
    (account,) = line.admission.accounts
    assert (account.num_queued, account.num_active, line.line.num_queued) == (2, 0, 2)
    line.chooser.is_saturated = False
    line.chooser.change()
    await turns()
    assert line.waiting["urgent"].done()
    assert not line.waiting["refused"].done()
    await line.end("urgent")
    await turns()
    await line.end("refused")
    assert (account.num_queued, account.num_active, line.line.num_queued) == (0, 0, 0)


async def test_refused_newcomer_of_a_tenant_at_its_concurrency_cap_gets_another_plan() -> None:
    line = Line()
    await line.come("only", 1, Tenant(name="a", max_concurrent=1))
    await line.refuse("only")
    await line.end("only")


async def test_newcomer_that_a_worker_refused_is_not_displaced_from_a_full_line() -> None:
    line = Line(max_queued=2)
    await line.come("refused", 1, A)
    line.chooser.is_saturated = True
    await line.refuse("refused")
    await line.come("newest", 1, A)
    line.admit(B)
    with pytest.raises(Overloaded):
        await line.waiting["newest"]
    assert not line.waiting["refused"].done()


async def test_concurrency_cap_makes_only_its_own_tenant_wait() -> None:
    line = Line()
    capped = Tenant(name="capped", max_concurrent=2)
    for name in "xyz":
        await line.come(name, 1, capped)
    await line.come("b", 1, B)
    assert (line.served, line.counts) == ({"x", "y", "b"}, (1, 3))
    await line.end("x")
    assert line.served == {"y", "z", "b"}


async def test_requests_of_a_tenant_that_begin_and_never_arrive_are_few() -> None:
    admission = Line().admission
    with ExitStack() as begun:
        for _ in range(MAX_ARRIVING):
            begun.enter_context(admission.arriving(A))
        with pytest.raises(Overloaded, match="begun to arrive"), admission.arriving(A):
            pass
        with admission.arriving(B):
            pass
    with admission.arriving(A):
        pass


async def test_request_that_no_worker_can_serve_in_time_is_refused_at_once() -> None:
    line = Line()
    line.chooser.hopeless.add("x")
    await line.come("x", 1)
    with pytest.raises(Overloaded, match="too late") as caught:
        line.waiting["x"].result()
    assert caught.value.retry_after_s == 3.0
    assert line.counts == (1, 0)
    line.tickets["x"].__exit__(None, None, None)
    assert line.counts == (0, 0)


async def test_place_after_its_deadline_says_what_is_missing() -> None:
    line = Line(num_pages=0)
    line.tickets["x"] = line.admit()
    await line.place("x", 1, patience_s=0.0)
    with pytest.raises(WorkerLost, match="0 pages are free"):
        await line.waiting["x"]
    assert line.counts == (1, 0)


async def test_cancelled_head_of_the_line_lets_the_next_one_go() -> None:
    line = Line(num_pages=1)
    await line.come("x", 1)
    await line.come("head", 1)
    await line.come("next", 1)
    await line.leave("head")
    await line.end("x")
    assert line.served == {"next"}
    assert line.counts == (0, 1)


async def test_booking_granted_to_a_request_that_is_cancelled_at_that_moment_is_released() -> None:
    line = Line(num_pages=1)
    await line.come("x", 1)
    await line.come("y", 1)
    line.waiting.pop("x").result().release()  # grants y in the same turn
    line.waiting["y"].cancel()
    await turns()
    assert line.waiting["y"].cancelled()
    assert line.chooser.num_free == 1


async def test_cached_tokens_that_the_worker_found_lower_the_charge_at_once() -> None:
    line = Line(num_pages=100)
    await line.come("x", 40)
    await line.come("y", 20, B)
    line.admission.correct_cached(line.tickets["x"], 39)
    await line.come("full", 40, Tenant(name="c"))
    await line.come("b", 5, B)
    await line.come("a", 5, A)
    line.chooser.asked.clear()
    await line.end("full")
    assert line.chooser.asked == ["a", "b"]


async def test_settle_charges_what_a_request_got_instead_of_what_was_expected() -> None:
    line = Line(num_pages=100)
    await line.come("x", 40)
    await line.come("y", 40, B)
    line.admission.settle(line.tickets["x"], Service(num_prompt_tokens=40, num_cached_tokens=39, num_output_tokens=2))
    await line.come("full", 20)  # a was charged 1 + 2 * 2 tokens in all, b 40
    await line.come("b", 5, B)
    await line.come("a", 5, A)
    await line.end("full")
    assert {"a", "b"} <= line.served
    assert line.chooser.asked.index("a") > line.chooser.asked.index("b")
    assert line.chooser.asked[-2:] == ["a", "b"]


async def test_tenant_metrics_count_waiting_refused_and_served() -> None:
    line = Line(num_pages=10)
    small = Tenant(name="small", max_queued=1, max_concurrent=1)
    await line.come("x", 10, small)
    line.clock.advance(2.0)
    await line.come("y", 1, small)
    assert line.refusal(small).cause is RefusalCause.TENANT_QUEUE_FULL
    line.admission.settle(line.tickets["x"], Service(num_prompt_tokens=10, num_cached_tokens=4, num_output_tokens=3))

    def sample(name: str, **labels: str) -> float | None:
        return line.registry.get_sample_value(name, {"tenant": "small", **labels})

    assert sample("kvrelay_tenant_requests_queued") == sample("kvrelay_tenant_requests_active") == 1
    assert sample("kvrelay_tenant_refusals_total", cause="tenant_queue_full") == 1
    kinds = ("prompt_computed", "prompt_cached", "output")
    assert [sample("kvrelay_tenant_tokens_total", kind=kind) for kind in kinds] == [6, 4, 3]
    line.clock.advance(1.0)
    await line.end("x")
    assert sample("kvrelay_tenant_queue_seconds_sum") == pytest.approx(1.0, abs=0.1)


def test_metrics_of_very_many_tenants_share_one_label() -> None:
    registry = CollectorRegistry()
    metrics = TenantMetrics(registry)
    for number in range(MAX_LABELS + 7):
        metrics.count_refusal(f"t{number}", RefusalCause.SLO)
    assert registry.get_sample_value("kvrelay_tenant_refusals_total", {"tenant": OTHERS, "cause": "slo"}) == 7
