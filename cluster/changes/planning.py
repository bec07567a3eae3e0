"""Puts the planner of a cluster together: who asks the routers, who plans, who refuses, who publishes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from cluster.changes.autopilot import Autopilot
from cluster.changes.load_guard import LoadGuard, planner_settings
from cluster.changes.observing import RouterQuestions
from cluster.changes.plan_report import PlanGauges
from cluster.changes.scaling import Scaler, Workforce
from cluster.planner.slo_planner import SloPlanner
from cluster.processes.launcher import StartFailed
from common.clock import SystemClock
from common.config import ServingConfig
from common.metrics_server import MetricsServer, ScrapeTls
from common.trust.reach import Reach

logger = logging.getLogger(__name__)


class Cluster(Workforce, Protocol):
    """The supervisor."""

    @property
    def admin_addresses(self) -> Sequence[str]:
        """host:port where each router is administered."""

    @property
    def reach(self) -> Reach:
        """How it calls its processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A cluster's planner, and its guard against sizes below the load."""

    autopilot: Autopilot
    guard: LoadGuard
    gauges: PlanGauges
    config: ServingConfig
    scrape_tls: ScrapeTls | None = None

    @asynccontextmanager
    async def running(self, stopping: asyncio.Event) -> AsyncIterator[None]:
        """Plan while the block runs, until `stopping` is set. Raises StartFailed when the metrics' port is taken."""
        port, host = self.config.planner.metrics_port, self.config.router.host
        if port is None or self.autopilot.mode == "off":
            async with self.autopilot.running(stopping):
                yield
            return
        try:
            server = MetricsServer(self.gauges.registry, host=host, port=port, tls=self.scrape_tls)
        except OSError as error:
            raise StartFailed(f"planner.metrics_port: cannot listen on {host}:{port}: {error.strerror}") from error
        logger.info("planner's metrics", extra={"port": server.port})
        try:
            async with self.autopilot.running(stopping):
                yield
        finally:
            await asyncio.to_thread(server.close)


def make_planning(scaler: Scaler, cluster: Cluster, *, scrape_tls: ScrapeTls | None = None) -> Planning:
    """Return the planner of a cluster, at rest."""
    ask = RouterQuestions(lambda: cluster.admin_addresses, cluster.reach.router).ask
    clock, gauges = SystemClock(), PlanGauges()
    planner = SloPlanner(planner_settings(scaler.config))
    return Planning(
        autopilot=Autopilot(scaler, cluster, planner=planner, ask=ask, clock=clock, gauges=gauges),
        guard=LoadGuard(scaler, cluster, ask=ask, clock=clock),
        gauges=gauges,
        config=scaler.config,
        scrape_tls=scrape_tls,
    )
