"""Situations made on purpose: which cause a diagnosis names first, and how much time it has cost."""

from dataclasses import replace

import pytest

from common.config.router import TenantConfig
from common.ids import RequestId, WorkerId
from common.slo import Slo
from common.timing import StepModel
from kvrelay.v1 import worker_pb2
from router.diagnosis import changes
from router.diagnosis.answer_times import describe, headline
from router.diagnosis.finding import Cause, DiagnosisInput
from router.diagnosis.findings import find
from router.diagnosis.in_line import describe_line, waits_by_tenant
from router.diagnosis.pool import DiagnosedPool
from router.fleet.hot_prefixes import ReportedHolder, ReportedPrefix
from router.observe.recent_requests import RecentRequest
from router.placement.waits import WaitCause, WaitingRequest, Waits
from tests.router.diagnosis.pools import TIMING, make_pool, make_worker

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


def make_view(
    *requests: RecentRequest, prefill: DiagnosedPool | None = None, decode: DiagnosedPool | None = None
) -> DiagnosisInput:
    return DiagnosisInput(
        requests=requests,
        reader=prefill or make_pool("prefill", make_worker("p0"), make_worker("p1")),
        decoder=decode or make_pool("decode", make_worker("d0"), make_worker("d1")),
    )


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


def test_wait_that_an_idle_pool_does_not_explain_predicts_nothing_of_a_worker_more() -> None:
    idle = make_pool("prefill", make_worker("p0", busy=0.02), make_worker("p1", busy=0.02))
    (first, *_) = find(make_view(replace(USUAL, worker_queue_s=9.0, ttft_s=9.6), prefill=idle))
    assert first.cause is Cause.PREFILL
    assert first.predictions == ()
    assert "busy 2% of the time does not explain a wait of 9 s" in first.changes[0]


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


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_with_ranks_are_not_advised_to_round_weights_which_ranks_refuse(role: str) -> None:
    pools = {
        "prefill": make_pool("prefill", make_worker("p0")),
        "decode": make_pool("decode", make_worker("d0", busy=5 / 6, batch=20.0)),
    }
    pools[role].workers[0].status.num_ranks = 2
    waits = Waits({WaitCause.DECODE_PACE: 2.0})
    found = find(make_view(replace(USUAL, line_s=2.0, waits=waits, ttft_s=2.6, tpot_s=0.05), **pools))
    assert {Cause.DECODE, Cause.DECODE_PACE} <= {each.cause for each in found}
    assert not any("weights:" in text for each in found for text in each.changes)


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


def test_requests_that_wait_for_room_on_decode_workers_are_not_bound_by_prefill() -> None:
    full = make_pool("decode", make_worker("d0", used=960, busy=1.0, batch=20.0))
    waited = replace(USUAL, line_s=2.0, waits=Waits({WaitCause.DECODE_ROOM: 2.0}), ttft_s=2.6, tpot_s=0.06)
    found = find(make_view(waited, decode=full))
    (first,) = (each for each in found if each.cause is Cause.DECODE_ROOM)
    assert first.text == (
        "requests wait 2 s in line for pages: batches are of 20.0, and answers hold 96% of the pages;"
        " decode workers are busy 100% of the time"
    )
    assert first.changes[0].startswith("a decode worker more: 100% more answers at the same pace")
    assert "more pages on each (num_blocks, kv_dtype int8)" in first.changes[0]
    (step,) = (each for finding in found for each in finding.predictions)
    assert step.high >= step.now, "those that wait fill the batch of a new worker, and steps take as long as before"
    assert Cause.PREFILL not in {each.cause for each in found}


def test_requests_that_wait_for_places_while_pages_are_free_ask_for_no_pages() -> None:
    # 1,000 pages of 16 tokens hold 16 answers of 1,000.
    full = make_pool("decode", make_worker("d0", used=250, busy=1.0, batch=4.0, places=4))
    waited = replace(USUAL, line_s=2.0, waits=Waits({WaitCause.DECODE_ROOM: 2.0}), ttft_s=2.6)
    (first,) = (each for each in find(make_view(waited, decode=full)) if each.cause is Cause.DECODE_ROOM)
    assert "in line for one of the 4 places in batches (max_running): batches are of 4.0" in first.text
    assert "more places on each (max_running)" in first.changes[0]
    assert "num_blocks" not in first.changes[0], "an operator would buy memory that stays empty"


