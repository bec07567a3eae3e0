"""The soak finds growth, and its load really fills, shares, preempts and empties a pool."""

import random

import pytest

from benchmarks.soak import Counts, Load, MemorySample, growth_bytes, verdict
from engine.core import EngineCore
from tests.builders import make_core

MIB = 1 << 20


def make_samples(*rss_mib: float) -> list[MemorySample]:
    return [
        MemorySample(at_s=float(at_s), rss_bytes=int(rss * MIB), device_bytes=0, python_blocks=0)
        for at_s, rss in enumerate(rss_mib)
    ]


def make_soaked_core() -> EngineCore:
    return make_core(num_blocks=300, max_step_tokens=256, max_running=32, max_waiting=64, max_model_len=1024)


def full(core: EngineCore) -> Counts:
    return Counts(max_filled_blocks=core.pool.num_blocks)


def test_growth_when_one_sample_is_far_off_keeps_the_trend() -> None:
    assert growth_bytes([(at, 600.0 if at == 7 else 5.0 * at) for at in range(11)]) == pytest.approx(5 * 8, rel=0.1)


def test_growth_leaves_the_warm_up_out() -> None:
    assert growth_bytes([(0, 0.0), (1, 900.0), *((at, 1000.0) for at in range(2, 11))]) == 0


def test_growth_is_the_slope_over_the_settled_time() -> None:
    assert growth_bytes([(at, 5.0 * at) for at in range(11)]) == pytest.approx(5 * 8)


def test_verdict_when_memory_creeps_names_the_growth() -> None:
    core = make_soaked_core()

    problems = verdict(make_samples(*(100 + 2 * at for at in range(11))), core, full(core), limit_bytes=10 * MIB)

    assert problems == ["rss_bytes grew by 16.0 MiB behind the warm-up"]


def test_verdict_when_memory_only_trembles_is_empty() -> None:
    core = make_soaked_core()

    assert verdict(make_samples(*[100, 103, 101, 102] * 5), core, full(core), limit_bytes=MIB) == []


def test_verdict_when_pages_were_never_filled_or_stay_held_says_so() -> None:
    core = make_soaked_core()
    core.pool.allocate(3)

    problems = verdict(make_samples(*[100] * 5), core, Counts(max_filled_blocks=299), limit_bytes=MIB)

    assert problems == [
        "at most 299 of 300 pages were filled",
        "3 pages are held though every request is over",
    ]


def test_load_fills_every_page_preempts_hits_the_cache_and_leaves_nothing() -> None:
    core = make_soaked_core()
    load = Load(core, random.Random(5))

    for _ in range(600):
        load.step()
    state = core.load()
    load.stop()

    assert verdict([], core, load.counts, limit_bytes=0) == []
    assert min(state.num_preemptions, state.num_cached_tokens, load.counts.cancelled, load.counts.held) > 0
    assert not core.scheduler.has_work
