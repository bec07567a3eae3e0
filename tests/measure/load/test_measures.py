import pytest

from common.slo import Slo
from kvrelay.client.events import Forecast
from measure.load.measures import summarize
from measure.load.records import Outcome, PoolSample, ServerReport
from measure.load.summary import Summary
from tests.measure.load.made_runs import make_failure, make_generator, make_request, make_run, make_worker, queue_run

SLO = Slo(ttft_s=0.5, tpot_s=0.05)


def mixed() -> Summary:
    """Return ten seconds with a request per second: seven complete, four of them good, and three failures."""
    requests = [
        make_request(0, due_s=0, ttft_s=0.1, gaps_s=[0.01, 0.03]),
        make_request(1, due_s=1, ttft_s=0.2, gaps_s=[0.02, 0.04], kind="batch"),
        make_request(2, due_s=2, ttft_s=0.6, gaps_s=[0.01]),
        make_request(3, due_s=3, ttft_s=0.1, gaps_s=[0.06], kind="batch"),
        make_request(4, due_s=4, ttft_s=0.7, gaps_s=[0.08]),
        make_request(5, due_s=5, ttft_s=0.3),
        make_request(6, due_s=6, ttft_s=0.4, gaps_s=[0.04, 0.04]),
        make_failure(7, Outcome.REFUSED, due_s=7, error="Overloaded: request 12 of 99"),
        make_failure(8, Outcome.TIMED_OUT, due_s=8, error="DeadlineExceeded: after 30 s", kind="batch"),
        make_failure(10, Outcome.REFUSED, due_s=10, error="Overloaded: request 13 of 99"),
    ]
    return summarize(make_run(requests), slo=SLO, warm_up_s=0)


def test_summary_counts_outcomes_and_misses() -> None:
    overall = mixed().overall
    assert (overall.kind, overall.num_requests, overall.num_complete, overall.num_not_complete) == ("all", 10, 7, 3)
    assert (overall.num_refused, overall.num_failed, overall.num_timed_out, overall.num_cancelled) == (2, 0, 1, 0)
    assert (overall.num_good, overall.num_ttft_misses, overall.num_tpot_misses) == (4, 2, 2)


def test_summary_counts_failures_as_not_good() -> None:
    overall = mixed().overall
    assert overall.good_share.value == 0.4
    assert overall.goodput_per_s.value == pytest.approx(0.4)
    assert overall.goodput_per_s.low < 0.4 < overall.goodput_per_s.high


def test_summary_measures_latencies_of_complete_requests() -> None:
    latencies = mixed().overall.latencies
    assert latencies.ttft is not None
    assert (latencies.ttft.num_requests, latencies.ttft.at(0.5).value, latencies.ttft.max) == pytest.approx(
        (7, 0.3, 0.7)
    )
    assert latencies.itl is not None
    assert (latencies.itl.num_values, latencies.itl.num_requests) == (9, 6)
    assert latencies.itl.at(0.5).value == pytest.approx(0.04)
    assert latencies.tpot is not None
    assert latencies.tpot.num_values == 6
    assert latencies.tpot.mean.value == pytest.approx((0.02 + 0.03 + 0.01 + 0.06 + 0.08 + 0.04) / 6)
    assert latencies.e2e is not None
    assert latencies.e2e.max == pytest.approx(0.78)
    assert latencies.queue is None


def test_summary_separates_kinds() -> None:
    overall, batch, chat = mixed().kinds
    assert (overall.kind, batch.kind, chat.kind) == ("all", "batch", "chat")
    assert (batch.num_requests, batch.num_good, batch.num_tpot_misses, batch.num_timed_out) == (3, 1, 1, 1)
    assert (chat.num_requests, chat.num_good, chat.num_refused) == (7, 3, 2)
    assert overall.goodput_per_s.value == pytest.approx(batch.goodput_per_s.value + chat.goodput_per_s.value)


def test_summary_groups_failures_that_differ_in_numbers_only() -> None:
    assert [(f.outcome, f.error, f.num_requests) for f in mixed().failures] == [
        ("refused", "Overloaded: request 12 of 99", 2),
        ("timed_out", "DeadlineExceeded: after 30 s", 1),
    ]


def test_throughput_counts_tokens_in_the_window_also_of_earlier_requests() -> None:
    requests = [
        make_request(0, due_s=0, ttft_s=4.5, gaps_s=[1.0, 5.0]),  # warm-up, but two tokens come in the window
        make_request(1, due_s=5, ttft_s=1.0, gaps_s=[1.0]),
        make_request(2, due_s=9, ttft_s=0.5, gaps_s=[2.0], num_prompt_tokens=40),  # ends after it
    ]
    throughput = summarize(make_run(requests), slo=SLO, warm_up_s=5).throughput
    assert throughput.offered_per_s == pytest.approx(2 / 4)
    assert throughput.completed_per_s == pytest.approx(1 / 4)
    assert throughput.prompt_tokens_per_s == pytest.approx(100 / 4)
    assert throughput.output_tokens_per_s == pytest.approx((1 + 2) / 4)


