"""The fair queue by itself: tenants get their shares, the requests of each go in order, and late ones last."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.line.tenant_queue import AGEING
from tests.router.queues import TENANTS, Item, drain, make_queue, push, push_first, serve


def test_higher_priority_goes_first_inside_its_tenant_only() -> None:
    queue = make_queue(a=1, b=1)
    push(queue, 0, tenant="b")
    push(queue, 1, tenant="a", priority=0)
    push(queue, 2, tenant="a", priority=5)
    queue.charge("a", 1)  # so that b goes next whatever a's requests claim
    assert drain(queue) == [0, 2, 1]


def test_long_prompt_gives_way_only_to_those_that_come_within_its_own_work() -> None:
    queue = make_queue(a=1)
    push(queue, 0, work_s=10.0 * AGEING)
    push(queue, 9)
    push(queue, 11)
    assert drain(queue) == [9, 0, 11]


def test_work_before_a_request_is_that_of_the_waiting_ones_that_go_before_it() -> None:
    queue = make_queue(a=1)
    first, second = push(queue, 0, work_s=1.0), push(queue, 1, work_s=2.0)
    last = push(queue, 9, work_s=4.0)
    assert queue.work_before_s(last, now_s=0.0) == 3.0
    push_first(queue, 5, work_s=8.0)
    assert [queue.work_before_s(place, now_s=0.0) for place in (first, second, last)] == [8.0, 9.0, 11.0]
    tried = queue.pop(now_s=0.0)
    assert tried is not None
    queue.restore(tried)
    assert queue.work_before_s(last, now_s=0.0) == 11.0
    queue.grant(tried, 1.0)
    assert queue.work_before_s(last, now_s=0.0) == 3.0
    queue.discard(second)
    assert queue.work_before_s(last, now_s=0.0) == 1.0


def test_other_tenants_get_their_share_first_and_no_more_than_they_wait_for() -> None:
    queue = make_queue(a=1, b=1, heavy=3)
    push(queue, 0, work_s=1.0)
    mine = push(queue, 1, work_s=1.0)
    for number in range(10):
        push(queue, number, tenant="heavy", work_s=1.0)
    push(queue, 0, tenant="b", work_s=0.5)
    assert queue.work_before_s(mine, now_s=0.0) == 1.0 + 3 * 2.0 + 0.5


def test_samples_of_one_request_that_lost_a_plan_go_in_order_of_arrival() -> None:
    queue = make_queue(a=1)
    for item in (7, 5, 6):
        push_first(queue, item, number=1)
    assert drain(queue) == [7, 5, 6]


def test_tenant_with_three_times_the_weight_is_served_three_times_as_much() -> None:
    queue = make_queue(a=1, heavy=3)
    for number in range(80):
        push(queue, number, tenant="a")
        push(queue, number, tenant="heavy")
    served = {"a": 0, "heavy": 0}
    for _ in range(80):
        served[serve(queue, cost=100).tenant] += 1
    assert served == {"a": 20, "heavy": 60}


def test_tenant_that_returns_has_not_saved_up_its_share() -> None:
    queue = make_queue(a=1, b=1)
    for number in range(40):
        push(queue, number, tenant="a")
    for _ in range(20):
        assert serve(queue, cost=100).tenant == "a"
    for number in range(40, 60):
        push(queue, number, tenant="b")
    assert queue.counter("b") == 2000
    assert [serve(queue, cost=100).tenant for _ in range(10)].count("a") == 5


def test_newcomer_to_an_empty_line_is_lifted_to_the_tenant_that_left_last() -> None:
    queue = make_queue(a=1, b=1)
    push(queue, 0, tenant="a")
    assert drain(queue) == [0]
    queue.charge("a", 700)
    push(queue, 1, tenant="b")
    assert queue.counter("b") == 700


def test_held_tenant_is_skipped_and_returns_as_after_a_pause() -> None:
    queue = make_queue(a=1, b=1)
    push(queue, 0, tenant="a")
    push(queue, 1, tenant="b")
    queue.hold("a")
    assert drain(queue) == [1]
    queue.charge("b", 500)
    push(queue, 2, tenant="b")
    queue.release("a")
    assert queue.counter("a") == 500
    assert sorted(drain(queue)) == [0, 2]


def test_restored_place_is_the_same_place_and_lifts_no_tenant() -> None:
    queue = make_queue(a=1, b=1)
    queue.charge("b", 50)
    push(queue, 0, tenant="b")
    before = push(queue, 1, tenant="a")
    for _ in range(3):
        place = queue.pop(now_s=0.0)
        assert place is before
        queue.restore(place)
    assert (queue.counter("a"), drain(queue)) == (50, [1, 0])


@pytest.mark.parametrize("num_leaving", [1, 63, 64, 200])
def test_discarded_items_are_never_returned(num_leaving: int) -> None:
    queue = make_queue(a=1)
    places = [push(queue, number) for number in range(num_leaving + 3)]
    for place in places[:num_leaving]:
        queue.discard(place)
        queue.discard(place)
    assert (len(queue), drain(queue)) == (3, [place.item for place in places[num_leaving:]])


@pytest.mark.parametrize("seed", range(20))
def test_weighted_service_of_waiting_tenants_differs_by_one_request_at_most(seed: int) -> None:
    draw = random.Random(seed)
    requests = [(draw.choice(sorted(TENANTS)), draw.choice((1, draw.randint(1, 1000), 1000))) for _ in range(200)]
    queue = make_queue(**TENANTS)
    costs = dict(enumerate(cost for _, cost in requests))
    waiting = dict.fromkeys(TENANTS, 0)
    for number, (tenant, _) in enumerate(requests):
        push(queue, number, tenant=tenant)
        waiting[tenant] += 1
    started = {tenant: queue.counter(tenant) for tenant in TENANTS}
    while True:
        place = serve(queue)
        queue.charge(place.tenant, costs[place.item])
        waiting[place.tenant] -= 1
        if not waiting[place.tenant]:
            return
        service = [queue.counter(tenant) - started[tenant] for tenant in TENANTS]
        assert max(service) - min(service) <= max(costs[n] / TENANTS[t] for n, (t, _) in enumerate(requests))


def test_round_goes_on_with_the_tenant_that_was_served_least_by_then() -> None:
    queue = make_queue(a=1, b=1)
    for number in range(4):
        push(queue, number, tenant="ab"[number % 2])
    tenants = []
    for place, cost in zip(queue.round(now_s=0.0, skipping=()), (10, 5, 20, 0), strict=True):
        tenants.append(place.tenant)
        queue.charge(place.tenant, cost)
    assert tenants == ["a", "b", "b", "a"]


# ── late requests ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("late_share", "waiting", "order"),
    [
        pytest.param(0.0, [{"due_s": due_s} for due_s in (1.0, 2.0, 9.0)], [2, 0, 1], id="those in time first"),
        pytest.param(0.0, [{"due_s": 1.0, "priority": i} for i in (0, 1)], [1, 0], id="then those of higher priority"),
        pytest.param(
            0.0, [{"due_s": 1.0, "deadline_s": s} for s in (30.0, 10.0, 20.0)], [1, 2, 0], id="then by their deadlines"
        ),
        pytest.param(
            0.1, [{"due_s": 9.0}, {"due_s": 1.0, "work_s": 60.0}], [1, 0], id="found behind one of better rank"
        ),
    ],
)
def test_order_of_late_requests(late_share: float, waiting: list[dict[str, Any]], order: list[int]) -> None:
    queue = make_queue(late_share=late_share, a=1)
    for number, fields in enumerate(waiting):
        push(queue, number, **fields)
    assert drain(queue, now_s=5.0) == order


def test_late_request_has_all_others_and_the_late_ones_that_came_earlier_before_it() -> None:
    queue = make_queue(a=1)
    early, late = (push(queue, number, due_s=1.0, work_s=5.0) for number in (0, 1))
    punctual = push(queue, 2, work_s=2.0)
    for _ in range(2):
        queue.restore(serve(queue, now_s=2.0))
    assert queue.work_before_s(punctual, now_s=2.0) == 0.0
    assert queue.work_before_s(early, now_s=2.0) == 2.0
    assert queue.work_before_s(late, now_s=2.0) == 2.0 + 5.0


def test_tenant_that_yields_goes_after_others_once_all_its_items_are_late() -> None:
    queue = make_queue(a=1)
    queue.add_tenant("yielding", weight=1.0, yields=True)
    push(queue, 1, tenant="a")
    queue.charge("a", 100)
    push(queue, 2, tenant="yielding", due_s=1.0)
    assert [place.item for place in queue.round(now_s=5.0, skipping=())] == [1, 2]


def test_restore_keeps_a_late_one_behind_those_in_time() -> None:
    queue = make_queue(a=1)
    late = push(queue, 0, due_s=1.0)
    assert queue.pop(now_s=5.0) is late
    queue.restore(late)
    push(queue, 1, due_s=9.0)
    assert drain(queue, now_s=5.0) == [1, 0]


def late_share_of_work(late_share: float, *, late_cost: float, in_time_cost: float) -> float:
    """Return the share of the work that late requests get while there is always another one in time."""
    queue, served = make_queue(late_share=late_share, a=1), [0.0, 0.0]
    for number in range(0, 4000, 2):
        push(queue, number, due_s=1.0)
        push(queue, number + 1, due_s=90.0)
        place = serve(queue, now_s=5.0)
        cost = (late_cost, in_time_cost)[place.item % 2]
        queue.grant(place, cost)
        served[place.item % 2] += cost
    return served[0] / sum(served)


@pytest.mark.parametrize("late_share", [0.0, 0.02, 0.25, 1.0])
@pytest.mark.parametrize("late_cost", [10.0, 1000.0])
def test_late_requests_get_their_share_of_the_work_whatever_their_size(late_share: float, late_cost: float) -> None:
    share = late_share_of_work(late_share, late_cost=late_cost, in_time_cost=100.0)
    assert share == pytest.approx(late_share, abs=0.01)


def test_late_ones_served_while_no_others_wait_cost_the_later_ones_no_turn() -> None:
    queue = make_queue(late_share=0.1, a=1)
    push(queue, 0, due_s=1.0)
    queue.grant(serve(queue, now_s=5.0), 1000.0)
    push(queue, 1, due_s=1.0)
    push(queue, 2, due_s=9.0)
    assert drain(queue, now_s=5.0) == [1, 2]


# ── any order of operations ─────────────────────────────────────────────────────────────────────────────────────────


class QueueMachine(RuleBasedStateMachine):
    """Any order of operations: no item is lost or returned twice."""

    tenants = st.sampled_from(sorted(TENANTS))

    def __init__(self) -> None:
        super().__init__()
        self.queue = make_queue(**TENANTS)
        self.places: dict[int, Item] = {}
        self.held: set[str] = set()
        self.number = 0

    @rule(tenant=tenants, priority=st.integers(0, 2), work_s=st.floats(0, 5))
    def push(self, tenant: str, priority: int, work_s: float) -> None:
        self.number += 1
        self.places[self.number] = push(self.queue, self.number, tenant=tenant, priority=priority, work_s=work_s)

    @rule()
    def push_first(self) -> None:
        self.number += 1
        self.places[self.number] = push_first(self.queue, self.number)

    @rule(skipping=st.sets(tenants), costs=st.lists(st.integers(0, 100), min_size=1, max_size=5), skips=st.booleans())
    def serve(self, skipping: set[str], costs: list[int], skips: bool) -> None:
        taken = self.queue.round(now_s=0.0, skipping=skipping)
        for cost in costs:
            place = next(taken, None)
            eligible = [p for p in self.places.values() if p.tenant not in skipping | self.held]
            assert (place is None) == (not eligible)
            if place is None:
                return
            assert place in eligible
            mates = [other for other in eligible if other.tenant == place.tenant]
            assert place.rank == min(mate.rank for mate in mates)
            contenders = {other.tenant for other in eligible}
            if "" in contenders:
                assert place.tenant == ""
            else:
                assert self.queue.counter(place.tenant) == min(self.queue.counter(tenant) for tenant in contenders)
                self.queue.charge(place.tenant, cost)
            if skips:
                skipping.add(place.tenant)
            del self.places[place.item]

    @rule(count=st.integers(1, 5))
    def look(self, count: int) -> None:
        taken = [place for _ in range(count) if (place := self.queue.pop(now_s=0.0)) is not None]
        for place in taken:
            self.queue.restore(place)

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.queue.discard(self.places.pop(data.draw(st.sampled_from(sorted(self.places)))))

    @rule(tenant=tenants, cost=st.integers(-50, 50))
    def correct(self, tenant: str, cost: int) -> None:
        self.queue.charge(tenant, cost)

    @rule(tenant=tenants)
    def hold(self, tenant: str) -> None:
        self.queue.hold(tenant)
        self.held.add(tenant)

    @rule(tenant=tenants)
    def release(self, tenant: str) -> None:
        self.queue.release(tenant)
        self.held.discard(tenant)

    @invariant()
    def no_item_is_lost(self) -> None:
        assert len(self.queue) == len(self.places)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
