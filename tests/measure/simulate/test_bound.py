"""The bound on goodput: against every schedule of tiny fleets, against real policies, and where it is known."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.slo import Slo
from common.timing import StepModel, StepShape, TimingModel
from measure.experiment.replay import trace_workload
from measure.experiment.users import Users
from measure.figures import summarize
from measure.simulate.bound import Bound, BoundFleet, goodput_bound
from measure.simulate.bound_work import owned_from
from measure.simulate.cluster import run
from measure.simulate.policies.registry import REPLAY_POLICIES
from measure.simulate.roofline import Roofline
from measure.simulate.timing import FittedTimes, StepTimes
from measure.workload.traces import Trace, TraceRequest
from router.parts import Substitutes
from tests.measure.simulate.builders import MODEL, make_settings, make_shape
from tests.measure.simulate.schedules import Search

LLAMA = Roofline.preset("llama-70b", "h100-tp4")
PRODUCTS = StepModel(constant_s=0.0, per_prefill_token_s=0.01, per_decode_s=1.0)


def times_of(model: StepModel) -> FittedTimes:
    return FittedTimes(TimingModel(prefill=model, decode=model, max_step_tokens=1000))


def make_request(*block_ids: int, at_s: float = 0.0, num_tokens: int = 0, num_output_tokens: int = 1) -> TraceRequest:
    return TraceRequest(
        arrival_s=at_s,
        num_prompt_tokens=num_tokens or len(block_ids),
        num_output_tokens=num_output_tokens,
        block_ids=block_ids,
    )


def make_trace(*requests: TraceRequest, block_size: int = 1) -> Trace:
    return Trace(name="small", block_size=block_size, requests=requests)


def make_fleet(num_prefill: int, num_decode: int, times: StepTimes, *, max_step_tokens: int = 1000) -> BoundFleet:
    return BoundFleet(
        num_prefill=num_prefill, num_decode=num_decode, block_size=1, max_step_tokens=max_step_tokens, times=times
    )


def prompts(count: int, *, num_tokens: int = 101) -> Trace:
    """Return requests for one token each that arrive together and share nothing."""
    return make_trace(*(make_request(number, num_tokens=num_tokens) for number in range(count)), block_size=num_tokens)


def tiny_case(seed: int) -> tuple[Trace, BoundFleet, Slo]:
    """Return two to four requests for one or two workers, with prefixes that some share."""
    draw = random.Random(seed)
    model = StepModel(
        constant_s=draw.choice([0, 0.2, 0.5]),
        per_prefill_token_s=draw.choice([0.5, 1.0]),
        per_prefill_pair_s=0.05,
        per_decode_s=draw.choice([0.2, 0.5]),
        per_context_token_s=0.05,
    )
    requests: list[TraceRequest] = []
    at_s = 0.0
    for number in range(draw.choice([2, 3, 3, 4])):
        num_tokens = draw.randrange(1, 4)
        num_shared = draw.randrange(num_tokens + 1)
        own = [100 * (number + 1) + position for position in range(num_tokens - num_shared)]
        requests.append(make_request(*range(num_shared), *own, at_s=at_s, num_output_tokens=draw.choice([1, 1, 2, 3])))
        at_s += draw.choice([0, 0, 0.5, 1, 2])
    num_prefill, num_decode = draw.choice([(0, 1), (0, 1), (1, 1), (0, 2)]) if len(requests) < 4 else (0, 1)
    fleet = BoundFleet(
        num_prefill=num_prefill,
        num_decode=num_decode,
        block_size=draw.choice([1, 2]),
        max_step_tokens=draw.choice([2, 3]),
        times=times_of(model),
    )
    slo = Slo(ttft_s=draw.choice([2.0, 3.0, 4.0, 5.0]), tpot_s=draw.choice([1.0, 1.5, 3.0]))
    return make_trace(*requests), fleet, slo


# ── against every schedule, and against policies ────────────────────────────────────────────────────────────────────


def test_no_schedule_of_a_tiny_fleet_is_better_and_most_often_one_is_as_good() -> None:
    num_tight = 0
    for seed in range(30):
        trace, fleet, slo = tiny_case(seed)
        best, bound = Search(trace, fleet, slo).best(), goodput_bound(trace, fleet, slo).num_good
        assert best <= bound, f"case {seed}"
        num_tight += best == bound
    assert num_tight >= 18, num_tight


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["predictive", "round_robin", "mooncake", "greedy_perfect_signals"]),
    shape=st.sampled_from([(0, 1), (0, 2), (1, 1), (2, 1)]),
    rate_per_s=st.sampled_from([10.0, 50.0, 400.0]),
    ttft_s=st.sampled_from([0.03, 0.1, 0.4]),
    tpot_s=st.sampled_from([0.02, 0.025, 0.06]),
)
def test_no_policy_is_better(
    seed: int, policy: str, shape: tuple[int, int], rate_per_s: float, ttft_s: float, tpot_s: float
) -> None:
    slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s, ttft_tokens=256)
    trace = random_trace(seed, rate_per_s=rate_per_s)
    done = run(
        make_shape(*shape),
        replace(make_settings(tpot_slo_s=tpot_s), substitutes=Substitutes(policy=REPLAY_POLICIES[policy])),
        Users(trace_workload(trace), slo=slo).arrivals(),
    )
    times = FittedTimes(MODEL)
    fleet = BoundFleet(num_prefill=shape[0], num_decode=shape[1], block_size=16, max_step_tokens=512, times=times)
    assert summarize(done.requests, slo=slo).num_good <= goodput_bound(trace, fleet, slo).num_good


def random_trace(seed: int, *, rate_per_s: float) -> Trace:
    """Return requests with shared prefixes, in blocks of 32 tokens."""
    draw = random.Random(seed)
    at_s, requests = 0.0, []
    for number in range(draw.randrange(4, 16)):
        num_tokens = draw.randrange(1, 400)
        kind, num_shared = draw.randrange(3), draw.randrange(8)
        ids = [
            1000 * kind + place if place < num_shared else 10_000 + 100 * number + place
            for place in range(-(-num_tokens // 32))
        ]
        requests.append(
            make_request(*ids, at_s=at_s, num_tokens=num_tokens, num_output_tokens=draw.choice([1, 2, 10, 40]))
        )
        at_s += draw.expovariate(rate_per_s)
    return make_trace(*requests, block_size=32)


# ── where it is known ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(0, 2), (1, 1)])
def test_prompts_that_come_together_are_good_as_far_as_workers_get_in_time(num_prefill: int, num_decode: int) -> None:
    fleet = make_fleet(num_prefill, num_decode, times_of(PRODUCTS))
    # A prompt takes 1.01 s and two workers have 2.02 s each.
    assert goodput_bound(prompts(7), fleet, Slo(ttft_s=2.02, tpot_s=1.0)) == Bound(num_requests=7, num_good=4)


def test_prefill_workers_do_not_decode() -> None:
    # Both decode for 4 s by 1 + 2 * 4 s at the latest, each token a second of one worker's time.
    requests = [make_request(number, num_output_tokens=5) for number in range(4)]
    slo = Slo(ttft_s=1.0, tpot_s=2.0)
    times = times_of(PRODUCTS)
    assert goodput_bound(make_trace(*requests), make_fleet(1, 1, times), slo).num_good == 2
    assert goodput_bound(make_trace(*requests), make_fleet(0, 2, times), slo).num_good == 4


def test_without_an_objective_every_request_can_be_good() -> None:
    fleet = make_fleet(0, 1, times_of(PRODUCTS))
    assert goodput_bound(prompts(50), fleet, Slo(ttft_s=float("inf"), tpot_s=1.0)).num_good == 50
    assert goodput_bound(prompts(50), fleet, Slo(ttft_s=0.0, tpot_s=1.0)).num_good == 0


# ── its parts ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_owns_what_no_earlier_prompt_holds_in_full_pages() -> None:
    trace = make_trace(
        make_request(1, 2, 3, num_tokens=20),  # 8, 8 and 4 tokens
        make_request(1, 2, 3, num_tokens=24),  # shares 20, of which 16 are in full pages of 8
        make_request(1, 2, 3, 4, num_tokens=32),
        make_request(5, 2, 3, num_tokens=24),  # other beginning, other KV
        make_request(1, 2, num_tokens=13),  # its own tail
        block_size=8,
    )
    assert owned_from(trace, 8) == [0, 16, 24, 0, 8]
    assert owned_from(trace, 4) == [0, 20, 24, 0, 12]


@pytest.mark.parametrize("times", [LLAMA, Roofline.preset("qwen3-8b", "h100"), FittedTimes(MODEL)])
@given(
    num_tokens=st.integers(0, 8192),
    depth=st.integers(0, 100_000),
    num_decodes=st.integers(0, 256),
    context=st.integers(1, 100_000),
)
def test_no_step_is_faster_than_its_floors(
    times: StepTimes, num_tokens: int, depth: int, num_decodes: int, context: int
) -> None:
    if num_tokens + num_decodes == 0:
        return
    shape = StepShape(
        num_prefill_tokens=num_tokens,
        num_prefill_pairs=num_tokens * depth + num_tokens * (num_tokens + 1) // 2,
        num_decodes=num_decodes,
        num_context_tokens=num_decodes * context,
    )
    fixed_s, per_context_s = times.decode_line(num_decodes)
    step_s = times.step_s(shape) if num_tokens else fixed_s + per_context_s * shape.num_context_tokens
    for floor in times.floors():
        assert floor.seconds(shape) <= step_s * (1 + 1e-12)
