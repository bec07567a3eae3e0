"""Settings of a walk, the kinds of faults, and what a walk reports."""

import enum
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from measure.simulate.faults import FaultRates


class FaultKind(enum.StrEnum):
    """Kinds of faults, each of which is on or off for a whole walk."""

    CRASH = "crash"
    """A worker process dies and is started again."""
    STOP = "stop"
    """Nothing of a worker process runs for a while, as after SIGSTOP; some are killed instead of continued."""
    HUNG_STEP = "hung step"
    """An engine step never ends; the event loop lives."""
    HUNG_LOOP = "hung loop"
    """The event loop of a worker stands still for good; its watchdog lives."""
    SLOW = "slow"
    """The steps of a worker take ten times as long for a while."""
    POISON = "poison"
    """A request ends every worker that computes a certain token of its answer."""
    CUT = "cut"
    """Nothing arrives between two hosts for a while."""
    ONE_WAY_CUT = "one-way cut"
    FLAPPING_CUT = "flapping cut"
    """The network between two hosts comes and goes, in either direction."""
    LOST = "lost message"
    REPEATED = "repeated message"
    LATE = "late message"
    STALL = "stalled sender"
    """Everything that a host sends is late for a while."""
    CORRUPTED = "corrupted KV"
    """A bit of a piece of KV is another one when it arrives."""
    TORN = "torn KV"
    """A piece of KV arrives without its end."""
    HOST_CRASH = "host crash"
    """A host dies with both of its workers, one of each pool."""
    DRAIN = "drain"
    """A worker is asked to leave, and is kept after all."""
    FLIP = "flip"
    """A worker moves to the other pool, with its cache."""
    FLOOD = "flooding tenant"
    """A tenant sends many requests at once, whose clients leave early."""
    ROUTER_CRASH = "router crash"
    """A router dies and is started again; its clients go on at another one."""


PROCESS_FAULTS = frozenset(
    {FaultKind.CRASH, FaultKind.HOST_CRASH, FaultKind.STOP, FaultKind.HUNG_STEP, FaultKind.HUNG_LOOP, FaultKind.SLOW}
)
CUT_FAULTS = frozenset({FaultKind.CUT, FaultKind.ONE_WAY_CUT, FaultKind.FLAPPING_CUT})
MESSAGE_FAULTS = frozenset({FaultKind.LOST, FaultKind.REPEATED, FaultKind.LATE, FaultKind.STALL})
NETWORK_FAULTS = CUT_FAULTS | MESSAGE_FAULTS
"""Faults by which a worker may hear late, or not at all, that a client has gone."""
_SECOND_FAULTS = frozenset(
    {FaultKind.CORRUPTED, FaultKind.TORN, FaultKind.HOST_CRASH, FaultKind.DRAIN, FaultKind.FLOOD}
)
LATER_FAULTS = _SECOND_FAULTS | {FaultKind.FLIP, FaultKind.ROUTER_CRASH}
"""Kinds that are drawn apart, so that the seeds from before them are the same walks without them."""
MAX_NOTICE_S = 0.05
MIN_QUIET_S = 5.0
"""Shortest time between the end of a poison request and the next one: innocent ones get tokens, or end."""
BAD_DAY = FaultRates(
    lose=0.0005, repeat=0.0005, delay=0.01, max_delay_s=0.5, stall=0.0001, stall_s=2.0, corrupt=0.005, tear=0.005
)
MAX_ANSWER_S = 2 * BAD_DAY.max_delay_s + MAX_NOTICE_S
"""Longest time until a worker's first answer to a call is at its router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """Cluster, load and faults. Equal settings give equal walks."""

    num_requests: int
    seed: int
    faults: frozenset[FaultKind] = frozenset(FaultKind)
    num_prefill: int = 2
    num_decode: int = 3
    num_routers: int = 2
    rate_per_s: float = 12.0
    message_rates: FaultRates = BAD_DAY
    """Probabilities of the kinds of message faults that are on."""
    mean_gap_s: float = 6.0
    """Mean time between two faults of one kind of worker or network faults."""
    max_down_s: float = 3.0
    """Longest time until a dead worker is started again."""
    max_fault_s: float = 30.0
    """Longest time that a worker is stopped or slow, or the network cut."""
    poison_gap_s: float = 10.0
    """Mean time between two poison requests. One comes when the last has ended MIN_QUIET_S ago: no budget could
    distinguish the innocent from two of them."""
    cancelled_share: float = 0.03
    """Share of clients that cancel."""
    max_notice_s: float = MAX_NOTICE_S
    """Longest time until all calls of a lost connection have heard of it."""
    direct_share: float = 0.0
    """Share of requests whose clients stream from the decode worker."""
    has_long_answers: bool = True
    patience_s: float = 0.5
    """Mean time after which these cancel."""
    num_blocks: int = 96
    """Pages of KV of each worker: twelve requests may run at once, of 3 to 23 pages each."""
    num_tier_blocks: int = 0
    """Blocks of each worker's tier in memory; 0: it has none."""
    num_flooding: int = 40
    """Requests of a flood."""
    timeout_s: float = 600.0
    may_fail: bool = False
    """Whether innocent requests may fail: they survive a limited number of attempts, and faults may be too many."""

    @property
    def rates(self) -> FaultRates:
        """Probabilities per message."""
        rates, on = self.message_rates, self.faults
        return FaultRates(
            lose=rates.lose * (FaultKind.LOST in on),
            repeat=rates.repeat * (FaultKind.REPEATED in on),
            delay=rates.delay * (FaultKind.LATE in on),
            max_delay_s=rates.max_delay_s,
            stall=rates.stall * (FaultKind.STALL in on),
            stall_s=rates.stall_s,
            corrupt=rates.corrupt * (FaultKind.CORRUPTED in on),
            tear=rates.tear * (FaultKind.TORN in on),
            max_notice_s=self.max_notice_s,
        )


