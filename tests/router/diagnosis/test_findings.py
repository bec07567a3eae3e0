"""Situations made on purpose: the cause that a diagnosis names first, and what it promises of each change."""

from dataclasses import replace

import pytest

from common.config.router import TenantConfig
from common.ids import RequestId, WorkerId
from common.slo import Slo
from common.timing import StepModel, TimingModel
from kvrelay.v1 import worker_pb2
from router.diagnosis import changes
from router.diagnosis.answer_times import describe, headline
from router.diagnosis.findings import Cause, DiagnosisInput, find
from router.diagnosis.pool import DiagnosedPool, DiagnosedWorker
from router.diagnosis.recent_requests import RecentRequest
from router.hot_prefixes import ReportedHolder, ReportedPrefix

TIMING = TimingModel(
    prefill=StepModel(constant_s=0.01, per_prefill_token_s=0.001),
    decode=StepModel(constant_s=0.01, per_decode_s=0.001, per_context_token_s=1e-6, num_samples=100),
    max_step_tokens=512,
)
OF_30_MS = replace(TIMING, decode=StepModel(constant_s=0.02, per_decode_s=0.0005, num_samples=100))
USUAL = RecentRequest(
    request_id=RequestId("req-0"),
    tenant="a",
    ended_s=0.0,
    num_prompt_tokens=1000,
    num_computed_tokens=500,
    num_evicted_tokens=0,
    num_output_tokens=101,
    line_s=0.0,
    worker_queue_s=0.01,
    prefill_s=0.5,
    transfer_exposed_s=0.01,
    ttft_s=0.53,
    tpot_s=0.012,
    num_attempts=1,
)


def make_worker(
    name: str, *, busy: float = 0.5, batch: float = 1.0, slowness: float = 0.0, used: int = 100
) -> DiagnosedWorker:
    """Return a worker that decoded 1,000 steps in its busy share of 60 s, half of them bound by reading weights."""
    steps = worker_pb2.StepTotals(
        window_s=60.0,
        covered_s=60.0,
        num_decode_steps=1000,
        num_decodes=round(1000 * batch),
        num_context_tokens=round(1000 * batch * 1000),
        decode_s=60.0 * busy,
        decode_memory_s=30.0 * busy,
        decode_weights_s=24.0 * busy,
        decode_compute_s=6.0 * busy,
    )
    status = worker_pb2.WorkerStatus(
        load=worker_pb2.LoadReport(num_blocks=1000), num_used_blocks=used, num_cached_blocks=300, recent_steps=[steps]
    )
    return DiagnosedWorker(worker_id=WorkerId(name), status=status, timing=TIMING, slowness=slowness)


def make_pool(name: str, *workers: DiagnosedWorker) -> DiagnosedPool:
    return DiagnosedPool(name=name, workers=workers, window_s=60.0)


def make_view(
    *requests: RecentRequest, prefill: DiagnosedPool | None = None, decode: DiagnosedPool | None = None
) -> DiagnosisInput:
    return DiagnosisInput(
        requests=requests,
        reader=prefill or make_pool("prefill", make_worker("p0"), make_worker("p1")),
        decoder=decode or make_pool("decode", make_worker("d0"), make_worker("d1")),
    )


def times_of(waits_s: list[float]) -> changes.PromptTimes:
    return changes.PromptTimes(waits_s=waits_s, prefills_s=[1.0] * len(waits_s), alone_s=1.0)


def causes(view: DiagnosisInput) -> list[Cause]:
    return [finding.cause for finding in find(view)]


def test_idle_cluster_has_nothing_to_complain_of() -> None:
    assert causes(make_view(USUAL)) == []
    assert headline([], window_s=60, slo=None) == "no request was answered in the last 60 s"
    assert headline([], window_s=60, slo=None, num_running=3).endswith("60 s; 3 under way")


def test_prompts_that_wait_are_bound_by_prefill_and_a_worker_more_shortens_the_wait() -> None:
    busy = make_pool("prefill", make_worker("p0", busy=0.75), make_worker("p1", busy=0.75))
    (first, *_) = find(make_view(replace(USUAL, worker_queue_s=2.0, ttft_s=2.6), prefill=busy))
    assert first.cause is Cause.PREFILL
    assert first.predictions[0].expected == pytest.approx(0.285, abs=0.001)
    assert first.lost_s == pytest.approx(2.0)
    assert "busy 75% of the time" in first.text
    assert "memory traffic needs at least 50%, arithmetic 10%, and 50% is neither" in first.text
    assert "a prefill worker more: wait 2 s → about 0.28 s (0.2 to 2)" in first.changes[0]


