"""Reports of foreign load generators: read, checked against what was asked for, compared."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.figures import Figures
from benchmarks.foreign_load.peers import read_aiperf, read_guidellm
from benchmarks.foreign_load.report import OURS, Load, ToolFailed, ToolReport, add_report, verdicts

LOAD = Load(concurrency=2, num_requests=4, num_prompt_tokens=100, num_output_tokens=8, seed=0)
REPORT = ToolReport(
    num_complete=4,
    num_failed=0,
    num_prompt_tokens=520,
    num_output_tokens=32,
    ttft_p50_s=0.2,
    ttft_mean_s=0.25,
    tpot_p50_s=0.02,
    tpot_mean_s=0.03,
    e2e_p50_s=0.4,
)


def guidellm_report() -> dict[str, Any]:
    def of_successful(**figures: float) -> dict[str, Any]:
        return {"successful": figures}

    metrics = {
        "request_totals": {"successful": 4, "errored": 0, "incomplete": 0},
        "prompt_token_count": of_successful(total_sum=520.0),
        "output_token_count": of_successful(total_sum=32.0),
        "time_to_first_token_ms": of_successful(median=200.0, mean=250.0),
        "inter_token_latency_ms": of_successful(median=20.0, mean=30.0),
        "request_latency": of_successful(median=0.4),
    }
    return {"benchmarks": [{"metrics": metrics}]}


def aiperf_report() -> dict[str, Any]:
    return {
        "request_count": {"avg": 4.0},
        "completed_request_count": {"avg": 4.0},
        "total_usage_prompt_tokens": {"avg": 520.0},
        "total_usage_completion_tokens": {"avg": 32.0},
        "time_to_first_token": {"p50": 200.0, "avg": 250.0},
        "inter_token_latency": {"p50": 20.0, "avg": 30.0},
        "request_latency": {"p50": 400.0},
    }


def test_reports_of_both_tools_mean_the_same() -> None:
    assert read_guidellm(guidellm_report()) == REPORT
    assert read_aiperf(aiperf_report()) == REPORT


def test_report_without_a_figure_is_refused_and_names_it() -> None:
    broken = aiperf_report()
    del broken["inter_token_latency"]

    with pytest.raises(ToolFailed, match="inter_token_latency"):
        read_aiperf(broken)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"num_complete": 3, "num_failed": 1}, "3 of 4 answered, 1 failed"),
        ({"num_complete": 3}, "3 of 4 answered, 0 failed"),
        ({"num_output_tokens": 31}, "31 output tokens, not 32"),
        ({"num_prompt_tokens": 399}, "only 399 prompt tokens"),
    ],
)
def test_faults_name_what_is_not_as_asked_for(changes: dict[str, int], fault: str | None) -> None:
    assert replace(REPORT, **changes).faults(LOAD) == ([] if fault is None else [fault])


def test_verdict_compares_medians_and_says_whether_the_rounds_overlap() -> None:
    slower = replace(REPORT, ttft_p50_s=0.4)

    figures = Figures()
    for tool, report in ((OURS, REPORT), ("aiperf", slower)) * 2:
        add_report(figures, 2, tool, report)

    told = list(verdicts(figures))

    assert told[0] == "2 users, TTFT P50 ms: ours is 0.50 times aiperf's; the ranges over 2 rounds do not meet"
    assert told[1] == "2 users, TPOT P50 ms: ours is 1.00 times aiperf's; the ranges over 2 rounds meet"
