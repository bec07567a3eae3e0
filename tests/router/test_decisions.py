"""The log of decisions, the metrics made from it, and `Explain` through a real router."""

import asyncio
import time
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from common.errors import Cancelled, Unauthenticated, WorkerLost
from common.ids import RequestId, WorkerId
from kvrelay.v1 import inference_pb2
from router.fleet.decisions import DecisionLog, DecisionRecord
from router.observe.metrics import RouterMetrics, WeightedHistogram
from router.placement.answer_pool import AnswerPool
from router.placement.plans import Plan
from tests.router.fake_worker import DECODE, PREFILL, TIMEOUT_S, FakeWorker, full_pair, trio
from tests.router.fakes import Reply, TestCluster, config_with, make_request, running_cluster
from tests.router.test_tenants import KEYS, serving


def decision(request_id: str = "r0", *, tenant: str = "a", **predicted: float) -> DecisionRecord:
    plan = Plan(
        answering=WorkerId("d0"),
        predicted_cached_tokens=64,
        reason="",
        **predicted,  # type: ignore[arg-type]
    )
    return DecisionRecord(request_id=RequestId(request_id), num_tokens=100, plan=plan, decided_s=0.0, tenant=tenant)


def ids(decisions: list[DecisionRecord]) -> list[str]:
    return [each.request_id for each in decisions]


def test_log_keeps_the_latest_and_no_more_than_its_capacity() -> None:
    log = DecisionLog(capacity=3)
    for number in range(5):
        log.add(decision(f"r{number}"))
    assert len(log) == 3
    assert ids(log.latest(tenant="a", limit=10)) == ["r4", "r3", "r2"]
    assert ids(log.latest(tenant="a", limit=2)) == ["r4", "r3"]


def test_log_shows_a_tenant_only_its_own_requests() -> None:
    log = DecisionLog()
    for request_id, tenant in (("r0", "a"), ("r1", "b"), ("r0", "a"), ("r2", "a")):
        log.add(decision(request_id, tenant=tenant))
    assert ids(log.latest(tenant="a", limit=10)) == ["r2", "r0", "r0"]
    assert ids(log.latest(tenant="a", limit=10, request_id=RequestId("r0"))) == ["r0", "r0"]
    assert log.latest(tenant="a", limit=10, request_id=RequestId("r1")) == []


@pytest.mark.parametrize(
    ("error", "ended"),
    [(None, "completed"), (WorkerLost("gone"), "WorkerLost"), (asyncio.CancelledError(), Cancelled.__name__)],
)
def test_following_notes_how_the_attempt_ended_and_calls_the_listeners(error: BaseException | None, ended: str) -> None:
    log, one, heard = DecisionLog(), decision(), list[tuple[int, str]]()
    log.subscribe(lambda each: heard.append((each.attempt, each.ended)))
    with suppress(WorkerLost, asyncio.CancelledError), log.following(one, attempt=2):
        assert one.ended == ""
        if error is not None:
            raise error
    assert heard == [(2, ended)]


def test_metrics_compare_predictions_with_outcomes() -> None:
    metrics, one = RouterMetrics(), decision(predicted_ttft_s=1.0, predicted_tpot_s=0.03)
    one.num_cached_tokens, one.ttft_s, one.tpot_s = 44, 0.5, 0.02
    metrics.compare_outcome(one)
    read = metrics.registry.get_sample_value
    error = "kvrelay_prediction_cached_tokens_error_bucket"  # 20 of 100 tokens
    assert (read(error, {"le": "0.1"}), read(error, {"le": "0.2"})) == (0, 1)
    assert read("kvrelay_prediction_ttft_ratio_sum") == pytest.approx(2.0)
    assert read("kvrelay_prediction_tpot_ratio_sum") == pytest.approx(1.5)


