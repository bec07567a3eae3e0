"""Late requests in the fair queue: after those in time, except for their share of the work."""

import pytest

from router.admission.fair_queue import FairQueue
from router.admission.tenant_queue import Place, rank
from tests.router.queues import drain, make_queue, push, serve


def test_late_request_has_all_others_and_the_late_ones_that_came_earlier_before_it() -> None:
    queue = make_queue(a=1)
    early, late = (queue.push(n, tenant="a", rank=(0, n, n), due_s=1.0, work_s=5.0) for n in (0, 1))
    punctual = queue.push(2, tenant="a", rank=(0, 2, 2), work_s=2.0)
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
    queue.push(2, tenant="yielding", rank=rank(priority=0, work_s=0.0, due_s=0.0, number=2), due_s=1.0)
    assert [place.item for place in queue.round(now_s=5.0, skipping=())] == [1, 2]


def push_due(queue: FairQueue[int], number: int, *, due_s: float, priority: int = 0) -> Place[int]:
    key = rank(priority=priority, work_s=0.0, due_s=due_s, number=number)
    return queue.push(number, tenant="a", rank=key, due_s=due_s)


def test_pop_serves_requests_in_time_before_late_ones() -> None:
    queue = make_queue(a=1)
    for number, due_s in enumerate([1.0, 2.0, 9.0]):
        push_due(queue, number, due_s=due_s)
    assert drain(queue, now_s=5.0) == [2, 0, 1]


def test_pop_serves_a_late_one_of_higher_priority_before_other_late_ones() -> None:
    queue = make_queue(a=1)
    for priority in (0, 1):
        push_due(queue, priority, due_s=1.0, priority=priority)
    assert drain(queue, now_s=5.0) == [1, 0]


def test_restore_keeps_a_late_one_behind_those_in_time() -> None:
    queue = make_queue(a=1)
    late = push_due(queue, 0, due_s=1.0)
    assert queue.pop(now_s=5.0) is late
    queue.restore(late)
    push_due(queue, 1, due_s=9.0)
    assert drain(queue, now_s=5.0) == [1, 0]


def late_share_of_work(late_share: float, *, late_cost: float, in_time_cost: float) -> float:
    """Return the share of the work that late requests get while there is always another one in time."""
    queue: FairQueue[float] = FairQueue(late_share=late_share)
    queue.add_tenant("a", weight=1)
    served = {late_cost: 0.0, in_time_cost: 0.0}
    for number in range(2000):
        for cost, due_s in ((late_cost, 1.0), (in_time_cost, 90.0)):
            key = rank(priority=0, work_s=0.0, due_s=due_s, number=number)
            queue.push(cost, tenant="a", rank=key, due_s=due_s)
        place = queue.pop(now_s=5.0)
        assert place is not None
        queue.grant(place, place.item)
        served[place.item] += place.item
    return served[late_cost] / sum(served.values())


@pytest.mark.parametrize("late_share", [0.0, 0.02, 0.25, 1.0])
@pytest.mark.parametrize("late_cost", [10.0, 1000.0])
def test_late_requests_get_their_share_of_the_work_whatever_their_size(late_share: float, late_cost: float) -> None:
    share = late_share_of_work(late_share, late_cost=late_cost, in_time_cost=100.0)
    assert share == pytest.approx(late_share, abs=0.01)


def test_late_one_is_found_behind_waiting_ones_of_better_rank() -> None:
    queue: FairQueue[int] = FairQueue(late_share=0.1)
    queue.add_tenant("a", weight=1)
    for number, (work_s, due_s) in enumerate([(0.0, 9.0), (60.0, 1.0)]):
        key = rank(priority=0, work_s=work_s, due_s=due_s, number=number)
        queue.push(number, tenant="a", rank=key, due_s=due_s)
    assert drain(queue, now_s=5.0) == [1, 0]


def test_late_ones_go_in_order_of_their_deadlines() -> None:
    queue = make_queue(a=1)
    for number, deadline_s in enumerate([30.0, 10.0, 20.0]):
        key = rank(priority=0, work_s=0.0, due_s=1.0, number=number)
        queue.push(number, tenant="a", rank=key, due_s=1.0, deadline_s=deadline_s)
    assert drain(queue, now_s=5.0) == [1, 2, 0]


def test_late_ones_served_while_no_others_wait_cost_the_later_ones_no_turn() -> None:
    queue: FairQueue[int] = FairQueue(late_share=0.1)
    queue.add_tenant("a", weight=1)
    push_due(queue, 0, due_s=1.0)
    place = queue.pop(now_s=5.0)
    assert place is not None
    queue.grant(place, 1000.0)
    push_due(queue, 1, due_s=1.0)
    push_due(queue, 2, due_s=9.0)
    assert drain(queue, now_s=5.0) == [1, 2]