def test_saturated_pool_with_few_requests_tells_that_a_wait_cannot_be_predicted() -> None:
    pool = make_pool("prefill", make_worker("p0", busy=1.0))
    change = changes.one_more_reader(pool, times_of([3.0]))
    assert "100% more prompts per second" in change.text
    assert "cannot be predicted" in change.text
    assert change.predicted is None


def test_saturated_pool_serves_at_twice_the_rate_with_twice_the_workers() -> None:
    pool = make_pool("prefill", make_worker("p0", busy=1.0))
    predicted = changes.one_more_reader(pool, times_of([4.0, 6.0] * 8)).predicted
    assert predicted is not None
    assert (predicted.now, predicted.expected) == pytest.approx((5.0, 2.0))
    assert predicted.low < 2.0 < predicted.high


def test_prompts_that_share_steps_leave_the_wait_uncertain() -> None:
    pool, times = make_pool("prefill", make_worker("p0", busy=1.0)), times_of([5.0] * 16)
    predicted = changes.one_more_reader(pool, replace(times, alone_s=0.5)).predicted
    assert predicted is not None
    assert (predicted.low, predicted.expected, predicted.high) == pytest.approx((2.0, 2.25, 2.5))


def on_shared_cores(pool: DiagnosedPool, *, num_idle: float, num_cores: int = 2) -> DiagnosedPool:
    """Return the pool on a host with that many idle cores, whose workers compute on `num_cores` each."""
    workers = []
    for each in pool.workers:
        status = worker_pb2.WorkerStatus(num_idle_cores=num_idle, device=worker_pb2.DeviceReport(num_cores=num_cores))
        status.MergeFrom(each.status)
        workers.append(replace(each, status=status))
    return replace(pool, workers=tuple(workers))


def test_prefill_worker_that_would_find_no_idle_cores_may_leave_the_wait_as_it_is() -> None:
    pool, times = make_pool("prefill", make_worker("p0", busy=1.0)), times_of([4.0, 6.0] * 8)
    whole = changes.one_more_reader(pool, times).predicted
    half = changes.one_more_reader(on_shared_cores(pool, num_idle=1.0), times)
    none = changes.one_more_reader(on_shared_cores(pool, num_idle=0.0), times).predicted
    assert whole is not None
    assert half.predicted is not None
    assert none is not None
    assert (whole.expected, half.predicted.expected, none.expected) == pytest.approx((2.0, 3.5, 5.0))
    assert (half.predicted.low, half.predicted.high) == pytest.approx((whole.low, 5.0))
    assert "50% more prompts per second; its host has 1.0 idle cores of the 2.0 that it would use" in half.text
    assert changes.one_more_reader(on_shared_cores(pool, num_idle=2.0), times).predicted == whole


def test_decode_worker_without_idle_cores_leaves_a_step_between_its_bounds() -> None:
    pool = make_pool("decode", make_worker("d0", busy=0.5, batch=20.0))  # steps of 30 ms, 15 ms by reading weights
    alone = changes.one_more_decoder(replace(pool, workers=(replace(pool.workers[0], timing=OF_30_MS),))).predicted
    shared = replace(pool, workers=(replace(pool.workers[0], timing=OF_30_MS),))
    change = changes.one_more_decoder(on_shared_cores(shared, num_idle=0.0))
    assert alone is not None
    assert change.predicted is not None
    # 12 ms of weights and 3 ms of KV, of which half stays, and 15 ms that may all be of the batch.
    assert change.predicted.low == pytest.approx(0.012 + 0.0015 + 0.0075)
    assert change.predicted.low < alone.low
    assert change.predicted.expected == alone.expected
    assert change.predicted.high == pytest.approx(2 * alone.expected)
    assert change.text.endswith("by worker and fit; its host has 0.0 idle cores of the 1.0 that it would use)")


def test_pool_that_idles_beside_a_busy_one_could_give_a_worker() -> None:
    busy = make_pool("prefill", make_worker("p0", busy=0.9))
    idle = make_pool("decode", make_worker("d0", busy=0.2), make_worker("d1", busy=0.2))
    (first, *_) = find(make_view(replace(USUAL, worker_queue_s=2.0, ttft_s=2.6), prefill=busy, decode=idle))
    assert first.changes[1].startswith("another split: decode workers are busy 20% of the time, prefill workers 90%")


