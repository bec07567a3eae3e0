import pytest

from measure.load.records import Outcome, RequestRecord
from measure.load.window import NothingMeasured, Steadiness, counted, find_window, steadiness
from tests.measure.load.made_runs import make_failure, make_request, queue_run


def steady(num_requests: int = 101, gap_s: float = 1.0) -> list[RequestRecord]:
    return [make_request(i, due_s=i * gap_s) for i in range(num_requests)]


def test_window_leaves_out_a_tenth_of_the_arrivals_by_default() -> None:
    window = find_window(steady(), warm_up_s=None, cool_down_s=None)
    assert (window.start_s, window.end_s, window.rates_end_s, window.duration_s) == (10.0, 100.0, 100.0, 90.0)
    assert (window.num_before, window.num_counted, window.num_after) == (10, 91, 0)
    assert window.rule == "due from 10.0 s (a tenth of the arrivals, at most 60 s)"


def test_window_of_a_long_run_leaves_out_a_minute() -> None:
    assert find_window(steady(gap_s=20.0), warm_up_s=None, cool_down_s=None).start_s == 60.0


@pytest.mark.parametrize(("warm_up_s", "num_counted"), [(0.0, 101), (5.0, 96), (5.1, 95)])
def test_window_with_a_warm_up_counts_requests_due_then_or_later(warm_up_s: float, num_counted: int) -> None:
    requests = steady()
    window = find_window(requests, warm_up_s=warm_up_s, cool_down_s=None)
    assert window.num_counted == num_counted == len(counted(requests, window))
    assert counted(requests, window)[0].due_s >= warm_up_s


def test_window_with_a_cool_down_ends_before_the_last_requests() -> None:
    window = find_window(steady(), warm_up_s=0, cool_down_s=20.0)
    assert (window.end_s, window.num_after) == (80.0, 20)
    assert window.rule == "due from 0.0 s (as asked) to 80.0 s (as asked)"


def test_window_ends_where_the_last_session_began() -> None:
    follow_ups = [make_request(200 + i, session=i, turn=1, due_s=100.5 + i) for i in range(30)]
    window = find_window([*steady(), *follow_ups], warm_up_s=0, cool_down_s=None)
    assert (window.end_s, window.num_after) == (100.0, 30)
    assert "to 100.0 s (the last session began)" in window.rule


def test_window_of_sessions_that_begin_together_holds_all_their_turns() -> None:
    requests = [make_request(i, session=i % 4, turn=i // 4, due_s=float(i // 4)) for i in range(40)]
    window = find_window(requests, warm_up_s=None, cool_down_s=None)
    assert (window.start_s, window.end_s, window.num_after) == (0.9, 9.0, 0)


def test_window_of_few_sessions_ends_when_half_have_ended() -> None:
    requests = [make_request(i, session=i % 4, turn=i // 4, due_s=float(i // 4)) for i in range(40)]
    late = [make_request(40 + i, session=i, turn=10, due_s=1000.0 * (i + 1)) for i in range(3)]
    window = find_window([*requests, *late], warm_up_s=0.0, cool_down_s=None)
    assert window.end_s == pytest.approx(2000.1)
    assert (window.num_counted, window.num_after) == (42, 1)
    assert "(half of the sessions had ended)" in window.rule


def test_window_of_a_burst_counts_all_and_rates_extend_to_the_last_answer() -> None:
    requests = [make_request(i, due_s=0.0, ttft_s=1.0 + i) for i in range(10)]
    window = find_window(requests, warm_up_s=None, cool_down_s=None)
    assert (window.num_counted, window.end_s, window.rates_end_s) == (10, 0.0, 10.0)


@pytest.mark.parametrize(("warm_up_s", "cool_down_s"), [(100.1, None), (60.0, 60.0), (None, 101.0)])
def test_empty_window_names_the_last_due_time(warm_up_s: float | None, cool_down_s: float | None) -> None:
    with pytest.raises(NothingMeasured, match="requests were due until 100 s"):
        find_window(steady(), warm_up_s=warm_up_s, cool_down_s=cool_down_s)


def test_window_of_no_requests_is_an_error() -> None:
    with pytest.raises(NothingMeasured, match="no request was sent"):
        find_window([], warm_up_s=None, cool_down_s=None)


def of_queue(**settings: float) -> Steadiness:
    requests = queue_run(**settings)  # type: ignore[arg-type]
    end_s = requests[-1].due_s
    return steadiness(requests, start_s=0.1 * end_s, end_s=end_s)


@pytest.mark.parametrize(
    ("load", "least", "most"), [(0.5, 0, 0), (0.8, 0, 1), (1.3, 23, 25), (1.6, 25, 25)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("num_servers", [1, 8])
def test_steadiness_detects_load_above_the_capacity_of_a_queue(
    num_servers: int, load: float, least: int, most: int
) -> None:
    seeds = range(25)
    unsteady = sum(
        not of_queue(load=load, num_requests=300, num_servers=num_servers, seed=seed).is_steady for seed in seeds
    )
    assert least <= unsteady <= most


def test_steadiness_measures_backlog_and_growth() -> None:
    requests = [make_request(i, due_s=float(i), ttft_s=0.5 if i < 30 else 2.0) for i in range(60)]
    found = steadiness(requests, start_s=0.0, end_s=60.0)
    assert found.backlog_early == pytest.approx(0.5, abs=0.02)
    assert found.backlog_late == pytest.approx(2.0, abs=0.1)
    assert found.e2e_growth is not None
    assert found.e2e_growth.value == pytest.approx(4.0)
    assert found.arrival_growth == pytest.approx(1.0, abs=0.06)
    assert found.is_steady  # one step of latency; nothing piles up


def test_steadiness_with_too_few_requests_is_assumed() -> None:
    found = steadiness([make_request(i, due_s=float(i), ttft_s=i**2 + 1.0) for i in range(20)], start_s=0, end_s=20)
    assert found.e2e_growth is None
    assert found.is_steady


def test_steadiness_takes_refusals_for_no_latency() -> None:
    served = [make_request(i, due_s=float(i), ttft_s=1.0) for i in range(90)]
    refused = [make_failure(90 + i, Outcome.REFUSED, due_s=float(i), end_s=float(i)) for i in range(60, 90)]
    found = steadiness(sorted([*served, *refused], key=lambda r: r.due_s), start_s=0.0, end_s=90.0)
    assert found.e2e_growth is not None
    assert found.e2e_growth.value == pytest.approx(1.0)
    assert found.arrival_growth == pytest.approx(2.0, abs=0.1)
