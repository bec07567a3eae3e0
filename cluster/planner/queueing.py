"""Waiting times for one of several servers, M/G/k and G/G/k, approximated.

No closed form exists for k servers with general times. Allen and Cunneen's approximation scales the exact M/M/k wait
by the variability of arrivals and of service (A. O. Allen, "Probability, Statistics and Queueing Theory", 2nd ed.,
1990, section 5.3.5); it is exact for M/M/k and M/G/1. The waits of those that wait are about exponential (Kingman's
heavy-traffic limit).
"""

import math


def erlang_c(num_servers: int, offered_load: float) -> float:
    """Return the share of arrivals that find every server of an M/M/k busy; 1.0 at and beyond saturation.

    `offered_load` is arrival rate times mean service time, in servers (Erlang).
    """
    if offered_load >= num_servers:
        return 1.0
    if offered_load <= 0.0:
        return 0.0
    inverse_blocking = 1.0  # Erlang B; its recursion over servers overflows to infinity only
    for server in range(1, num_servers + 1):
        inverse_blocking = 1.0 + inverse_blocking * server / offered_load
    blocking = 1.0 / inverse_blocking
    return blocking / (1.0 - offered_load / num_servers * (1.0 - blocking))


def mean_wait_of_waiting_s(
    num_servers: int, offered_load: float, *, mean_service_s: float, arrival_scv: float, service_scv: float
) -> float:
    """Return the mean wait of the requests that wait; infinite at and beyond saturation.

    The squared coefficients of variation are those of the gaps between arrivals and of service times; both 1: M/M/k.
    """
    spare_servers = num_servers - offered_load
    if spare_servers <= 0.0:
        return math.inf
    return mean_service_s / spare_servers * (arrival_scv + service_scv) / 2.0
