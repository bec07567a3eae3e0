"""Keeps requests apart that may be what ends the workers which compute them.

A router puts no two such requests on one worker, but it knows only its own. The worker knows those of all routers, so
it refuses a second one, which then waits or goes elsewhere.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import Overloaded
from kvrelay.v1 import sequence_pb2

RETRY_AFTER_S = 1.0


class Quarantine:
    """Quarantined requests of one worker. Event loop only."""

    def __init__(self) -> None:
        self._num_calls: Counter[str] = Counter()
        """By request: its samples may come in several calls."""

    @contextmanager
    def holding(self, spec: sequence_pb2.SequenceSpec) -> Iterator[None]:
        """Hold a request's place for the block, if it is quarantined. Raises Overloaded when another request has it."""
        if not spec.quarantined:
            yield
            return
        if self._num_calls.keys() - {spec.request_id}:
            raise Overloaded("another quarantined request runs here", retry_after_s=RETRY_AFTER_S)
        self._num_calls[spec.request_id] += 1
        try:
            yield
        finally:
            self._num_calls -= Counter([spec.request_id])
