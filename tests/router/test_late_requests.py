"""Late requests in the fair queue: after those in time, except for their share of the work."""

import pytest

from tests.router.queues import drain, make_queue, push, serve


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


def test_pop_serves_requests_in_time_before_late_ones() -> None:
    queue = make_queue(a=1)
    for number, due_s in enumerate([1.0, 2.0, 9.0]):
        push(queue, number, due_s=due_s)
    assert drain(queue, now_s=5.0) == [2, 0, 1]


def test_pop_serves_a_late_one_of_higher_priority_before_other_late_ones() -> None:
    queue = make_queue(a=1)
    for priority in (0, 1):
        push(queue, priority, due_s=1.0, priority=priority)
    assert drain(queue, now_s=5.0) == [1, 0]


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


def test_late_one_is_found_behind_waiting_ones_of_better_rank() -> None:
    queue = make_queue(late_share=0.1, a=1)
    for number, (work_s, due_s) in enumerate([(0.0, 9.0), (60.0, 1.0)]):
        push(queue, number, work_s=work_s, due_s=due_s)
    assert drain(queue, now_s=5.0) == [1, 0]


def test_late_ones_go_in_order_of_their_deadlines() -> None:
    queue = make_queue(a=1)
    for number, deadline_s in enumerate([30.0, 10.0, 20.0]):
        push(queue, number, due_s=1.0, deadline_s=deadline_s)
    assert drain(queue, now_s=5.0) == [1, 2, 0]


def test_late_ones_served_while_no_others_wait_cost_the_later_ones_no_turn() -> None:
    queue = make_queue(late_share=0.1, a=1)
    push(queue, 0, due_s=1.0)
    queue.grant(serve(queue, now_s=5.0), 1000.0)
    push(queue, 1, due_s=1.0)
    push(queue, 2, due_s=9.0)
    assert drain(queue, now_s=5.0) == [1, 2]
