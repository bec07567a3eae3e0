"""The generator warns when it distorts the figures, and only then."""

from typing import Any

import pytest

from measure.load.records import GeneratorReport
from measure.load.selfcheck import LATE_S, Evidence, judge
from measure.load.wire import Pulse
from tests.measure.load.made_runs import make_request


def pulse(cpu_share: float = 0.1, lags_s: tuple[float, ...] = (0.0001,) * 25, suspended_s: float = 0.0) -> Pulse:
    return Pulse(cpu_share=cpu_share, loop_lags_s=list(lags_s), suspended_s=suspended_s)


def report(
    *, lag_s: float = 0.0002, ttft_s: float = 0.02, machine: float = 0.3, max_processes: int = 2, **fields: Any
) -> GeneratorReport:
    requests = [make_request(i, due_s=i, sent_s=i + lag_s, ttft_s=ttft_s) for i in range(100)]
    evidence = Evidence(max_processes=max_processes, pulses={0: [pulse(**fields)] * 10}, machine_shares=[machine] * 10)
    return judge(requests, evidence)


def test_generator_that_keeps_up_has_no_warnings() -> None:
    quiet = report()
    assert quiet.warnings == ()
    assert (quiet.lag_p50_s, quiet.lag_max_s) == pytest.approx((0.0002, 0.0002))
    assert (quiet.num_processes, quiet.num_late) == (1, 0)
    assert quiet.cpu_share == pytest.approx(0.1)


def test_late_requests_are_counted_in_the_warning() -> None:
    late = report(lag_s=0.03)
    assert late.num_late == 100
    assert len(late.warnings) == 1
    assert late.warnings[0].startswith("100 requests were sent more than 5 ms late (p99 30 ms")


def test_delay_that_is_small_against_the_latencies_is_ignored() -> None:
    assert report(lag_s=0.03, ttft_s=2.0).warnings == ()


@pytest.mark.parametrize(
    ("machine", "cpu_share", "blames_server"), [(0.99, 0.1, True), (0.5, 0.1, False), (0.99, 0.95, False)]
)
def test_late_generator_on_a_full_machine_names_the_cause(
    machine: float, cpu_share: float, blames_server: bool
) -> None:
    warning = report(lag_s=0.03, machine=machine, cpu_share=cpu_share).warnings[0]
    assert ("a server on the same machine starves it" in warning) == blames_server


def test_starved_generator_without_realtime_scheduling_is_advised_to_get_it() -> None:
    late = [make_request(i, due_s=i, sent_s=i + 0.05) for i in range(100)]
    for runs_first in (True, False):
        evidence = Evidence(max_processes=1, pulses={0: [pulse()]}, machine_shares=[1.0], runs_first=runs_first)
        assert ("CAP_SYS_NICE" in judge(late, evidence).warnings[0]) == (not runs_first)


def test_late_time_stamps_are_reported() -> None:
    (warning,) = report(lags_s=(0.0,) * 20 + (0.04,) * 5).warnings
    assert "noticed answers up to 40 ms late" in warning


def test_single_long_stall_is_reported() -> None:
    requests = [make_request(i, due_s=i, sent_s=i + (0.5 if i == 7 else 0.0)) for i in range(1000)]
    stalled = judge(requests, Evidence(max_processes=1, pulses={0: [pulse()]}))
    assert stalled.lag_p99_s < LATE_S
    assert "a request was sent 500 ms late: the generator stalled once" in stalled.warnings[0]


@pytest.mark.parametrize(("max_processes", "advice"), [(1, "all 1 processes that it may use"), (4, "too late")])
def test_full_process_is_reported_with_a_remedy(max_processes: int, advice: str) -> None:
    (warning,) = report(cpu_share=0.93, max_processes=max_processes).warnings
    assert "used 93% of a core" in warning and advice in warning


def test_cpu_share_is_that_of_the_busiest_two_seconds_of_the_busiest_process() -> None:
    pulses = {0: [pulse(0.1)] * 20, 1: [pulse(0.1)] * 4 + [pulse(0.7)] * 4 + [pulse(0.1)]}
    assert judge([], Evidence(max_processes=2, pulses=pulses)).cpu_share == pytest.approx(0.7)


def test_suspended_machine_is_reported() -> None:
    (warning,) = report(suspended_s=30.0).warnings
    assert "suspended for 30.0 s" in warning