def test_summary_of_server_reports_has_cache_transfers_replans_and_forecasts() -> None:
    def report(cached: int, *, moved: int, foreseen_s: float, attempts: int = 1) -> ServerReport:
        return ServerReport(
            queue_s=0.25,
            num_cached_tokens=cached,
            num_pulled_tokens=cached // 2,
            transfer_bytes=moved,
            num_attempts=attempts,
            ttft_s=1.0,
            predicted_ttft_s=0.125,  # from the choice on
            ttft_forecast=Forecast(expected_s=foreseen_s),
        )

    requests = [
        make_request(0, due_s=0, server=report(50, moved=0, foreseen_s=0.5)),
        make_request(1, due_s=1, server=report(100, moved=4000, foreseen_s=1.0, attempts=3)),
        make_request(2, due_s=2, server=report(0, moved=2000, foreseen_s=1.25)),
        make_request(3, due_s=3),  # its server reports nothing
    ]
    overall = summarize(make_run(requests), slo=SLO, warm_up_s=0).overall
    assert overall.cache is not None
    assert overall.cache.hit_share.value == pytest.approx(150 / 300)
    assert overall.cache.pulled_share == pytest.approx(75 / 300)
    assert (overall.num_transfers, overall.transfer_bytes, overall.bytes_per_transfer) == (2, 6000, 3000)
    assert overall.num_replans == 2
    assert overall.prediction is not None
    off = overall.prediction
    assert (off.num_requests, off.median_s, off.p90_abs_s) == pytest.approx((3, 0.0, 0.45))
    assert overall.latencies.queue is not None
    assert (overall.latencies.queue.num_values, overall.latencies.queue.at(0.5).value) == (3, 0.25)


def test_worker_summary_takes_rates_from_counters_and_shares_from_samples() -> None:
    served = [
        make_request(
            i,
            due_s=float(i),
            ttft_s=0.5,
            gaps_s=[0.1],
            server=ServerReport(prefill_worker=prefill, decode_worker=decode),
        )
        for i, (prefill, decode) in enumerate([("p0", "d0"), (None, "d1"), ("p0", "d1"), ("p0", "d0"), (None, "d1")])
    ]
    samples = [
        PoolSample(
            at_s=at_s,
            num_queued=queued,
            workers=(
                make_worker("p0", "prefill", num_computed_tokens=computed, busy_s=busy_s),
                make_worker("d0", "decode", num_running=2, num_used_blocks=used),
                make_worker("d1", "decode", num_running=1, num_used_blocks=10),
            ),
        )
        # p0 was restarted between the last two: it computed 100 + 300 tokens
        for at_s, queued, computed, busy_s, used in ((0, 1, 500, 1.0, 20), (2, 7, 600, 2.5, 60), (4, 3, 300, 0.5, 40))
    ]
    summary = summarize(make_run(served, samples=samples), slo=SLO, warm_up_s=0)
    prefill, decode = summary.pools
    assert (prefill.num_workers, prefill.num_prefilled, prefill.num_decoded) == (1, 3, 0)
    assert prefill.computed_tokens_per_s == pytest.approx(100.0)
    assert prefill.busy == pytest.approx(0.5)
    assert (decode.num_workers, decode.num_decoded, decode.mean_running, decode.peak_kv) == (2, 5, 3.0, 0.6)
    assert decode.mean_kv == pytest.approx((0.2 + 0.6 + 0.4 + 0.3) / 6)
    assert decode.output_tokens_per_s == pytest.approx(8 / 4)  # the last answer came after the window
    assert decode.output_tokens_per_worker_s == pytest.approx(8 / 4 / 2)
    assert decode.busy is None
    assert [worker.name for worker in summary.workers] == ["p0", "d0", "d1"]
    assert summary.peak_queued == 7


def test_summary_counts_tokens_of_pieces() -> None:
    requests = [
        make_request(i, due_s=float(i), gaps_s=[0.1], chunk_tokens=(1, 5), num_wanted_tokens=6) for i in range(40)
    ]
    summary = summarize(make_run(requests), slo=SLO, warm_up_s=0)
    assert summary.overall.tokens_per_piece == 3.0
    assert summary.overall.mean_output_tokens == 6.0
    assert summary.warnings == (
        "a piece of an answer holds 3.00 tokens on average, and ITL is the gap between pieces; compare systems by TPOT",
    )


def test_summary_of_a_steady_run_has_no_warnings() -> None:
    assert summarize(make_run(queue_run(load=0.5, num_requests=400)), slo=SLO).warnings == ()


def test_summary_above_capacity_warns_that_it_is_unstable() -> None:
    (warning,) = summarize(make_run(queue_run(load=1.5, num_requests=400)), slo=SLO).warnings
    assert warning.startswith("unstable: open requests grew from ")
    assert "the load is above capacity" in warning


def test_summary_warns_of_the_generator_first_then_of_cancelled_requests() -> None:
    requests = [
        make_request(0, due_s=0),
        make_request(1, due_s=5),
        make_failure(2, Outcome.CANCELLED, due_s=6),
    ]
    run = make_run(requests, generator=make_generator("the generator was late"), notes=("no token ids",))
    warnings = summarize(run, slo=SLO, warm_up_s=0).warnings
    assert warnings[0] == "the generator was late"
    assert warnings[1] == "only 3 requests counted: intervals are rough"
    assert warnings[2].startswith("requests cancelled by the load test count as not good")
    assert warnings[3:] == ("no token ids",)