def test_metrics_leave_out_what_was_not_predicted_or_is_not_known() -> None:
    metrics = RouterMetrics()
    measured = decision()
    measured.ttft_s, measured.tpot_s = 0.5, 0.02
    metrics.compare_outcome(measured)
    metrics.compare_outcome(decision(predicted_ttft_s=1.0, predicted_tpot_s=0.03))
    for name in ("cached_tokens_error", "ttft_ratio", "tpot_ratio"):
        assert metrics.registry.get_sample_value(f"kvrelay_prediction_{name}_count") == 0


def test_weighted_histogram_is_exported_as_one_that_takes_its_values_one_by_one() -> None:
    bounds = (0.01, 0.1, 1.0)
    weighted, plain = CollectorRegistry(), CollectorRegistry()
    histogram = WeightedHistogram("gap_seconds", "Gaps", buckets=bounds)
    weighted.register(histogram)
    one_by_one = Histogram("gap_seconds", "Gaps", buckets=bounds, registry=plain)

    for value, count in ((0.25, 3), (0.01, 2), (0.5, 1), (4.0, 5)):
        histogram.observe(value, count)
        for _ in range(count):
            one_by_one.observe(value)

    def lines(registry: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]

    assert lines(weighted) == lines(plain)


async def explain(
    cluster: TestCluster, request_id: str = "", *, limit: int = 0, key: str | None = None
) -> list[inference_pb2.Decision]:
    asked = inference_pb2.ExplainRequest(request_id=request_id, limit=limit)
    return list((await cluster.ask("Explain", asked, key=key)).decisions)


def request_id_of(reply: Reply) -> str:
    return reply.messages[0].accepted.request_id


async def test_explain_shows_candidates_choice_and_outcome_of_a_request() -> None:
    workers = FakeWorker("p0", PREFILL, num_cached_tokens=4), FakeWorker("p1", PREFILL), FakeWorker("d0", DECODE)
    for worker, num_free_blocks in zip(workers, (48, 32, 56), strict=True):
        worker.set_load(num_free_blocks=num_free_blocks)
    async with running_cluster(*workers, config=config_with(policy="power_of_two")) as cluster:
        reply = await cluster.generate(make_request(10))
        (decision,) = await explain(cluster)
        assert decision.plan == reply.plans[0]
        assert (decision.request_id, decision.attempt) == (request_id_of(reply), 1)
        assert (decision.policy, decision.num_tokens, decision.num_candidates) == ("power_of_two", 10, 2)
        assert {each.prefill_worker_id for each in decision.candidates} == {"p0", "p1"}
        chosen = decision.candidates[0]
        assert (chosen.prefill_worker_id, chosen.kind) == (decision.plan.prefill_worker_id, decision.plan.kind)
        assert dict(chosen.terms)["prefill.used_blocks"] == 16
        assert chosen.cost == 16 + 8
        assert decision.outcome.num_cached_tokens == (4 if chosen.prefill_worker_id == "p0" else 0)
        assert 0 < decision.outcome.ttft_s <= reply.completed.timings.ttft_s
        assert decision.outcome.tpot_s == pytest.approx(reply.completed.timings.tpot_s)
        assert decision.outcome.ended == "completed"


async def test_client_that_waits_is_told_its_ttft_which_explain_shows_beside_the_outcome() -> None:
    prefill, decode = full_pair()
    async with running_cluster(prefill, decode) as cluster:
        replies = await cluster.queue(make_request(10), make_request(10))
        decode.set_load(num_free_blocks=64, num_running=0)
        for reply in await replies:
            events = [message.WhichOneof("event") for message in reply.messages]
            assert events[:3] == ["accepted", "queued", "plan"]
            (plan,) = reply.plans
            assert plan.line_ttft_forecast == reply.messages[1].queued.ttft_forecast
            (decision,) = await explain(cluster, request_id_of(reply))
            assert decision.plan == plan
            assert 0 < decision.waited_s < plan.ttft_forecast.expected_s
            assert decision.waited_s + decision.outcome.ttft_s >= reply.completed.timings.ttft_s
        assert plan.line_ttft_forecast.expected_s > 0


