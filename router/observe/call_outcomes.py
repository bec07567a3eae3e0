"""The calls of clients: how many are open, and how each ends, in counts, traces and the log."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from common.errors import AccessDenied, DeadlineExceeded, KvrelayError, Overloaded, RequestError, Unauthenticated
from common.lifecycle import LifeCycle, State
from router.observe.metrics import RouterMetrics
from router.observe.tracing import RequestTraces
from router.record.demand import DemandMeter

logger = logging.getLogger(__name__)


_REJECTIONS = (RequestError, Unauthenticated, AccessDenied, Overloaded)


@dataclass(slots=True)
class Totals:
    """Counts since process start."""

    num_completed: int = 0
    num_cancelled: int = 0
    num_rejected: int = 0
    """Requests that cannot be served as they are, of this caller, or now."""
    num_failed: int = 0
    num_replans: int = 0
    num_moves: int = 0


class CallOutcomes:
    """Counts every call, whatever happens in it. Event loop only."""

    def __init__(self, *, metrics: RouterMetrics, traces: RequestTraces, demand: DemandMeter) -> None:
        self._metrics = metrics
        self._traces = traces
        self._demand = demand
        self.totals = Totals()
        self.num_open = 0
        """Calls that have not ended yet."""

    @contextmanager
    def account(self, life: LifeCycle) -> Iterator[None]:
        """Count a client's call and how it ends.

        The call is not demand yet, because unidentified callers must not scale the pools: the door notes an arrival
        when it admits the request. gRPC cancels a call whose client went away and one whose deadline passed alike;
        the deadline tells them apart. A message that cannot be written means that the client has left, too: gRPC
        cancels the call a moment later.
        """
        self.num_open += 1
        try:
            yield
        except (asyncio.CancelledError, grpc.aio.InternalError):
            if life.left_s <= 0:
                self.totals.num_failed += 1
                self._end(life, State.FAILED, DeadlineExceeded.__name__)
            else:
                self.totals.num_cancelled += 1
                self._end(life, State.CANCELLED, "cancelled")
            raise
        except BaseException as error:
            if isinstance(error, Overloaded):
                self._demand.note_refusal()
            if isinstance(error, _REJECTIONS):
                self.totals.num_rejected += 1
            else:
                self.totals.num_failed += 1
            self._end(life, State.FAILED, type(error).__name__ if isinstance(error, KvrelayError) else "bug")
            raise
        else:
            self.totals.num_completed += 1
            self._end(life, State.FINISHED, "completed")
        finally:
            self.num_open -= 1

    def _end(self, life: LifeCycle, state: State, outcome: str) -> None:
        if not life.is_over:
            life.advance(state)
        self._metrics.count_request(outcome)
        self._traces.end(life, outcome)
        duration_s = round(life.stamps[-1][1] - life.received_s, 6)
        extra = {"request_id": life.request_id, "outcome": outcome, "duration_s": duration_s}
        logger.info("request ended", extra=extra)
