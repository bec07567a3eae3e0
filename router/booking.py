"""A plan together with what it holds on its workers."""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from kvrelay.v1 import sequence_pb2
from router.member import Hold
from router.placement.decisions import Decision
from router.placement.plans import Plan


@dataclass(slots=True, eq=False, kw_only=True)
class Booking:
    """A booked plan. Leaving its `with` block releases everything, exactly once."""

    decision: Decision
    decode: Hold
    prefill: Hold | None
    """Set exactly when the plan is remote."""
    on_release: "Callable[[Booking], None]"
    source: sequence_pb2.KvSource | None = None
    """Where leading blocks are pulled from; None also when the plan's source was gone. Nothing is held there."""

    @property
    def plan(self) -> Plan:
        """What was decided."""
        return self.decision.plan

    def __enter__(self) -> "Booking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give everything back. Harmless when repeated."""
        self.on_release(self)
