import pytest

from measure.load.records import Outcome
from measure.load.steadiness import steadiness
from measure.load.summary import Steadiness
from tests.measure.load.made_runs import make_failure, make_request, queue_run


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
