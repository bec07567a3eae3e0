"""Passes events of requests, reports of steps and load, and faults from a `VllmEngine` to its worker."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from common.ids import RequestId
from common.kv_events import NO_EVENTS, KvEvents
from engine.events import EngineEvent, EngineLoad, StepReport, StepSample
from engine.steps.group import Group

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Outbox:
    """See the module. Event loop only."""

    load: Callable[[], EngineLoad]
    """Measures the load."""
    on_report: Callable[[StepReport], None] = lambda _report: None
    on_fault: Callable[[Exception], None] = lambda _error: None
    """See `engine.thread.EngineSetup`."""
    _accepted: list[RequestId] = field(default_factory=list)
    """Requests that no report has named."""
    _is_flushed: bool = True
    """Whether a report has been made since the last change of the load."""

    def emit(self, group: Group, event: EngineEvent) -> None:
        """Pass an event of a request on."""
        try:
            group.sink(event)
        except Exception as error:  # noqa: BLE001 - its request would wait for ever
            self.fail("an event was lost", error)

    def fail(self, message: str, error: Exception) -> None:
        """Report a fault of the whole engine, and log it: the worker ends."""
        logger.critical(message, exc_info=error)
        self.on_fault(error)

    def accept(self, request_id: RequestId) -> None:
        """Name a new request in the next report."""
        self._accepted.append(request_id)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Report the load once, behind whatever else happens in this turn of the loop."""
        if self._is_flushed:
            self._is_flushed = False
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self, events: KvEvents = NO_EVENTS, samples: tuple[StepSample, ...] = ()) -> None:
        """Report the load, and what a step has brought."""
        self._is_flushed = True
        accepted, self._accepted = tuple(self._accepted), []
        self.on_report(StepReport(kv_events=events, load=self.load(), samples=samples, accepted=accepted))
