"""The parts of a router, assembled: for `router.server` and for simulations and benchmarks without a server."""

import math
from dataclasses import dataclass

from common.clock import Clock
from common.config import RouterConfig
from common.parity import TextProbes
from common.trust.channels import Reach
from router.choosing.chooser import Chooser
from router.fleet.fleet import Fleet
from router.fleet.index import BYTES_PER_BLOCK, PrefixIndex
from router.fleet.silence import HEARTBEAT_S, SilenceWatch
from router.line.admission import Admission
from router.line.fair_queue import FairQueue
from router.line.line import Line
from router.line.read_ahead import LineReadAhead
from router.line.wait import Wait
from router.observe.alarms import Alarms
from router.observe.history import History
from router.observe.metrics import RouterMetrics, TenantMetrics
from router.observe.planner_report import PlannerReport
from router.placement.answer_pool import AnswerPool
from router.placement.plans import PolicyFactory, PolicySettings
from router.placement.policies.predictive import Predictive
from router.placement.policies.registry import POLICIES
from router.requests.orchestrator import Orchestrator


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParts:
    """A router without its doors."""

    fleet: Fleet
    index: PrefixIndex
    chooser: Chooser
    admission: Admission
    line: Line
    orchestrator: Orchestrator
    metrics: RouterMetrics
    alarms: Alarms
    silence: SilenceWatch | None
    """None when the configuration turns it off."""
    planner: PlannerReport
    history: History
    clock: Clock
    config: RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitutes:
    """Parts that a comparison puts in the place of a router's own."""

    policy: PolicyFactory | None = None
    """Makes the policy; None: the configured one."""
    queue: type[FairQueue[Wait]] = FairQueue
    """The order of the line."""


_LOCAL_LIMIT = 32


def _local_limit(config: RouterConfig, make_policy: PolicyFactory) -> float:
    if config.local_prefill_max_tokens != "auto":
        return config.local_prefill_max_tokens
    return math.inf if make_policy is Predictive else _LOCAL_LIMIT


def build_router(
    config: RouterConfig,
    *,
    clock: Clock,
    reach: Reach,
    substitutes: Substitutes | None = None,
    seed: int = 0,
    probes: TextProbes | None = None,
) -> RouterParts:
    """Return a router that knows no workers yet. `reach` is how it calls them.

    `seed` is for a policy's random choices. `probes` is what workers must make of the fixed texts; None where no text
    is served.
    """
    substitutes = substitutes or Substitutes()
    index = PrefixIndex(max_blocks=(config.index_memory_mib << 20) // BYTES_PER_BLOCK)
    metrics = RouterMetrics()
    heartbeat_s = 0.0 if config.silence_s is None else HEARTBEAT_S
    fleet = Fleet(index=index, clock=clock, reach=reach, probes=probes, heartbeat_s=heartbeat_s)
    make_policy = substitutes.policy or POLICIES[config.policy]
    settings = PolicySettings(
        local_prefill_max_tokens=_local_limit(config, make_policy),
        max_prefill_wait_s=config.max_prefill_wait_s,
        seed=seed,
    )
    chooser = Chooser(
        fleet=fleet,
        index=index,
        policy=make_policy(settings),
        clock=clock,
        max_wait_s=config.max_prefill_wait_s,
    )
    queues = {pool: substitutes.queue(late_share=config.late_share) for pool in AnswerPool}
    admission = Admission(
        fleet=fleet, queues=queues, clock=clock, max_queued=config.max_queued, metrics=TenantMetrics(metrics.registry)
    )
    ahead = LineReadAhead(index=index, members=fleet.members_by_id, admission=admission, metrics=metrics, clock=clock)
    line = Line(admission=admission, queues=queues, chooser=chooser, fleet=fleet, ahead=ahead, clock=clock)
    orchestrator = Orchestrator(
        fleet=fleet,
        line=line,
        chooser=chooser,
        metrics=metrics,
        clock=clock,
        config=config,
    )
    alarms = Alarms(
        members=lambda: fleet.members_by_id,
        block_size=lambda: 0 if fleet.model is None else fleet.model.block_size,
        clock=clock,
    )
    silence = None
    if config.silence_s is not None:
        silence = SilenceWatch(
            members=lambda: fleet.members_by_id.values(),
            on_silent=fleet.on_silent,
            clock=clock,
            silence_s=config.silence_s,
        )
    chooser.decisions.subscribe(metrics.compare_outcome)
    chooser.decisions.subscribe(alarms.note)
    metrics.watch_alarms(alarms)
    metrics.watch("kvrelay_requests_queued", "Requests that wait for a plan", lambda: line.num_queued)
    metrics.watch("kvrelay_requests_active", "Requests with a plan", lambda: admission.num_active)
    metrics.watch("kvrelay_bookings", "Bookings held on workers", lambda: len(fleet.bookings))
    metrics.watch("kvrelay_index_blocks", "Blocks known to the prefix index", lambda: index.num_blocks)
    metrics.watch(
        "kvrelay_index_evicted_blocks",
        "Blocks forgotten by the prefix index to bound memory",
        lambda: index.num_evicted,
    )
    metrics.watch("kvrelay_workers_ready", "Workers in use", fleet.count_ready)
    metrics.watch("kvrelay_workers_slow", "Workers several times slower than their pool", lambda: len(alarms.pace.slow))
    metrics.watch("kvrelay_workers_draining", "Workers that get no new requests", fleet.count_draining)
    metrics.watch_states(fleet.states)
    return RouterParts(
        fleet=fleet,
        index=index,
        chooser=chooser,
        admission=admission,
        line=line,
        orchestrator=orchestrator,
        metrics=metrics,
        alarms=alarms,
        silence=silence,
        planner=PlannerReport(clock),
        history=History(in_flight=orchestrator.in_flight, recent=orchestrator.recent, clock=clock),
        clock=clock,
        config=config,
    )
