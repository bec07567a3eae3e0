"""RobustFit and WorkerTiming: what they learn of steps from clean, noisy, spoilt and degenerate measurements."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.timing import (
    GUESSED_TIMING,
    MIN_SAMPLES,
    StepModel,
    StepShape,
    TimingModel,
    timing_from_proto,
    timing_to_proto,
)
from engine.events import StepSample
from engine.work import DeviceRates, ModelShape, StepFloors
from tests.builders import make_core, make_request, submit
from tests.clock import ManualClock
from worker.timing import MIN_CHANGE, NUM_WARM_UP_STEPS, WorkerTiming, reference_shapes
from worker.timing_fit import BUCKET_SAMPLES, MAX_BUCKETS, RobustFit, solve_non_negative

MAX_STEP_TOKENS = 2048
TRUTH = TimingModel(
    prefill=StepModel(
        constant_s=8e-3,
        per_prefill_token_s=4e-5,
        per_prefill_pair_s=3e-9,
        per_decode_s=5e-5,
        per_context_token_s=2e-8,
    ),
    decode=StepModel(constant_s=6e-3, per_decode_s=3e-5, per_context_token_s=4e-8),
    max_step_tokens=MAX_STEP_TOKENS,
)


FLOORS = StepFloors(
    model=ModelShape(
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
    ),
    weight_bytes=270_000_000,
    kv_bytes_per_token=23_040,
    rates=DeviceRates(read_bytes_per_s=1e10, flops_per_s=1e11),
)


def prefill_shape(num_tokens: int, depth: int = 0, *, num_decodes: int = 0, context: int = 0) -> StepShape:
    return StepShape(
        num_prefill_tokens=num_tokens,
        num_prefill_pairs=num_tokens * depth + num_tokens * (num_tokens + 1) // 2,
        num_decodes=num_decodes,
        num_context_tokens=context,
    )


def random_shape(rng: random.Random) -> StepShape:
    num_decodes = rng.choice([0, 0, 5, 20, 40])
    context = sum(rng.randint(100, 4000) for _ in range(num_decodes))
    if num_decodes and rng.random() < 0.6:
        return StepShape(num_decodes=num_decodes, num_context_tokens=context)
    num_tokens = rng.choice([MAX_STEP_TOKENS - num_decodes, rng.randint(2, MAX_STEP_TOKENS - num_decodes)])
    return prefill_shape(num_tokens, rng.choice([0, 2048, 10_000, 30_000]), num_decodes=num_decodes, context=context)


def measured(num_steps: int, *, noise: float = 0.0, share_of_outliers: float = 0.0, seed: int = 0) -> list[StepSample]:
    rng = random.Random(seed)
    samples = []
    for _ in range(num_steps):
        shape = random_shape(rng)
        seconds = TRUTH.step_s(shape) * rng.lognormvariate(0, noise)
        if rng.random() < share_of_outliers:
            seconds *= rng.uniform(2, 20)
        samples.append(StepSample(shape=shape, seconds=seconds))
    return samples


def worst_error(model: TimingModel) -> float:
    shapes = reference_shapes(MAX_STEP_TOKENS)
    return max(abs(math.log(model.step_s(shape) / TRUTH.step_s(shape))) for shape in shapes)


def learnt_from(samples: list[StepSample]) -> WorkerTiming:
    timing = WorkerTiming(max_step_tokens=MAX_STEP_TOKENS, clock=ManualClock())
    timing.observe(samples)
    return timing


def test_timing_before_any_step_is_the_guess() -> None:
    timing = learnt_from([])
    assert (timing.model.prefill, timing.model.decode) == (GUESSED_TIMING.prefill, GUESSED_TIMING.decode)
    assert timing.version == 0


def test_timing_before_any_step_is_what_the_model_takes_on_the_measured_device() -> None:
    timing = WorkerTiming(max_step_tokens=MAX_STEP_TOKENS, clock=ManualClock(), floors=FLOORS)
    alone, chunk = StepShape(num_decodes=1, num_context_tokens=500), prefill_shape(512)
    assert timing.model.step_s(alone) == pytest.approx(FLOORS.memory_s(alone) + FLOORS.compute_s(alone))
    assert timing.model.step_s(chunk) == pytest.approx(FLOORS.weights_s + FLOORS.compute_s(chunk), rel=0.01)
    assert not timing.model.decode.is_measured, "a router would refuse requests for an estimate"


def test_first_measured_step_corrects_the_estimate_and_routers_are_told() -> None:
    timing = WorkerTiming(max_step_tokens=MAX_STEP_TOKENS, clock=ManualClock(), floors=FLOORS)
    alone, batch = StepShape(num_decodes=1, num_context_tokens=500), StepShape(num_decodes=8, num_context_tokens=4000)
    estimated_s = timing.model.step_s(batch)
    step = StepSample(shape=alone, seconds=3 * timing.model.step_s(alone))
    timing.observe([step] * (NUM_WARM_UP_STEPS + 1))
    assert timing.version == 1
    assert timing.model.step_s(alone) == pytest.approx(step.seconds, rel=0.01)
    assert timing.model.step_s(batch) == pytest.approx(3 * estimated_s, rel=0.1)
    assert not timing.model.decode.is_measured
    timing.observe([step] * (MIN_SAMPLES - 1))
    assert timing.model.decode.is_measured
    assert timing.version == 2, "routers would never learn that it is a measurement"


@pytest.mark.parametrize("seed", range(4))
def test_timing_of_noisy_steps_with_outliers_stays_near_the_truth(seed: int) -> None:
    samples = measured(3000, noise=0.05, share_of_outliers=0.1, seed=seed)
    assert worst_error(learnt_from(samples).model) < 0.15


def test_gap_of_speculated_steps_is_the_time_per_token_not_per_step() -> None:
    rng = random.Random(0)
    samples = []
    for _ in range(3200):
        alone = StepShape(num_decodes=2, num_context_tokens=600)
        num_drafted, num_accepted = rng.choice([(0, 0), (12, 2), (12, 12)])
        shape = StepShape(num_decodes=2 + num_drafted, num_context_tokens=600 + 300 * num_drafted)
        undrafted = alone if num_drafted else None
        seconds = TRUTH.step_s(shape)
        samples.append(StepSample(shape=shape, seconds=seconds, undrafted=undrafted, num_accepted=num_accepted))
    model = learnt_from(samples).model
    num_tokens = sum(1 + sample.num_accepted / 2 for sample in samples)
    assert model.itl_s(2, 600) == pytest.approx(sum(sample.seconds for sample in samples) / num_tokens, rel=0.1)
    assert model.step_s(StepShape(num_decodes=14, num_context_tokens=4200)) > 1.5 * model.itl_s(2, 600)
    assert timing_from_proto(timing_to_proto(model, {})) == model
    assert learnt_from(measured(100)).model.gap is None


def test_timing_leaves_warm_up_steps_out() -> None:
    shape = prefill_shape(512)
    slow = [StepSample(shape=shape, seconds=60.0)] * NUM_WARM_UP_STEPS
    timing = learnt_from(slow + [StepSample(shape=shape, seconds=0.1)] * 8)
    assert timing.model.prefill.num_samples == 8
    assert timing.model.step_s(shape) == pytest.approx(0.1, rel=1e-3)


def test_timing_of_equal_steps_scales_the_guess() -> None:
    shape = prefill_shape(512)
    timing = learnt_from([StepSample(shape=shape, seconds=0.5)] * 40)
    ratio = 0.5 / GUESSED_TIMING.prefill.seconds(shape)
    for other in (shape, prefill_shape(64), prefill_shape(2048, num_decodes=4, context=4000)):
        assert timing.model.step_s(other) == pytest.approx(ratio * GUESSED_TIMING.step_s(other), rel=0.01)


def test_timing_after_the_machine_became_slower_follows() -> None:
    timing = learnt_from(measured(2000, noise=0.03))
    shape = StepShape(num_decodes=20, num_context_tokens=40_000)
    timing.observe([StepSample(shape=shape, seconds=3 * TRUTH.step_s(shape))] * 300)
    assert timing.model.step_s(shape) == pytest.approx(3 * TRUTH.step_s(shape), rel=0.1)


def test_timing_after_a_few_long_steps_shows_a_slow_worker() -> None:
    """Routers avoid a worker whose answers are late: it may take minutes for the 64 steps that short ones need."""
    timing = learnt_from(measured(2000, noise=0.03))
    shape = prefill_shape(2048)
    timing.observe([StepSample(shape=shape, seconds=10 * TRUTH.step_s(shape))] * 16)
    assert timing.model.step_s(shape) > 3 * TRUTH.step_s(shape)
    timing.observe([StepSample(shape=shape, seconds=TRUTH.step_s(shape))] * 16)  # soon enough after a stall
    assert timing.model.step_s(shape) == pytest.approx(TRUTH.step_s(shape), rel=0.1)


def test_timing_after_a_hiccup_is_what_it_was() -> None:
    timing = learnt_from(measured(2000, noise=0.03))
    shape = prefill_shape(2048)
    steps = [10.0, 10.0, 10.0, *[1.0] * 29]
    timing.observe([StepSample(shape=shape, seconds=factor * TRUTH.step_s(shape)) for factor in steps])
    assert timing.model.step_s(shape) == pytest.approx(TRUTH.step_s(shape), rel=0.1)


def test_timing_after_long_steady_decoding_still_knows_other_batches() -> None:
    timing = learnt_from(measured(1500, noise=0.02))
    steady = StepShape(num_decodes=20, num_context_tokens=40_000)
    timing.observe([StepSample(shape=steady, seconds=TRUTH.step_s(steady))] * 20_000)
    assert worst_error(timing.model) < 0.15


def test_timing_counts_the_time_in_steps_warm_up_included() -> None:
    samples = measured(50)
    assert learnt_from(samples).busy_s == pytest.approx(sum(sample.seconds for sample in samples))


def test_timing_version_moves_only_with_predictions() -> None:
    timing = learnt_from(measured(4000, noise=0.01))
    version = timing.version
    timing.observe(measured(4000, noise=0.01, seed=1))
    assert version > 0
    assert timing.version - version <= 1
    factor = 1 + 4 * MIN_CHANGE
    timing.observe([StepSample(shape=s.shape, seconds=factor * s.seconds) for s in measured(8000, seed=2)])
    assert timing.version > version


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10_000),
            st.integers(0, 10**9),
            st.integers(0, 300),
            st.integers(0, 10**7),
            st.floats(0, 1e4, allow_nan=False),
        ),
        min_size=1,
        max_size=60,
    )
)
def test_fit_of_anything_is_finite_and_not_negative(rows: list[tuple[int, int, int, int, float]]) -> None:
    fit = RobustFit((5e-3, 1e-4, 0.0, 1e-4, 0.0))
    for *features, seconds in rows:
        fit.add((1, *features), seconds)
    weights = fit.fit()
    assert all(math.isfinite(weight) and weight >= 0 for weight in weights)


@given(st.integers(1, 5), st.integers(0, 10**6))
def test_solve_non_negative_satisfies_the_optimality_conditions(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(size + 2, size))
    products, moments = factor.T @ factor + 1e-3 * np.eye(size), rng.normal(size=size)
    solution = solve_non_negative(products, moments)
    slope = moments - products @ solution
    assert (solution >= 0).all()
    assert (slope <= 1e-6).all()
    assert np.abs(slope * solution).max() <= 1e-6


def test_fit_remembers_a_bounded_number_of_samples() -> None:
    fit = RobustFit((1.0, 1.0, 1.0))
    rng = random.Random(0)
    for _ in range(20_000):
        fit.add((1, rng.getrandbits(rng.randint(1, 30)), rng.getrandbits(rng.randint(1, 30))), 1.0)
    assert fit.num_samples == 20_000
    assert sum(map(len, fit._buckets.values())) <= MAX_BUCKETS * BUCKET_SAMPLES  # noqa: SLF001


def test_backlog_is_the_predicted_time_less_that_of_the_running_step() -> None:
    clock = ManualClock(100.0)
    core = make_core(max_step_tokens=64, num_blocks=128, clock=clock)
    timing = WorkerTiming(max_step_tokens=64, clock=clock)
    assert timing.backlog_s(core.load(), now_s=100.0) == 0.0
    for first in (0, 100):
        submit(core, make_request(range(first, first + 100)))
    whole_s = timing.model.prompts_s(200, 2 * 100 * 101 // 2)
    assert timing.backlog_s(core.load(), now_s=100.0) == pytest.approx(whole_s)
    assert timing.backlog_s(core.load(), now_s=100.001) == pytest.approx(whole_s - 0.001)
    # A load is as of a step's end: no more than the running step can be over since.
    assert timing.backlog_s(core.load(), now_s=900.0) == pytest.approx(whole_s * 3 / 4)
    core.step()  # launched
    core.step()  # its results taken
    assert timing.backlog_s(core.load(), now_s=100.0) < whole_s * 0.8
