"""Loads of whole pools as arrays: the same answers as looking at every worker."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import WorkerId
from common.timing import StepModel
from kvrelay.v1 import worker_pb2
from router.fleet.member import Member, WorkerState
from router.fleet.roster import Roster
from router.placement.answer_pool import AnswerPool
from router.placement.loads import PoolLoads, ProjectedLoad, lowest
from router.placement.policies import predictive
from tests.router.fake_worker import DECODE, PREFILL
from tests.router.fleets import TIMING, choose, fleet, policy, request, worker
from tests.router.members import book, make_member

NAMES = [f"d{number}" for number in range(6)]
loads = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30)


def pool(numbers: Sequence[tuple[int, int]]) -> list[ProjectedLoad]:
    return [worker(f"d{i}", free=free, num_decodes=num) for i, (free, num) in enumerate(numbers)]


@given(loads, st.integers(1, 8))
def test_lowest_are_those_that_sorting_puts_first(numbers: list[tuple[int, int]], num_lowest: int) -> None:
    keys, ties = (np.array([each[i] for each in numbers], dtype=float) for i in (0, 1))
    found = lowest(keys, num_lowest, tied=ties.__getitem__)
    expected = sorted(range(len(numbers)), key=lambda i: (keys[i], ties[i], i))[:num_lowest]
    assert sorted(found) == sorted(expected)


@given(loads, st.sets(st.integers(0, 40)), st.integers(0, 3))
def test_selected_loads_are_those_of_the_mask_without_the_excluded(
    numbers: list[tuple[int, int]], excluded: set[int], least: int
) -> None:
    records = pool(numbers)
    left_out = {WorkerId(f"d{number}") for number in excluded}
    part = PoolLoads(records).without(left_out)
    part = part.where(part.num_free_blocks >= least)
    expected = [each for each in records if each.worker_id not in left_out and each.num_free_blocks >= least]
    assert list(part) == expected
    assert part.num_decodes.tolist() == [each.num_decodes for each in expected]
    assert [part.find(each.worker_id) for each in records] == [each if each in expected else None for each in records]


@given(loads, st.integers(1, 3), st.integers(0, 4), st.integers(0, 2))
def test_pool_that_may_hold_nothing_has_no_worker_with_room(
    numbers: list[tuple[int, int]], num_sequences: int, num_blocks: int, num_growth_blocks: int
) -> None:
    part = PoolLoads(replace(each, num_free_slots=each.num_free_blocks, num_sequences=1) for each in pool(numbers))
    slots = part.where(part.num_free_slots >= num_sequences)
    has_room = bool(slots.with_room(num_blocks=num_blocks, num_growth_blocks=num_growth_blocks))
    may_hold = part.may_hold(num_sequences=num_sequences, num_blocks=num_blocks, num_growth_blocks=num_growth_blocks)
    assert may_hold or not has_room
    if len(part) == 1:
        assert may_hold is has_room


changes = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["report", "book", "prefilled", "release"]), st.integers(1, 5)),
    max_size=30,
)


@given(changes, st.integers(1, 5))
def test_loads_that_are_kept_current_equal_those_added_up_anew(
    changes: list[tuple[str, str, int]], look_every: int
) -> None:
    changed: set[Member] = set()
    members = {name: make_member(worker_id=name, role=(PREFILL, DECODE)[i % 2]) for i, name in enumerate(NAMES)}
    for member in members.values():
        member.state, member.changed = WorkerState.READY, changed
    roster = Roster.of(members.values())
    for number, (name, kind, size) in enumerate(changes):
        member = members[name]
        booking = next(iter(member.bookings), None)
        if kind == "report":
            member.take_report(worker_pb2.LoadReport(num_free_blocks=size, prefill_backlog_s=size), now_s=number)
        elif kind == "book":
            book(member, num_blocks=size, prefill_s=size, now_s=number)
        elif booking is not None and kind == "prefilled":
            member.note_prefilled(booking)
        elif booking is not None:
            member.remove_booking(booking)
        if number % look_every:
            continue
        roster.refresh(changed)
        changed.clear()
        anew = Roster.of(members.values())
        assert (list(roster.prefill), list(roster.decode)) == (list(anew.prefill), list(anew.decode))
        assert roster.decode.num_free_blocks.tolist() == anew.decode.num_free_blocks.tolist()
        assert roster.prefill_free_at_s() == anew.prefill_free_at_s()
        for num_blocks, num_samples, pool in product(range(6), (1, 3), AnswerPool):
            asked = request(16 * num_blocks, num_output_tokens=16, num_samples=num_samples, pool=pool)
            loads = anew.prefill if pool is AnswerPool.PREFILL else anew.decode
            assert roster.may_hold(asked) is loads.may_hold(
                num_sequences=num_samples,
                num_blocks=asked.num_decode_blocks,
                num_growth_blocks=asked.num_growth_blocks,
            )


@settings(max_examples=60, deadline=None)
@given(
    prefills=st.lists(st.sampled_from([0.0, 0.5, 2.0, 9.0]), min_size=30, max_size=40),
    decodes=st.lists(st.integers(0, 9), min_size=30, max_size=40),
    cached=st.dictionaries(st.sampled_from([*(f"p{i}" for i in range(30)), *(f"d{i}" for i in range(30))]),
                           st.integers(1, 60), max_size=predictive.NUM_PRESELECTED),
)  # fmt: skip
def test_plan_of_a_large_fleet_costs_as_little_as_when_every_worker_is_priced(
    prefills: list[float], decodes: list[int], cached: dict[str, int]
) -> None:
    view = fleet(
        *(worker(f"p{i}", prefill_free_at_s=wait_s) for i, wait_s in enumerate(prefills)),
        *(worker(f"d{i}", num_decodes=num, num_context_tokens=1000 * num) for i, num in enumerate(decodes)),
        block_bytes=100_000,
    )
    asked = request(1001, cached=cached)
    plan = choose(policy("predictive"), asked, view)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictive, "NUM_PRESELECTED", 1000)
        every = choose(policy("predictive"), asked, view)
    assert plan.candidates()[0].cost == pytest.approx(every.candidates()[0].cost)


def test_request_is_larger_the_more_it_takes_of_the_pool_that_is_short() -> None:
    timing = replace(TIMING, decode=StepModel(constant_s=0.01, per_decode_s=0.001, per_context_token_s=1e-5))

    def size_s(names: str, num_tokens: int, answer_price: float) -> float:
        workers = [worker(name, timing=timing) for name in names.split()]
        prefill, decode = (PoolLoads(each for each in workers if each.worker_id[0] == pool) for pool in "pd")
        roster = replace(Roster.of(()), prefill=prefill, decode=decode)
        asked = request(num_tokens, num_output_tokens=100, num_samples=2)
        return roster.size_s(asked, 3.0, answer_price=answer_price)

    assert size_s("p0 d0", 100, 1.0) == pytest.approx(2 * 2 * 100 * 0.002)
    assert size_s("p0 d0", 1000, 1.0) == pytest.approx(2 * 2 * 100 * 0.011)
    assert size_s("p0 p1 p2 d0", 100, 1.0) == pytest.approx(3 * 0.8)
    assert size_s("p0 d0", 100, 0.25) == pytest.approx(0.75 * 3.0 + 0.25 * 0.8)
    assert [size_s(names, 100, price) for names, price in (("p0 d0", 0.0), ("d0 d1", 1.0), ("p0", 1.0))] == [3.0] * 3
