"""Admits prompts to a worker: none that would wait longer than its router expects, and quarantined ones one by one."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.errors import InvalidRequest, Overloaded
from kvrelay.v1 import sequence_pb2


class PrefillGate:
    """Prompts on their way into the engine. Event loop only.

    Routers learn from reports what a worker has accepted, and several of them may send a prompt to the same free worker
    before the next report. The worker alone knows all of them: it accepts the first ones and refuses the others, which
    wait in the lines of their routers and go to the worker that is free next. Optimistic concurrency, as between the
    schedulers of Omega (Schwarzkopf et al., EuroSys 2013).
    """

    def __init__(self, backlog_s: Callable[[], float]) -> None:
        """`backlog_s` returns the predicted seconds until the prompts in the engine are computed."""
        self._backlog_s = backlog_s
        self._entering: dict[object, float] = {}
        """Predicted seconds of each prompt that the engine does not have yet."""

    @contextmanager
    def entering(self, spec: sequence_pb2.SequenceSpec) -> Iterator[None]:
        """Count a prompt until the end of the block, in which the engine takes it.

        Raises Overloaded when it would wait too long, and InvalidRequest for a booking that is not in seconds.
        """
        if not spec.HasField("prefill_booking"):
            yield
            return
        booking = spec.prefill_booking
        for name in ("max_wait_s", "prefill_s"):
            if not 0 <= getattr(booking, name) < math.inf:
                reason = f"is {getattr(booking, name)}; must be a finite number of seconds"
                raise InvalidRequest(reason, field=f"sequence.prefill_booking.{name}")
        wait_s = self._backlog_s() + sum(self._entering.values())
        if wait_s > booking.max_wait_s:
            reason = f"prompts accepted before take {wait_s:.2f} s; the router expects {booking.max_wait_s:.2f} s"
            raise Overloaded(reason, retry_after_s=wait_s - booking.max_wait_s)
        key = object()
        self._entering[key] = booking.prefill_s
        try:
            yield
        finally:
            del self._entering[key]


RETRY_AFTER_S = 1.0


class Quarantine:
    """Requests that may be what crashes the workers which compute them, one at a time. Event loop only.

    A router puts no two of them on one worker, but it knows only its own; the worker knows those of all routers.
    """

    def __init__(self) -> None:
        self._num_calls: Counter[str] = Counter()
        """Open calls by request: its samples may come in several."""

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