def test_large_batches_are_bound_by_decode_and_the_changes_say_what_they_bring() -> None:
    full = make_pool("decode", make_worker("d0", busy=5 / 6, batch=20.0), make_worker("d1", busy=5 / 6, batch=20.0))
    (first, *_) = find(make_view(replace(USUAL, tpot_s=0.05), decode=full))
    assert first.cause is Cause.DECODE
    assert first.lost_s == pytest.approx((0.05 - 0.012) * 100)
    assert first.changes[0].startswith("a decode worker more: batch 20.0 → 13.3, a step 50 ms → 36.7 ms")
    assert "reading weights takes 40% of a decode step; int8 at most 19% and int4 at most 28% less" in first.changes[1]
    assert "no token was drafted" in first.changes[2]


def test_gaps_that_steps_do_not_explain_are_stalls() -> None:
    (first, *_) = find(make_view(replace(USUAL, tpot_s=0.08)))
    assert first.cause is Cause.DECODE_STALLS
    assert first.lost_s == pytest.approx((0.08 - 0.03) * 100)
    assert first.text.startswith("a gap between tokens is 80 ms, and a decode step 30 ms")


def test_prefixes_that_were_evicted_before_their_use_are_named_with_what_they_cost() -> None:
    (first, *_) = find(make_view(replace(USUAL, num_evicted_tokens=400, worker_queue_s=0.5, ttft_s=1.1)))
    assert first.cause is Cause.CACHE_EVICTIONS
    assert first.lost_s == pytest.approx(0.8 * (0.5 + 0.5))
    assert first.text.startswith("80% of the computed prompt tokens had been cached")
    assert "up to 0.8 s less for a request" in first.changes[0]


def test_evicted_prefixes_that_are_asked_for_most_often_are_named() -> None:
    holder = ReportedHolder(worker_id=WorkerId("p0"), num_blocks=8)
    prefixes = [
        ReportedPrefix(digest=digest, num_blocks=8, num_requests=3.0, age_s=1.0, holders=holders)
        for digest, holders in (("aa", (holder,)), ("bb", ()))
    ]
    view = replace(make_view(replace(USUAL, num_evicted_tokens=400, worker_queue_s=0.5, ttft_s=1.1)), prefixes=prefixes)
    assert find(view)[0].text.endswith("asked for most often and not held now: bb (0 of 8 blocks held)")


def test_tenant_with_most_of_the_work_is_named_before_the_pool_that_it_fills() -> None:
    hot = [replace(USUAL, tenant="hot", num_computed_tokens=2000, worker_queue_s=3.0, ttft_s=3.6)] * 4
    others = [replace(USUAL, tenant="b", worker_queue_s=1.0, ttft_s=1.6)] * 4
    first, second, *_ = find(make_view(*hot, *others))
    assert (first.cause, second.cause) == (Cause.HOT_TENANT, Cause.PREFILL)
    assert "tenant hot asks for 80% of the computed tokens; its requests wait 3 s for prefill, those of others 1 s" in (
        first.text
    )
    assert first.lost_s == pytest.approx(0.8 * 2.0)
    (option,) = first.options
    keys = {word for word in option.text.split() if "_" in word}
    assert keys
    assert keys <= TenantConfig.model_fields.keys(), "an operator looks for a key that tenants do not have"


def test_only_tenant_is_never_the_cause() -> None:
    assert causes(make_view(replace(USUAL, worker_queue_s=3.0, ttft_s=3.6)))[0] is Cause.PREFILL


def test_slow_worker_comes_before_every_wall() -> None:
    pool = make_pool(
        "decode", make_worker("d0", busy=5 / 6, batch=20.0), make_worker("d1", busy=5 / 6, batch=20.0, slowness=5.0)
    )
    first, second, *_ = find(make_view(replace(USUAL, tpot_s=0.05), decode=pool))
    assert (first.cause, second.cause) == (Cause.SLOW_WORKER, Cause.DECODE)
    assert "steps of d1 take 5.0 times as long" in first.text


@pytest.mark.parametrize(("role", "time_s"), [("prefill", 0.5), ("decode", 1.2)])
def test_slow_worker_costs_only_the_time_that_requests_spend_in_its_pool(role: str, time_s: float) -> None:
    pools = {role: make_pool(role, make_worker("w0"), make_worker("w1", slowness=5.0))}
    (first, *_) = find(make_view(USUAL, **pools))
    assert (first.cause, first.pool) == (Cause.SLOW_WORKER, role)
    assert first.lost_s == pytest.approx(time_s * 0.8 / 2)


