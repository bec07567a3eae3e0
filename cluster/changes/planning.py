"""Assembles the planner of a cluster: questions to the routers, autopilot, load guard and metrics."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from cluster.changes.autopilot import Autopilot, PlanGauges
from cluster.changes.load_guard import LoadGuard, planner_settings
from cluster.changes.observing import ask_routers
from cluster.changes.scaling import Scaler
from cluster.planner.slo_planner import SloPlanner
from cluster.processes.launcher import StartFailed
from cluster.processes.workforce import Workforce
from common.clock import SystemClock
from common.config import ServingConfig
from common.metrics_server import MetricsServer, ScrapeTls

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A cluster's planner, and its guard against sizes below the load."""

    autopilot: Autopilot
    guard: LoadGuard
    config: ServingConfig
    scrape_tls: ScrapeTls | None = None

    @asynccontextmanager
    async def running(self, stopping: asyncio.Event) -> AsyncIterator[None]:
        """Plan while the block runs, until `stopping` is set. Raises StartFailed if the metrics' port is taken."""
        port, host = self.config.planner.metrics_port, self.config.router.host
        if port is None or self.autopilot.is_off:
            async with self.autopilot.running(stopping):
                yield
            return
        try:
            server = MetricsServer(self.autopilot.gauges.registry, host=host, port=port, tls=self.scrape_tls)
        except OSError as error:
            raise StartFailed(f"planner.metrics_port: cannot listen on {host}:{port}: {error.strerror}") from error
        logger.info("planner's metrics", extra={"port": server.port})
        try:
            async with self.autopilot.running(stopping):
                yield
        finally:
            await asyncio.to_thread(server.close)


def make_planning(scaler: Scaler, workforce: Workforce, *, scrape_tls: ScrapeTls | None = None) -> Planning:
    """Return the planner of a cluster, not running yet."""
    ask = partial(ask_routers, addresses=lambda: workforce.routers.admin_addresses, connect=workforce.reach.router)
    clock, planner = SystemClock(), SloPlanner(planner_settings(scaler.config))
    return Planning(
        autopilot=Autopilot(scaler, workforce, planner=planner, ask=ask, clock=clock, gauges=PlanGauges()),
        guard=LoadGuard(scaler=scaler, workforce=workforce, ask=ask, clock=clock),
        config=scaler.config,
        scrape_tls=scrape_tls,
    )
