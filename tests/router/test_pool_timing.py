"""Timing models of a pool: a worker that has measured too little takes those of the others."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.timing import MIN_SAMPLES, LinkModel, StepModel, TimingModel
from kvrelay.v1 import worker_pb2
from router.fleet.member import Member
from router.fleet.pool_timing import PoolTiming
from tests.router.fake_worker import DECODE, PREFILL
from tests.router.members import make_member


def measured(step_s: float, *, num_prefills: int = 100, num_decodes: int = 100) -> TimingModel:
    return TimingModel(
        prefill=StepModel(constant_s=step_s, num_samples=num_prefills),
        decode=StepModel(constant_s=step_s / 10, num_samples=num_decodes),
        max_step_tokens=512,
    )


def reported(models: Sequence[tuple[str, "worker_pb2.WorkerRole.ValueType", TimingModel]]) -> list[Member]:
    pool, members = PoolTiming(), [make_member(worker_id=name, role=role) for name, role, _model in models]
    for member, (_name, _role, model) in zip(members, models, strict=True):
        pool.take(member, model, members)
    return members


def test_timing_of_a_new_worker_is_the_median_of_its_pool() -> None:
    new = measured(99.0, num_prefills=MIN_SAMPLES - 1, num_decodes=0)
    pool = [("p0", PREFILL, measured(3.0)), ("p1", PREFILL, measured(1.0)), ("p2", PREFILL, measured(2.0))]
    members = reported([*pool, ("p3", PREFILL, new), ("d0", DECODE, measured(7.0))])
    assert [m.timing.prefill.constant_s for m in members] == [3.0, 1.0, 2.0, 2.0, 7.0]
    assert members[3].timing.max_step_tokens == 512


def test_timing_that_a_pool_never_measures_comes_from_the_other_pool() -> None:
    prefill, decode = reported(
        [("p0", PREFILL, measured(2.0, num_decodes=0)), ("d0", DECODE, measured(8.0, num_prefills=0))]
    )
    assert (prefill.timing.prefill.constant_s, prefill.timing.decode.constant_s) == (2.0, 0.8)
    assert (decode.timing.prefill.constant_s, decode.timing.decode.constant_s) == (2.0, 0.8)


@pytest.mark.parametrize("num_samples", [0, 1])
def test_timing_before_any_worker_has_measured_itself_is_each_ones_own_estimate(num_samples: int) -> None:
    estimates = [measured(step_s, num_prefills=num_samples, num_decodes=num_samples) for step_s in (2.0, 3.0)]
    members = reported([("p0", PREFILL, estimates[0]), ("p1", PREFILL, estimates[1])])
    assert [member.timing for member in members] == estimates


def test_report_that_hardly_moves_the_median_leaves_the_models_of_other_workers() -> None:
    pool, members = PoolTiming(), [make_member(worker_id=name, role=PREFILL) for name in ("p0", "p1")]
    used = []
    for step_s in (2.0, 2.01, 3.0):
        pool.take(members[0], measured(step_s), members)
        used.append([member.timing.prefill.constant_s for member in members])
    assert used == [[2.0, 2.0], [2.01, 2.0], [3.0, 3.0]]


def test_worker_without_pulls_takes_the_link_of_those_that_have_pulled() -> None:
    pool, (old, new) = PoolTiming(), [make_member(worker_id=name) for name in ("d0", "d1")]
    link = LinkModel(latency_s=0.001, bytes_per_s=5e9, num_samples=9)
    pool.take(old, replace(measured(1.0), links={None: link}), [old])
    pool.complete([new])
    assert new.timing.links == {None: link}


def test_link_forgotten_by_its_worker_is_no_longer_the_usual_one() -> None:
    """A pool whose pulls were all slow once would wait for its prefill workers' queues to grow as slow, for good."""
    pool, members = PoolTiming(), [make_member(worker_id=name) for name in ("d0", "d1")]
    slow, usual = (LinkModel(latency_s=latency_s, bytes_per_s=5e9, num_samples=1) for latency_s in (5.0, 0.001))
    pool.take(members[0], replace(measured(1.0), links={None: slow}), members)
    pool.take(members[0], measured(1.0), members)
    assert [member.timing.links for member in members] == [{}, {}]
    pool.take(members[0], replace(measured(1.0), links={None: slow}), members)
    pool.take(members[1], replace(measured(1.0), links={None: usual}), members)
    pool.take(members[0], measured(1.0), members)
    assert [member.timing.links for member in members] == [{None: usual}, {None: usual}]