def test_answers_whose_tokens_all_come_at_once_lose_nothing_between_tokens() -> None:
    full = make_pool("decode", make_worker("d0", busy=5 / 6, batch=20.0))
    assert causes(make_view(replace(USUAL, tpot_s=0.0), decode=full)) == []


def test_prompts_that_wait_for_pages_of_decode_workers_are_not_bound_by_prefill() -> None:
    full = make_pool("decode", make_worker("d0", used=960))
    view = make_view(replace(USUAL, line_s=2.0, ttft_s=2.6), decode=full)
    (first, *_) = find(view)
    assert first.cause is Cause.DECODE_PAGES
    assert first.text == "decode workers hold 960 of 1000 pages: prompts wait 2 s for answers to end"


def test_transfer_that_first_tokens_wait_for_is_named() -> None:
    assert causes(make_view(replace(USUAL, transfer_exposed_s=2.0, ttft_s=2.6)))[0] is Cause.TRANSFER


def test_transfer_that_is_slower_than_its_host_allows_names_the_peer() -> None:
    rates = [
        worker_pb2.LinkRate(
            transport=worker_pb2.KV_TRANSPORT_GRPC,
            most_bytes_per_s=2e9,
            bytes_per_s=bytes_per_s,
            peer_worker_id=peer,
            num_pulls=9,
        )
        for peer, bytes_per_s in (("p0", 1.5e9), ("p1", 0.2e9))
    ]
    worker = make_worker("d0")
    worker.status.link_rates.extend(rates)
    view = make_view(replace(USUAL, transfer_exposed_s=2.0, ttft_s=2.6), decode=make_pool("decode", worker))
    assert find(view)[0].text.endswith(
        "; pulls from p1 by grpc reach 0.2 GB/s, 10% of what that moves between pages of one host"
    )


def test_tail_names_whose_requests_wait_for_what_and_their_plans_largest_cost() -> None:
    usual = [replace(USUAL, request_id=RequestId(f"req-{i}")) for i in range(38)]
    late = [
        replace(USUAL, request_id=RequestId(name), tenant="b", line_s=line_s, ttft_s=line_s + 0.52)
        for name, line_s in (("late", 20.0), ("latest", 30.0))
    ]
    known = {RequestId("late"): {"queue": 20.0, "prefill": 0.5}, RequestId("latest"): {"queue": 1.0, "prefill": 0.5}}
    view = replace(make_view(*usual, *late), terms=lambda wanted: {each: known[each] for each in wanted})
    (tail,) = (each for each in find(view) if each.cause is Cause.TAIL)
    assert tail.text == (
        "the slowest 2 of 40 requests wait 25.5 s for their first token, half of all at most 530 ms: 25 s of it is the"
        " router's line; 500 tokens are computed for each of them, 500 for all; 100% of them are tenant b's, as are 5%"
        " of all; the policy's largest cost was queue in 2 of 2 of their plans"
    )
    assert tail.lost_s == pytest.approx((25.52 - 0.53) / 20)
    assert "`kvrelay why --request latest`" in tail.changes[0]


def test_requests_that_are_all_about_as_slow_have_no_tail() -> None:
    assert Cause.TAIL not in causes(make_view(*[replace(USUAL, ttft_s=0.5 + 0.02 * i) for i in range(40)]))


def test_worker_that_measured_no_floor_promises_nothing_of_fewer_bits() -> None:
    status = worker_pb2.WorkerStatus(recent_steps=[worker_pb2.StepTotals(window_s=60.0, decode_s=3.0)])
    pool = make_pool("decode", DiagnosedWorker(worker_id=WorkerId("d0"), status=status, timing=TIMING))
    assert "cannot tell" in changes.fewer_weight_bits(pool).text


def test_headline_tells_percentiles_and_the_share_within_the_objectives() -> None:
    text = headline([USUAL, replace(USUAL, ttft_s=5.47)], window_s=60, slo=Slo(ttft_s=1.0, tpot_s=0.1))
    assert text.startswith("2 requests answered in 60 s: TTFT p50 3 s")
    assert text.endswith("50% within their objectives")