FOURTH_EDITION = 20_000
"""First seed of walks in which routers die."""
FIFTH_EDITION = 30_000
"""First seed of walks in which workers have tiers."""
_SHARES = (0.15, 0.3, 0.6)
"""Shares of the kinds of faults that are on."""


def draw_settings(seed: int, *, num_requests: int) -> ChaosSettings:
    """Return the walk of a seed: a shape, a load, and some kinds of faults (swarm testing).

    A walk with every kind at once hides what a few of them would show: workers die before anything else can happen.
    """
    first = draw_first_settings(seed, num_requests=num_requests)
    share = random.Random(f"walk {seed}").choice(_SHARES)
    later = random.Random(f"walk {seed}, later faults")
    faults = (first.faults - LATER_FAULTS) | {fault for fault in sorted(_SECOND_FAULTS) if later.random() < share}
    haste = later.choice((1.0, 1.0, 2.0, 4.0))
    settings = replace(
        first,
        faults=faults,
        max_notice_s=MAX_NOTICE_S,
        has_long_answers=True,
        patience_s=later.choice((0.5, 0.1)),
        num_blocks=later.choice((32, 48, 96)),
        rate_per_s=first.rate_per_s * haste,
        mean_gap_s=first.mean_gap_s / haste,
    )
    # The third edition added these: they are drawn after everything older, which thus stays the same.
    flips = {FaultKind.FLIP} if later.random() < share else set()
    settings = replace(settings, faults=faults | flips, direct_share=later.choice((0.0, 0.3)))
    # The fourth edition added this one.
    has_crashes = seed >= FOURTH_EDITION and later.random() < share
    if has_crashes:
        settings = replace(settings, faults=settings.faults | {FaultKind.ROUTER_CRASH})
    # The fifth edition added tiers.
    return replace(settings, num_tier_blocks=later.choice((0, 64, 512))) if seed >= FIFTH_EDITION else settings


def draw_first_settings(seed: int, *, num_requests: int) -> ChaosSettings:
    """Return the walk of a seed as it was in the first edition, for seeds that found something there."""
    draw = random.Random(f"walk {seed}")
    share = draw.choice(_SHARES)
    first = [fault for fault in FaultKind if fault not in LATER_FAULTS]
    faults = frozenset(fault for fault in first if draw.random() < share) or frozenset({draw.choice(first)})
    later = random.Random(f"walk {seed}, later faults")
    faults |= {fault for fault in (FaultKind.CORRUPTED, FaultKind.TORN) if later.random() < share}
    return ChaosSettings(
        num_requests=num_requests,
        seed=seed,
        faults=faults,
        max_notice_s=0.0,
        has_long_answers=False,
        num_prefill=draw.choice((0, 1, 2, 3)),
        num_decode=draw.choice((2, 3, 4)),
        num_routers=draw.choice((1, 2, 3)),
        rate_per_s=draw.choice((5.0, 10.0, 20.0)),
        mean_gap_s=draw.choice((3.0, 6.0, 12.0)),
        cancelled_share=draw.choice((0.0, 0.03, 0.2)),
    )


@dataclass(slots=True)
class ChaosReport:
    """Events of a walk."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests by outcome: "complete", "cancelled", or an error class."""
    faults: Counter[FaultKind] = field(default_factory=Counter)
    """Faults that happened; of messages, those concerned."""
    num_flooding: int = 0
    """Requests of floods, which are in no outcome."""
    num_direct: int = 0
    """Requests whose clients streamed from workers."""
    num_lost_tails: int = 0
    """Times that such a client asked again for tokens that a worker had written and that were lost with it."""
    num_lost_routers: int = 0
    """Times that a client asked again because its router had died."""
    num_replans: int = 0
    virtual_s: float = 0.0
    longest_wait_s: float = 0.0
    """Longest time to the first token, of all requests but a flood's."""
    longest_pause_s: float = 0.0
    """Longest time between two messages with tokens of one answer."""
    drain_s: float = 0.0
    """Time from the end of all faults to the last reply."""
    whole_s: float = 0.0
    """Time from the end of all faults until every router had every worker again."""
    violations: list[str] = field(default_factory=list)
    """Broken invariants; empty in a correct walk."""