def test_requests_that_wait_for_state_pages_ask_for_memory_and_not_for_blocks() -> None:
    worker = make_worker("d0", used=30, busy=1.0, batch=4.0)
    worker.status.load.num_window_pages, worker.status.load.num_promised_window_pages = 12, 11
    waited = replace(USUAL, line_s=2.0, waits=Waits({WaitCause.DECODE_ROOM: 2.0}), ttft_s=2.6)
    found = find(make_view(waited, decode=make_pool("decode", worker)))
    (first,) = (each for each in found if each.cause is Cause.DECODE_ROOM)
    assert "in line for pages of windows or states, of which 92% are promised: batches are of 4.0" in first.text
    assert "more memory on each (kv_memory_gib)" in first.changes[0]
    assert "num_blocks" not in first.changes[0], "more blocks would come with no more pages of states"


def test_requests_that_only_wait_so_far_are_the_first_finding_of_a_stuck_cluster() -> None:
    waiting = [WaitingRequest(tenant="a", waits=Waits({WaitCause.DECODE_ROOM: wait_s})) for wait_s in (9.0, 3.0)]
    (only,) = find(replace(make_view(), waiting=waiting))
    assert (only.cause, only.lost_s) == (Cause.DECODE_ROOM, 6.0)
    answered = replace(USUAL, ttft_s=0.6)
    first, *_ = find(replace(make_view(answered), waiting=waiting))
    assert (first.cause, first.lost_s) == (Cause.DECODE_ROOM, 4.0)
    assert describe_line(waiting) == (
        "2 requests wait in line for up to 9 s, mostly for a slot and pages on a decode worker"
    )
    assert describe_line([]) == ""


def test_tenants_are_listed_by_their_waiting_requests_then_by_what_they_have_waited() -> None:
    limit, room = Waits({WaitCause.TENANT_LIMIT: 6.0}), Waits({WaitCause.DECODE_ROOM: 2.0})
    answered = [replace(USUAL, tenant=name, waits=waits) for name, waits in (("slow", limit), ("quick", room))]
    waiting = [WaitingRequest(tenant="quick", waits=room), *[WaitingRequest(tenant="new", waits=limit)] * 2]
    found = waits_by_tenant([*answered, replace(USUAL, tenant="never")], waiting)
    assert [(each.tenant, each.num_waiting, each.longest_wait_s, each.mean_wait_s) for each in found] == [
        *(("new", 2, 6.0, 0.0), ("quick", 1, 2.0, 2.0), ("slow", 0, 0.0, 6.0))
    ]
    assert found[0].mostly_for == "the tenant's own requests (max_concurrent)"
    many = [WaitingRequest(tenant=f"{number}", waits=room) for number in range(9)]
    assert len(waits_by_tenant([], many)) == 5


def test_requests_that_wait_for_their_tenants_limit_ask_for_no_worker() -> None:
    waited = replace(USUAL, tenant="capped", line_s=6.0, waits=Waits({WaitCause.TENANT_LIMIT: 6.0}), ttft_s=6.6)
    (first, *rest) = find(make_view(waited, USUAL))
    assert first.cause is Cause.TENANT_LIMIT
    assert first.lost_s == pytest.approx(3.0)
    assert first.text.startswith("requests of tenant capped wait 6 s in line for each other")
    assert first.changes == ("a higher max_concurrent for tenant capped",)
    assert not {Cause.PREFILL, Cause.HOT_TENANT} & {each.cause for each in rest}


def test_requests_that_wait_while_no_worker_is_there_are_not_bound_by_prefill() -> None:
    (first, *rest) = causes(
        make_view(replace(USUAL, line_s=9.0, waits=Waits({WaitCause.WORKER: 9.0}), num_attempts=2, ttft_s=9.6))
    )
    assert first is Cause.NO_WORKER
    assert Cause.PREFILL not in rest