async def test_explain_of_a_running_request_has_no_outcome_yet(cluster: TestCluster) -> None:
    cluster.prefill.gates.close("prefill")
    generating = await cluster.start(make_request(10), cluster.prefill, "prefill")
    (decision,) = await explain(cluster)
    outcome = decision.outcome
    assert outcome == inference_pb2.DecisionOutcome()
    cluster.prefill.gates.open("prefill")
    await generating


async def test_explain_of_one_request_shows_each_attempt_and_why_it_ended() -> None:
    prefill, first, second = trio()
    first.gates.close("token 3")
    async with running_cluster(prefill, first, second) as cluster:
        generating = await cluster.start(make_request(10), first, "token 3")
        prefill.gates.close("first_token")
        left_s = time.monotonic()
        await first.die()
        await prefill.gates.reached("first_token")
        pause_s = time.monotonic() - left_s
        prefill.gates.open("first_token")
        reply: Reply = await generating
        await cluster.generate(make_request(9))
        decisions = await explain(cluster, request_id_of(reply))
        assert [(each.attempt, each.outcome.ended) for each in decisions] == [(2, "completed"), (1, "WorkerLost")]
        again, before = decisions
        assert (before.num_tokens, again.num_tokens) == (10, 13)
        # The first attempt delivered tokens 0 to 2, the second 3 to 5: the pause between them belongs to neither.
        gaps_s = 2 * (before.outcome.tpot_s + again.outcome.tpot_s)
        assert gaps_s <= 5 * reply.completed.timings.tpot_s - pause_s + 1e-6
        assert len(await explain(cluster)) == 3
        assert [each.num_tokens for each in await explain(cluster, limit=1)] == [9]


async def test_explain_of_a_request_that_the_client_left_says_so(cluster: TestCluster) -> None:
    cluster.decode.gates.close("token 1")
    (await cluster.start(make_request(10), cluster.decode, "token 1")).cancel()
    await cluster.until_idle()
    (decision,) = await explain(cluster)
    assert decision.outcome.ended == "Cancelled"


async def test_explain_shows_a_tenant_nothing_of_another() -> None:
    async with running_cluster(FakeWorker("d0", DECODE), config=serving()) as cluster:
        reply = Reply()
        metadata = (("authorization", f"Bearer {KEYS['a']}"),)
        await cluster.read(cluster.inference.Generate(make_request(10), timeout=TIMEOUT_S, metadata=metadata), reply)
        assert len(await explain(cluster, key=KEYS["a"])) == 1
        assert await explain(cluster, key=KEYS["b"]) == []
        assert await explain(cluster, request_id_of(reply), key=KEYS["b"]) == []
        with pytest.raises(Unauthenticated):
            await explain(cluster)


@pytest.mark.parametrize("name", ["p0", "d0"], ids=["remote plan", "local plan"])
async def test_a_prompt_that_is_computed_is_no_prefill_load_any_more(name: str) -> None:
    decode = FakeWorker("d0", DECODE)
    workers = {"d0": decode} if name == "d0" else {"p0": FakeWorker("p0", PREFILL), "d0": decode}
    computes, gate = workers[name], "token 0" if name == "d0" else "first_token"
    computes.gates.close(gate)
    decode.gates.close("token 2")
    async with running_cluster(*workers.values()) as cluster:
        call = cluster.inference.Generate(make_request(10), timeout=TIMEOUT_S)
        await computes.gates.reached(gate)
        assert prefill_load(cluster, computes) == (1, 10)
        computes.gates.open(gate)
        async for message in call:
            if message.HasField("tokens"):
                break
        assert prefill_load(cluster, computes) == (0, 0)
        call.cancel()


def prefill_load(cluster: TestCluster, worker: FakeWorker) -> tuple[int, int]:
    """Return the prompts that the router counts as pending on the worker, and their tokens to compute."""
    view = cluster.router.fleet.view(AnswerPool.DECODE, excluded=())
    load = next(each for each in (*view.prefill, *view.decode) if each.worker_id == worker.worker_id)
    return load.num_active_prefills, load.num_active_missing_tokens
