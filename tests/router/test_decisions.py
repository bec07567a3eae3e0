"""The log of decisions, and the metrics of the router."""

import asyncio
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from common.errors import Cancelled, WorkerLost
from common.ids import RequestId, WorkerId
from router.metrics import RouterMetrics, WeightedHistogram
from router.placement.decisions import Decision, DecisionLog
from router.placement.plans import Plan


def decision(request_id: str = "r0", *, tenant: str = "a", **predicted: float) -> Decision:
    plan = Plan(
        decode=WorkerId("d0"),
        predicted_cached_tokens=64,
        reason="",
        **predicted,  # type: ignore[arg-type]
    )
    return Decision(request_id=RequestId(request_id), num_tokens=100, plan=plan, decided_s=0.0, tenant=tenant)


def ids(decisions: list[Decision]) -> list[str]:
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
    log, one, heard = DecisionLog(), decision(), list[tuple[str, int, str]]()
    log.subscribe(lambda each: heard.append((each.tenant, each.attempt, each.ended)))
    with suppress(WorkerLost, asyncio.CancelledError), log.following(one, tenant="b", attempt=2):
        assert one.ended == ""
        if error is not None:
            raise error
    assert heard == [("b", 2, ended)]


def test_following_keeps_the_end_that_the_attempt_named() -> None:
    log, one = DecisionLog(), decision()
    with suppress(ValueError), log.following(one, tenant="a", attempt=1):
        one.ended = "Overloaded"
        raise ValueError
    assert one.ended == "Overloaded"


def test_metrics_compare_predictions_with_outcomes() -> None:
    metrics, one = RouterMetrics(), decision(predicted_ttft_s=1.0, predicted_itl_s=0.03)
    one.num_cached_tokens, one.ttft_s, one.mean_itl_s = 44, 0.5, 0.02
    metrics.compare_outcome(one)
    read = metrics.registry.get_sample_value
    error = "kvrelay_prediction_cached_tokens_error_bucket"  # 20 of 100 tokens
    assert (read(error, {"le": "0.1"}), read(error, {"le": "0.2"})) == (0, 1)
    assert read("kvrelay_prediction_ttft_ratio_sum") == pytest.approx(2.0)
    assert read("kvrelay_prediction_itl_ratio_sum") == pytest.approx(1.5)


def test_metrics_leave_out_what_was_not_predicted_or_is_not_known() -> None:
    metrics = RouterMetrics()
    measured = decision()
    measured.ttft_s, measured.mean_itl_s = 0.5, 0.02
    metrics.compare_outcome(measured)
    metrics.compare_outcome(decision(predicted_ttft_s=1.0, predicted_itl_s=0.03))
    for name in ("cached_tokens_error", "ttft_ratio", "itl_ratio"):
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
