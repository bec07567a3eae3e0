"""Refuses to make pools too small for what they carry now."""

from collections.abc import Mapping

from cluster.changes.observing import Ask, make_observation
from cluster.changes.scaling import Scaler, Workforce
from cluster.planner.observation import Pool
from cluster.planner.refusal import shortfall
from cluster.planner.settings import DECODE_HELP, Limits, PlannerSettings
from cluster.processes.plan import ProcessRole
from common.clock import Clock
from common.config import ServingConfig
from common.errors import InvalidRequest
from common.slo import Slo

_WINDOW_S = 30.0
"""Long enough to count, short enough to be the present."""


def planner_settings(config: ServingConfig) -> PlannerSettings:
    """Return what serving.yaml says to the planner."""
    slo, planner, router = config.slo, config.planner, config.router
    decode_helps = router.policy == "predictive" and router.local_prefill_max_tokens == "auto"
    return PlannerSettings(
        decode_help=DECODE_HELP if decode_helps else 0.0,
        slo=Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, ttft_tokens=slo.ttft_tokens),
        attainment=planner.attainment,
        prefill=Limits(smallest=planner.min_prefill, largest=planner.max_prefill),
        decode=Limits(smallest=planner.min_decode, largest=planner.max_decode),
        max_workers=planner.max_workers,
        max_utilization=planner.max_utilization,
        interval_s=planner.interval_s,
        stable_s=planner.stable_s,
        cooldown_s=planner.cooldown_s,
    )


class LoadGuard:
    """Knows the present load. Event loop only."""

    def __init__(self, scaler: Scaler, workforce: Workforce, *, ask: Ask, clock: Clock) -> None:
        self._scaler = scaler
        self._workforce = workforce
        self._ask = ask
        self._clock = clock

    async def check(self, wanted: Mapping[ProcessRole, int]) -> None:
        """Raise InvalidRequest when a pool would shrink below what the load needs. Without evidence all is allowed."""
        present = self._scaler.sizes()
        shrinking = {Pool(role.value): size for role, size in wanted.items() if size < present[role]}
        if not shrinking or (reports := await self._ask(_WINDOW_S)) is None:
            return
        config = self._scaler.config
        observed = make_observation(
            reports, self._workforce, self._scaler.times, config=config, now_s=self._clock.monotonic()
        )
        short = shortfall(observed, shrinking, planner_settings(config))
        if short is not None:
            raise InvalidRequest(f"{short}; --force does it anyway")