def test_requests_that_wait_for_the_pace_of_answers_are_not_bound_by_prefill() -> None:
    idle = make_pool("prefill", make_worker("p0", busy=0.1), make_worker("p1", busy=0.1))
    full = make_pool("decode", make_worker("d0", busy=1.0, batch=20.0))
    waited = replace(USUAL, line_s=9.0, waits=Waits({WaitCause.DECODE_PACE: 9.0}), ttft_s=9.6, tpot_s=0.06)
    first, second, *rest = find(make_view(waited, prefill=idle, decode=full))
    assert (first.cause, first.pool) == (Cause.DECODE_PACE, "decode")
    assert first.lost_s == pytest.approx(9.0)
    assert "wait 9 s in line for the pace of answers" in first.text
    assert "decode workers are busy 100% of the time" in first.text
    assert first.changes[0].startswith("a decode worker more: 100% more answers at the same pace")
    assert "prefill workers are busy 10% of the time, decode workers 100%" in first.changes[-1]
    assert second.cause is Cause.DECODE
    (step,) = second.predictions
    assert step.high >= step.now, "those that wait fill the batch of a new worker, and steps take as long as before"
    assert Cause.PREFILL not in {each.cause for each in rest}


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
        replace(
            USUAL,
            request_id=RequestId(name),
            tenant="b",
            line_s=line_s,
            waits=Waits({WaitCause.TENANT_LIMIT: line_s}),
            ttft_s=line_s + 0.52,
        )
        for name, line_s in (("late", 20.0), ("latest", 30.0))
    ]
    known = {RequestId("late"): {"queue": 20.0, "prefill": 0.5}, RequestId("latest"): {"queue": 1.0, "prefill": 0.5}}
    view = replace(
        make_view(*usual, *late), terms=lambda wanted: {each: known[each] for each in known if each in wanted}
    )
    (tail,) = (each for each in find(view) if each.cause is Cause.TAIL)
    assert tail.text == (
        "the slowest 2 of 40 requests wait 25.5 s for their first token, half of all at most 530 ms: 25 s of it is the"
        " router's line, mostly for the tenant's own requests (max_concurrent);"
        " 500 tokens are computed for each of them, 500 for all; 100% of them are tenant b's, as are 5%"
        " of all; the policy's largest cost was queue in 2 of 2 of their plans"
    )
    assert tail.lost_s == pytest.approx((25.52 - 0.53) / 20)
    assert "`kvrelay why --request latest`" in tail.changes[0]


def test_wait_for_tiers_is_told_apart_from_that_for_other_prompts() -> None:
    requests = [replace(USUAL, request_id=RequestId(name), worker_queue_s=1.0, ttft_s=1.52) for name in "ab"]
    known = {RequestId("a"): {"tier_read": 0.8, "compute": 0.5}, RequestId("b"): {"compute": 0.5}}
    found = find(replace(make_view(*requests), terms=lambda wanted: {each: known[each] for each in wanted}))
    read, other = (next(each for each in found if each.cause is cause) for cause in (Cause.TIER_READ, Cause.PREFILL))
    assert [read.lost_s, other.lost_s] == pytest.approx([0.4, 0.6])
    assert "prompts wait 0.4 s for cached blocks that are read from tiers, as 50% of them do" in read.text
    assert Cause.TIER_READ not in causes(make_view(*requests))


def test_requests_that_are_all_about_as_slow_have_no_tail() -> None:
    assert Cause.TAIL not in causes(make_view(*[replace(USUAL, ttft_s=0.5 + 0.02 * i) for i in range(40)]))


def test_headline_tells_percentiles_and_the_share_within_the_objectives() -> None:
    text = headline([USUAL, replace(USUAL, ttft_s=5.47)], window_s=60, slo=Slo(ttft_s=1.0, tpot_s=0.1))
    assert text.startswith("2 requests answered in 60 s: TTFT p50 3 s")
    assert text.endswith("50% within their objectives")


def test_one_request_is_told_by_its_longest_parts_beside_the_usual_ones() -> None:
    waits = Waits({WaitCause.DECODE_ROOM: 0.8, WaitCause.PREFILL: 0.2})
    slow = replace(
        USUAL, line_s=1.0, waits=waits, worker_queue_s=4.0, ttft_s=4.6, num_evicted_tokens=100, num_attempts=2
    )
    text, sentences = describe(slow, [USUAL])
    assert text.startswith("req-0: 5.8 s in all, first token after 4.6 s; 500 of 1000 prompt tokens computed")
    assert "100 of the computed tokens had been cached" in text
    assert "planned 2 times" in text
    assert sentences[0] == "queued at the worker: 4 s, usually 0.01 s"
    assert sentences[1].startswith("first to last token: 1.2 s")
    assert sentences[2] == "in the router's line: 1 s, usually 0 s, mostly for a slot and pages on a decode worker"


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