def test_one_request_is_told_by_its_longest_parts_beside_the_usual_ones() -> None:
    slow = replace(USUAL, worker_queue_s=4.0, ttft_s=4.6, num_evicted_tokens=100, num_attempts=2)
    text, sentences = describe(slow, [USUAL])
    assert text.startswith("req-0: 5.8 s in all, first token after 4.6 s; 500 of 1000 prompt tokens computed")
    assert "100 of the computed tokens had been cached" in text
    assert "planned 2 times" in text
    assert sentences[0] == "queued at the worker: 4 s, usually 0.01 s"
    assert sentences[1].startswith("first to last token: 1.2 s")


def test_wait_in_an_idle_pool_is_predicted_like_any_other() -> None:
    pool = make_pool("prefill", make_worker("p0", busy=0.0))
    assert "wait 2 s → about" in changes.one_more_reader(pool, times_of([2.0])).text


def test_worker_slower_than_others_predict_is_named_before_the_router_notices() -> None:
    slow = make_worker("d1", busy=5 / 6, batch=20.0)  # steps of 50 ms
    model = StepModel(constant_s=0.0055, per_decode_s=0.0005, num_samples=100)
    fast = replace(make_worker("d0", busy=0.175, batch=10.0), timing=replace(TIMING, decode=model))
    (first, *_) = find(make_view(replace(USUAL, tpot_s=0.05), decode=make_pool("decode", fast, slow)))
    assert first.cause is Cause.SLOW_WORKER
    assert first.text.startswith("steps of d1 take 3.2 times as long")


def test_worker_with_batches_that_no_other_has_run_is_not_called_slow() -> None:
    full, model = make_worker("d1", busy=5 / 6, batch=20.0), StepModel(constant_s=0.009, num_samples=100)
    light = replace(make_worker("d0", busy=0.15, batch=1.0), timing=replace(TIMING, decode=model))
    assert Cause.SLOW_WORKER not in causes(make_view(USUAL, decode=make_pool("decode", light, full)))


def test_steps_are_not_compared_with_a_guess() -> None:
    guess = replace(TIMING, decode=replace(TIMING.decode, num_samples=0))
    workers = [replace(make_worker(name, busy=5 / 6, batch=20.0), timing=guess) for name in ("d0", "d1")]
    found = causes(make_view(replace(USUAL, tpot_s=0.05), decode=make_pool("decode", *workers)))
    assert Cause.DECODE not in found
    assert "cannot be predicted yet" in changes.one_more_decoder(make_pool("decode", *workers)).text


def test_model_that_is_far_off_predicts_no_step() -> None:
    change = changes.one_more_decoder(make_pool("decode", make_worker("d0", busy=5 / 6, batch=1.0)))
    assert change.predicted is None
    assert change.text.endswith("cannot be predicted: steps take 50 ms and their model says 12 ms")


def test_walls_divide_the_time_of_a_pool() -> None:
    pool = make_pool("decode", make_worker("d0", busy=0.8), make_worker("d1", busy=0.4))
    walls = pool.walls(60.0).shares
    assert (walls.busy, walls.memory, walls.compute) == pytest.approx((0.6, 0.3, 0.06))
    assert (walls.overhead, walls.waiting, walls.link) == pytest.approx((0.3, 0.4, 0.0))
    assert walls.binds == "waiting"


def test_overhead_is_beyond_the_bound_of_each_kind_of_step() -> None:
    steps = worker_pb2.StepTotals(
        window_s=60.0,
        covered_s=60.0,
        prefill_s=20.0,
        prefill_compute_s=15.0,
        prefill_memory_s=1.0,
        decode_s=20.0,
        decode_memory_s=25.0,
        decode_compute_s=1.0,
    )
    pool = make_pool("decode", replace(make_worker("d0"), status=worker_pb2.WorkerStatus(recent_steps=[steps])))
    assert pool.overhead_share == pytest.approx(5 / 40)
    assert pool.walls(60.0).shares.overhead == pytest.approx(5 / 60)


def test_pool_that_was_not_measured_is_bound_by_its_steps() -> None:
    steps = worker_pb2.StepTotals(window_s=60.0, covered_s=60.0, num_decode_steps=1, decode_s=50.0)
    worker = replace(make_worker("d0"), status=worker_pb2.WorkerStatus(recent_steps=[steps]))
    walls = make_pool("decode", worker).walls(60.0).shares
    assert (walls.binds, walls.overhead) == ("steps", 0.0)
    assert make_pool("decode", replace(worker, status=worker_pb2.WorkerStatus())).walls(60.0).shares.binds == ""
