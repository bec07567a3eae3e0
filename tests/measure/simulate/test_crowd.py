"""Requests that follow from others: turns of a chat, and sessions of a closed loop."""

from array import array
from collections.abc import Callable

import pytest

from measure.load.records import RequestRecord
from measure.simulate.cluster import run
from measure.simulate.records import Arrival, SimRun
from tests.measure.simulate.builders import make_arrivals, make_settings, make_shape

BLOCK_SIZE = 16
THINK_S = 2.0


def make_chat(num_turns: int, *, seed: int = 0, at_s: float = 0.0, num_output_tokens: int = 33) -> Arrival:
    """Return the first turn of a chat, whose later turns are asked `THINK_S` after an answer."""
    answers = [array("I", [1000 * (seed + 1) + turn] * num_output_tokens) for turn in range(num_turns)]

    def turn(index: int, history: "array[int]", at_s: float) -> Arrival:
        prompt = history + array("I", [seed * 100 + index] * (2 * BLOCK_SIZE))

        def follow_up(result: RequestRecord) -> Arrival | None:
            if index + 1 == num_turns or not result.is_complete:
                return None
            return turn(index + 1, prompt + answers[index], result.end_s + THINK_S)

        return Arrival(
            at_s=at_s,
            prompt=prompt,
            num_output_tokens=num_output_tokens,
            answer=answers[index],
            kind="chat",
            follow_up=follow_up,
        )

    return turn(0, array("I"), at_s)


def serve(*arrivals: Arrival, progress: Callable[[int], None] | None = None) -> SimRun:
    return run(make_shape(1, 1), make_settings(), arrivals, progress=progress)


def test_turns_come_a_think_time_after_the_answer_before() -> None:
    first, second, third = serve(make_chat(3)).requests
    assert second.due_s == first.end_s + THINK_S
    assert third.due_s == second.end_s + THINK_S
    assert all(result.is_complete for result in (first, second, third))


def test_later_turn_finds_prompt_and_answer_before_it_in_a_cache() -> None:
    results = serve(make_chat(3)).requests
    history = 0
    for result in results:
        assert result.server.num_cached_tokens == history // BLOCK_SIZE * BLOCK_SIZE
        history = result.num_prompt_tokens + result.num_output_tokens - 1  # the last token's KV is never computed


def test_results_are_in_order_of_arrival_whatever_a_request_follows_from() -> None:
    others = make_arrivals(30, rate_per_s=5.0)
    results = serve(make_chat(2), *others).requests
    assert [result.index for result in results] == list(range(32))
    assert [result.due_s for result in results] == sorted(result.due_s for result in results)
    assert [result.kind for result in results].count("chat") == 2


def test_progress_counts_turns() -> None:
    counts: list[int] = []
    serve(make_chat(3), make_chat(2, seed=1, at_s=1.0), progress=counts.append)
    assert counts == [1, 2, 3, 4, 5]


def test_closed_loop_never_runs_more_requests_than_it_has_users() -> None:
    num_users, num_asked = 3, 0

    def ask(at_s: float) -> Arrival:
        nonlocal num_asked
        num_asked += 1
        return Arrival(
            at_s=at_s,
            prompt=array("I", [num_asked] * 40),
            num_output_tokens=5 + num_asked % 7,
            follow_up=lambda result: ask(result.end_s) if num_asked < 20 else None,
        )

    results = serve(*(ask(0.0) for _ in range(num_users))).requests
    assert len(results) == 20
    edges = sorted(
        [(result.due_s, 1) for result in results] + [(result.end_s, -1) for result in results]
    )  # an end comes before an arrival of the same time
    running = most = 0
    for _time, change in edges:
        running += change
        most = max(most, running)
    assert (running, most) == (0, num_users)


def test_same_chats_give_the_same_results_twice() -> None:
    runs = [serve(make_chat(4), make_chat(4, seed=1, at_s=0.5)) for _ in range(2)]
    assert runs[0].requests == runs[1].requests


def test_every_gap_between_tokens_is_recorded_with_its_request() -> None:
    finished = serve(make_chat(3), *make_arrivals(20))
    assert {request.kind for request in finished.requests} == {"", "chat"}
    assert [(request.session, request.turn) for request in finished.requests][:1] == [(0, 0)]
    for request in finished.requests:
        assert len(request.gaps_s) == request.num_wanted_tokens - 1
        assert all(gap_s > 0 for gap_s in request.gaps_s)


def test_samples_rise_to_the_workers_counters_and_change_nothing() -> None:
    interval_s = 0.5
    plain = run(make_shape(1, 1), make_settings(), make_arrivals(40))
    sampled = run(make_shape(1, 1), make_settings(sample_interval_s=interval_s), make_arrivals(40))
    assert (sampled.requests, sampled.workers) == (plain.requests, plain.workers)
    assert [sample.at_s for sample in sampled.samples] == [
        pytest.approx(interval_s * number) for number in range(len(sampled.samples))
    ]
    assert len(sampled.samples) >= 2
    for position, worker in enumerate(sampled.workers):
        seen = [sample.workers[position] for sample in sampled.samples]
        busy = [each.busy_s or 0.0 for each in seen]
        assert {(each.worker_id, each.role) for each in seen} == {(worker.worker_id, worker.worker_id.split("-")[0])}
        assert busy == sorted(busy)
        assert 0 < busy[-1] <= worker.busy_s + 1e-9
    assert max(each.num_used_blocks for sample in sampled.samples for each in sample.workers) > 0
