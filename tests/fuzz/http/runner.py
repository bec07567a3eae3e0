"""Rounds of both sources until the time is over, or as many as are asked for."""

import time
from collections.abc import Callable

from tests.fuzz.http.door import running_door
from tests.fuzz.http.oracle import Log
from tests.fuzz.http.schema_cases import SchemaCases
from tests.fuzz.http.wire_cases import WireCases


def fuzz(seed: int, goes_on: Callable[[int], bool], *, num_examples: int) -> Log:
    """Run rounds while `goes_on` says so of the number of those that are over; returns what happened."""
    log = Log()
    num_rounds = 0
    with running_door() as door:
        requests, connections = SchemaCases(door, log), WireCases(door, log)
        try:
            while num_rounds == 0 or goes_on(num_rounds):
                number = seed * 1_000_003 + num_rounds
                connections.run(number, num_examples=num_examples)
                requests.run(number, num_examples=num_examples)
                try:
                    door.until_idle()
                except TimeoutError:
                    log.find("round", "something is still held", number)
                    break
                num_rounds += 1
        finally:
            requests.close()
    return log


def fuzz_for(seconds: float, *, seed: int) -> Log:
    """Run rounds for that many seconds."""
    end_s = time.monotonic() + seconds
    return fuzz(seed, lambda _num_rounds: time.monotonic() < end_s, num_examples=15)
