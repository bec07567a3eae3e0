import math

import pytest

from cluster.planner.queueing import erlang_c, mean_wait_of_waiting_s


@pytest.mark.parametrize(
    ("num_servers", "load", "expected"),
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.4092), (10, 0.0, 0.0), (3, 3.0, 1.0)],
)
def test_erlang_c_matches_tables(num_servers: int, load: float, expected: float) -> None:
    assert erlang_c(num_servers, load) == pytest.approx(expected, rel=1e-3)


def test_erlang_c_with_a_thousand_servers_stays_a_probability() -> None:
    assert 0.0 < erlang_c(1000, 990.0) < 1.0
    assert erlang_c(1000, 1e-9) == pytest.approx(0.0)


def test_mean_wait_of_one_server_is_pollaczek_and_khinchin() -> None:
    load, scv = 0.8, 3.0
    wait_s = erlang_c(1, load) * mean_wait_of_waiting_s(1, load, mean_service_s=2.0, arrival_scv=1.0, service_scv=scv)
    assert wait_s == pytest.approx(load / (1 - load) * 2.0 * (1 + scv) / 2)


def test_mean_wait_of_saturated_servers_is_infinite() -> None:
    assert mean_wait_of_waiting_s(2, 2.0, mean_service_s=1.0, arrival_scv=1.0, service_scv=1.0) == math.inf
