from array import array

import pytest

from common.config import RouterConfig
from common.timing import StepShape
from measure.simulate.cluster import run
from measure.simulate.records import Arrival, ClusterShape, NetworkShape
from measure.simulate.results import count_cached_tokens
from measure.simulate.timing import WindowPageSize
from router.tenants import Tenant
from tests.measure.simulate.builders import MODEL, make_arrivals, make_settings, make_shape

WINDOWS = WindowPageSize(num_tokens=64, page_bytes=16 * 3072)
STATES = WindowPageSize(num_tokens=1, page_bytes=1 << 20)
SHAPES = {
    "2P2D": make_shape(2, 2),
    "aggregated": make_shape(0, 3),
    "three routers": make_shape(2, 2, num_routers=3),
    "windows": make_shape(2, 2, windows=WINDOWS),
    "states": make_shape(2, 2, windows=STATES),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_run_every_request_gets_all_of_its_tokens_and_plausible_times(shape: ClusterShape) -> None:
    arrivals = make_arrivals(60)

    finished = run(shape, make_settings(), arrivals)

    assert len(finished.requests) == len(arrivals)
    for result, arrival in zip(finished.requests, arrivals, strict=True):
        assert result.is_complete, result
        assert result.num_output_tokens == arrival.num_output_tokens
        num_cached_tokens = count_cached_tokens(result)
        num_new_tokens = len(arrival.prompt) - num_cached_tokens
        assert num_new_tokens > 0
        assert result.ttft_s is not None
        assert result.ttft_s >= MODEL.prefill_s(num_new_tokens, num_cached_tokens) * 0.9
        if result.num_output_tokens > 1:
            assert result.tpot_s is not None
            assert result.tpot_s >= MODEL.itl_s(1, 0)
            assert max(result.gaps_s) >= result.tpot_s
            assert sum(result.gaps_s) == pytest.approx(result.e2e_s - result.ttft_s, abs=0.01)
    assert sum(map(count_cached_tokens, finished.requests)) > 0


def test_run_a_lone_requests_times_are_those_of_the_model() -> None:
    (arrival,) = make_arrivals(1)
    (result,) = run(make_shape(0, 1), make_settings(), [arrival]).requests

    num_prompt, num_output = len(arrival.prompt), arrival.num_output_tokens
    prefill_s = MODEL.step_s(
        StepShape(num_prefill_tokens=num_prompt, num_prefill_pairs=num_prompt * (num_prompt + 1) // 2)
    )
    decode_s = sum(MODEL.itl_s(1, num_prompt + i) for i in range(1, num_output))
    assert result.ttft_s == pytest.approx(prefill_s + 2 * 0.0005)  # the network: there and back
    assert sum(result.gaps_s) == pytest.approx(decode_s)


def test_answers_of_a_recurrent_model_wait_for_state_pages_though_blocks_are_free() -> None:
    arrivals = [Arrival(at_s=1.0, prompt=array("I", [idx] * 20), num_output_tokens=50) for idx in range(8)]

    def last_first_token_s(windows: WindowPageSize | None) -> float:
        finished = run(make_shape(0, 1, windows=windows), make_settings(), arrivals)
        assert all(result.is_complete for result in finished.requests)
        return max(result.ttft_s or 0.0 for result in finished.requests)

    # 8 pages are those of four sequences; the others begin when these have their 50 tokens.
    assert last_first_token_s(None) < 10 * MODEL.itl_s(8, 200)
    assert last_first_token_s(STATES) > 50 * MODEL.itl_s(1, 20)


def test_transfer_of_a_state_takes_the_time_of_its_bytes() -> None:
    arrivals = [Arrival(at_s=1.0, prompt=array("I", [7] * 100), num_output_tokens=9)]
    router = RouterConfig.model_validate({"metrics_port": None, "local_prefill_max_tokens": 0})
    settings = make_settings(router=router, network=NetworkShape(kv_bytes_per_s=1e6))
    times = [run(make_shape(1, 1, windows=windows), settings, arrivals).requests[0].e2e_s for windows in (None, STATES)]
    assert times[1] - times[0] == pytest.approx(2 * STATES.page_bytes / 1e6, rel=0.1)  # and the snapshot before it


def test_routers_that_choose_the_same_free_worker_queue_no_prompts_there() -> None:
    router = RouterConfig.model_validate(
        {"metrics_port": None, "local_prefill_max_tokens": 0, "max_prefill_wait_s": 0.005}
    )
    arrivals = [Arrival(at_s=1.0, prompt=array("I", [idx] * 500), num_output_tokens=2) for idx in (1, 2)]

    finished = run(make_shape(2, 1, num_blocks=128, num_routers=2), make_settings(router=router), arrivals)

    assert {result.server.prefill_worker for result in finished.requests if result.server} == {"prefill-0", "prefill-1"}


def test_tenant_finds_what_it_sent_before_and_nothing_of_another_tenant() -> None:
    senders = [Tenant(name=name, cache_salt=name) for name in ("a", "b", "a")]
    arrivals = [
        Arrival(at_s=float(idx), prompt=array("I", [7] * 100), num_output_tokens=1, tenant=tenant)
        for idx, tenant in enumerate(senders)
    ]

    finished = run(make_shape(0, 1), make_settings(), arrivals)

    assert [count_cached_tokens(result) for result in finished.requests] == [0, 0, 96]


def test_tenants_limits_apply_to_its_requests_alone() -> None:
    limited = Tenant(name="limited", max_queued=1, max_concurrent=1)
    arrivals = [
        Arrival(at_s=1.0, prompt=array("I", [idx] * 100), num_output_tokens=9, tenant=tenant)
        for idx, tenant in enumerate([limited] * 4 + [Tenant(name="free")] * 4)
    ]

    finished = run(make_shape(0, 1), make_settings(), arrivals)

    assert all(result.is_complete for result in finished.requests[4:])
    assert not all(result.is_complete for result in finished.requests[:4])


def test_requests_that_follow_from_others_are_recorded_in_order_of_arrival() -> None:
    def ask(at_s: float, num_left: int) -> Arrival:
        return Arrival(
            at_s=at_s,
            prompt=array("I", [num_left] * 40),
            num_output_tokens=5,
            follow_up=lambda result: [ask(result.end_s + 0.5, num_left - 1)] if num_left else [],
        )

    counts: list[int] = []
    finished = run(make_shape(1, 1), make_settings(), [ask(0.0, 2), *make_arrivals(20)], progress=counts.append)

    assert counts == list(range(1, 24))
    assert [result.index for result in finished.requests] == list(range(23))
    assert [result.due_s for result in finished.requests] == sorted(result.due_s for result in finished.requests)
    assert all(len(result.gaps_s) == result.num_wanted_tokens - 1 for result in finished.requests)


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
