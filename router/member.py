"""One worker as the router holds it: its state, its last report, and what was booked on it since."""

import enum
from dataclasses import dataclass, field

from common.ids import Epoch
from common.timing import GUESSED_TIMING, TimingModel
from kvrelay.v1 import worker_pb2
from router.facts import Endpoint, WorkerFacts
from router.placement.plans import WorkerLoad
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
    booked_s: float
    num_blocks: int
    """Pages that it will occupy."""
    num_prompt_tokens: int = 0
    """Tokens of its prompt, when the worker is to compute that; else 0."""
    num_missing_tokens: int = 0
    """Those of them that the worker is expected to compute."""
    prefill_s: float = 0.0
    """Predicted time of that computation."""
    num_decodes: int = 0
    """Sequences that it adds to the worker's decode batch."""
    num_context_tokens: int = 0
    """KV tokens of those."""
    is_prefilled: bool = False
    """The first token has come."""
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
    reported_s: float = 0.0
    """When the report came."""
    timing: TimingModel = GUESSED_TIMING
    """What is believed of its speed."""
    told_timing: TimingModel | None = None
    """What the present life has said of it."""
    load_version: int = 0
    """Counts the reports that differed from the one before."""
    holds: dict[Hold, None] = field(default_factory=dict)
    """Booked on the present life, in order."""
    num_users: int = 0
    """Bookings on any life: their calls use the channel."""
    _load: WorkerLoad | None = None
    """As of the last change."""

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
        self.holds[hold] = None
        self.num_users += 1
        self._load = None

    def remove_hold(self, hold: Hold) -> None:
        """Forget a booking, whichever life it was made on."""
        self.holds.pop(hold, None)
        self.num_users -= 1
        self._load = None
        assert self.num_users >= 0, f"{self.endpoint.worker_id}: num_users {self.num_users}"

    def begin_life(self, facts: WorkerFacts) -> None:
        """Take over the facts of a worker that fits; a new epoch voids what was booked on the old one."""
        if self.facts is None or self.facts.epoch != facts.epoch:
            self.holds.clear()
            self.told_timing = None
        self.facts = facts
        self.state = WorkerState.CONNECTING
        self.why = ""
        self._load = None

    def take_report(self, report: worker_pb2.LoadReport, *, now_s: float) -> None:
        """Remember the worker's load; bookings that it includes count no longer on top."""
        if report != self.report:
            self.report = report
            self.load_version += 1
        self.reported_s = now_s
        self._load = None
        for hold in self.holds:
            if hold.is_acknowledged or now_s - hold.booked_s >= SETTLE_S:
                hold.is_reported = True

    def take_timing(self, timing: TimingModel) -> None:
        """Believe a new model of the worker's work."""
        self.timing = timing
        self._load = None

    def note_prefilled(self, hold: Hold) -> None:
        """The first token of a booking has come."""
        hold.is_prefilled = True
        self._load = None

    def load(self) -> WorkerLoad:
        """Return the last report plus the bookings that it does not include."""
        if self._load is None:
            self._load = self._add_up()
        return self._load

    def _add_up(self) -> WorkerLoad:
        assert self.facts is not None, f"{self.endpoint.worker_id}: no facts in state {self.state}"
        report = self.report
        is_idle = not self.holds and report.num_running + report.num_waiting == 0
        num_free_blocks = self.facts.num_blocks if is_idle else report.num_free_blocks
        num_sequences = report.num_running + report.num_waiting + report.num_reserved
        num_pending_tokens = report.num_pending_prefill_tokens
        # Whoever is in line on a decode worker decodes there next; on a prefill worker nobody ever does.
        num_decodes = num_sequences if self.endpoint.role == worker_pb2.WORKER_ROLE_DECODE else 0
        num_context_tokens = report.num_context_tokens
        free_at_s = self.reported_s + report.prefill_backlog_s
        num_prefills = prompt_tokens = missing_tokens = active_blocks = 0
        for hold in self.holds:
            active_blocks += hold.num_blocks
            if not hold.is_prefilled:
                num_prefills += hold.num_prompt_tokens > 0
                prompt_tokens += hold.num_prompt_tokens
                missing_tokens += hold.num_missing_tokens
            if not hold.is_reported:
                num_free_blocks -= hold.num_blocks
                num_sequences += 1
                num_pending_tokens += hold.num_missing_tokens
                num_decodes += hold.num_decodes
                num_context_tokens += hold.num_context_tokens
                free_at_s = max(free_at_s, hold.booked_s) + hold.prefill_s
        return WorkerLoad(
            worker_id=self.endpoint.worker_id,
            num_blocks=self.facts.num_blocks,
            num_free_blocks=max(num_free_blocks, 0),
            num_sequences=num_sequences,
            num_waiting=report.num_waiting + report.num_reserved,
            num_pending_prefill_tokens=num_pending_tokens,
            num_decodes=num_decodes,
            num_context_tokens=num_context_tokens,
            prefill_free_at_s=free_at_s,
            num_cold_blocks=report.num_cold_blocks,
            num_cached_blocks=report.num_cached_blocks,
            num_active_requests=len(self.holds),
            num_active_prefills=num_prefills,
            num_active_prefill_tokens=prompt_tokens,
            num_active_missing_tokens=missing_tokens,
            num_active_blocks=active_blocks,
            timing=self.timing,
        )
