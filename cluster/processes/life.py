"""The life of a supervised process: its phase, its standing, and how often it was started. Pure.

The *phase* repeats with every operating system process:

    STARTING ──▶ READY ──▶ WAITING ──▶ STARTING …         every phase ──▶ STOPPED
        └─────────────────────▲

The *standing* says what the rest of the cluster may do with it, whether it is up or not:

    JOINING ──▶ MEMBER ◀─▶ DRAINING       a worker whose drain is cancelled is a MEMBER again;
       │         ▲  │          │
       │         │  ▼          │          one that changes its role is APART meanwhile, then a MEMBER again;
       └───────▶ APART ◀───────┘          a process that is being removed stays APART

             routers know of it       other workers exchange prefixes with it
    JOINING            no                              no
    MEMBER             yes                             yes
    DRAINING           yes, as draining                no
    APART              no                              no
"""

from dataclasses import dataclass
from enum import StrEnum

from common.lifecycle import IllegalTransition

LONG_LIFE_S = 10.0
"""A process that dies after less is started again later each time."""
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 5.0


class ProcessPhase(StrEnum):
    """Phase in the life of a process."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """Dead; the next start is held back."""
    STOPPED = "stopped"


class Standing(StrEnum):
    """How a process takes part in the cluster."""

    JOINING = "joining"
    """Added to a running cluster, not warmed yet."""
    MEMBER = "member"
    DRAINING = "draining"
    APART = "apart"
    """Changing its role, or being removed."""


_NEXT: dict[StrEnum, frozenset[StrEnum]] = {
    ProcessPhase.STARTING: frozenset({ProcessPhase.READY, ProcessPhase.WAITING, ProcessPhase.STOPPED}),
    ProcessPhase.READY: frozenset({ProcessPhase.WAITING, ProcessPhase.STOPPED}),
    ProcessPhase.WAITING: frozenset({ProcessPhase.STARTING, ProcessPhase.STOPPED}),
    ProcessPhase.STOPPED: frozenset(),
    Standing.JOINING: frozenset({Standing.MEMBER, Standing.APART}),
    Standing.MEMBER: frozenset({Standing.DRAINING, Standing.APART}),
    Standing.DRAINING: frozenset({Standing.MEMBER, Standing.APART}),
    Standing.APART: frozenset({Standing.MEMBER}),
}


@dataclass(slots=True)
class Life:
    """Phase, standing and starts of one process. `enter` and `stand` are the only writers of phase and standing."""

    phase: ProcessPhase = ProcessPhase.STARTING
    standing: Standing = Standing.JOINING
    is_adopted: bool = False
    """Whether it has served under an earlier supervisor."""
    num_lives: int = 0
    """How often it has come up."""
    last_exit: str = ""
    """How it died last; empty if it never did."""
    _num_short_lives: int = 0

    @property
    def has_served(self) -> bool:
        """Whether it has ever served: if not, its first start must not fail."""
        return self.is_adopted or self.num_lives > 0

    @property
    def is_known_to_routers(self) -> bool:
        """Whether routers know of it while it is up."""
        return self.standing in (Standing.MEMBER, Standing.DRAINING)

    def enter(self, phase: ProcessPhase) -> None:
        """Enter a phase. Raises IllegalTransition; staying in a phase is a no-op."""
        _check(self.phase, phase)
        self.num_lives += phase is ProcessPhase.READY
        self.phase = phase

    def stand(self, standing: Standing) -> None:
        """Change the standing. Raises IllegalTransition; keeping it is a no-op."""
        _check(self.standing, standing)
        self.standing = standing

    def die(self, reason: str, *, lived_s: float) -> float:
        """Note a death, or a start that failed; returns how long to hold back the next start, in seconds."""
        self.last_exit = reason.splitlines()[0]
        self._num_short_lives = 0 if lived_s >= LONG_LIFE_S else self._num_short_lives + 1
        self.enter(ProcessPhase.WAITING)
        return restart_delay_s(self._num_short_lives)


def restart_delay_s(num_short_lives: int) -> float:
    """Return the delay after that many short lives in a row: 0, 0.25, 0.5, … 5 s."""
    return 0.0 if num_short_lives <= 1 else min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(num_short_lives - 2, 16))


def _check(before: StrEnum, after: StrEnum) -> None:
    if after is not before and after not in _NEXT[before]:
        raise IllegalTransition(f"{before} -> {after}")
