"""One worker as the router holds it: its state, its last report, and what was booked on it since."""

import enum
from dataclasses import dataclass, field

from common.ids import Epoch
from kvrelay.v1 import worker_pb2
from router.facts import Endpoint, WorkerFacts
from router.plans import WorkerLoad
from router.worker_client import WorkerClient

SETTLE_S = 0.25
"""A report that comes this long after a booking includes it, acknowledged or not."""


class WorkerState(enum.Enum):
    """Whether a worker can be used."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"


@dataclass(slots=True, eq=False, kw_only=True)
class Hold:
    """One request's share of one life of one worker."""

    member: "Member"
    epoch: Epoch
    num_blocks: int
    num_prefill_tokens: int
    booked_s: float
    is_acknowledged: bool = False
    is_reported: bool = False
    """The worker's own report includes it."""

    def acknowledge(self) -> None:
        """Note that the worker has taken the request: its next report includes it."""
        self.is_acknowledged = True


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """A worker of the membership. The fleet alone changes it; everybody else reads."""

    endpoint: Endpoint
    client: WorkerClient
    state: WorkerState = WorkerState.CONNECTING
    why: str = ""
    """Why it is refused or lost."""
    facts: WorkerFacts | None = None
    """Of its last known life."""
    report: worker_pb2.LoadReport = field(default_factory=worker_pb2.LoadReport)
    load_version: int = 0
    """Counts the reports that differed from the one before."""
    holds: set[Hold] = field(default_factory=set)
    """Booked on the present life."""
    num_users: int = 0
    """Bookings on any life: their calls use the channel."""

    @property
    def is_accepted(self) -> bool:
        """Whether its facts were found to fit and still stand."""
        return self.facts is not None and self.state in (WorkerState.READY, WorkerState.CONNECTING)

    @property
    def state_text(self) -> str:
        """The state, with the reason of a refusal."""
        return f"refused: {self.why}" if self.state is WorkerState.REFUSED else self.state.value

    def add_hold(self, hold: Hold) -> None:
        """Count a booking."""
        self.holds.add(hold)
        self.num_users += 1

    def remove_hold(self, hold: Hold) -> None:
        """Forget a booking, whichever life it was made on."""
        self.holds.discard(hold)
        self.num_users -= 1
        assert self.num_users >= 0, f"{self.endpoint.worker_id}: num_users {self.num_users}"

    def begin_life(self, facts: WorkerFacts) -> None:
        """Take over the facts of a worker that fits; a new epoch voids what was booked on the old one."""
        if self.facts is None or self.facts.epoch != facts.epoch:
            self.holds.clear()
        self.facts = facts
        self.state = WorkerState.CONNECTING
        self.why = ""

    def take_report(self, report: worker_pb2.LoadReport, *, now_s: float) -> None:
        """Remember the worker's load; bookings that it includes count no longer on top."""
        if report != self.report:
            self.report = report
            self.load_version += 1
        for hold in self.holds:
            if hold.is_acknowledged or now_s - hold.booked_s >= SETTLE_S:
                hold.is_reported = True

    def load(self) -> WorkerLoad:
        """Return the last report plus the bookings that it does not include."""
        assert self.facts is not None, f"{self.endpoint.worker_id}: no facts in state {self.state}"
        report = self.report
        is_idle = not self.holds and report.num_running + report.num_waiting == 0
        num_free_blocks = self.facts.num_blocks if is_idle else report.num_free_blocks
        num_sequences = report.num_running + report.num_waiting
        num_prefill_tokens = report.num_pending_prefill_tokens
        for hold in self.holds:
            if not hold.is_reported:
                num_free_blocks -= hold.num_blocks
                num_sequences += 1
                num_prefill_tokens += hold.num_prefill_tokens
        return WorkerLoad(
            worker_id=self.endpoint.worker_id,
            num_blocks=self.facts.num_blocks,
            num_free_blocks=max(num_free_blocks, 0),
            num_sequences=num_sequences,
            num_pending_prefill_tokens=num_prefill_tokens,
        )
