"""Forecasts of the time to first token and of the gap between tokens, with intervals.

There are two of the time to first token, both from receipt on: the first is made when the request enters the line, from
the work before it; the second when its plan is chosen, when the wait in line is known and the policy predicts the rest.
Each learns from its own outcomes (`router.placement.calibration`). Forecasts inform clients and operators; plans are
chosen by the raw predictions; a refusal for an objective (`router.shed: slo`) and the bound on a decode worker's batch
(`router.placement.policies.gaps`) read how far these are usually exceeded.
"""

from typing import TYPE_CHECKING

from common.errors import Refused
from common.wire_names import PlanKind
from router.placement.calibration import DurationForecast, ErrorBand
from router.placement.plans import PlacementRequest, Plan

if TYPE_CHECKING:
    from router.fleet.decisions import DecisionRecord


MOST = 0.8
"""Share of the outcomes that a refusal or a bound takes into account."""

MAX_ERROR = 1.2
"""Most that it takes into account: relative errors of short predictions are large and say nothing about long ones."""


class Forecaster:
    """Makes forecasts and learns from ended decisions. Event loop only."""

    def __init__(self) -> None:
        self._in_line = ErrorBand()
        self._ttft = {kind: ErrorBand() for kind in PlanKind}
        """Errors by kind of plan: a decode worker computes a prompt beside its answers, so its times vary more."""
        self._tpot = ErrorBand()

    def in_line(self, predicted_s: float, *, passed_s: float) -> DurationForecast:
        """Return the time to first token of a request that waits in line, `passed_s` after it was received."""
        return self._in_line.forecast(predicted_s, passed_s=passed_s)

    def ttft(self, request: PlacementRequest, plan: Plan) -> DurationForecast | None:
        """Return the time to first token with a plan that is chosen now; None when the policy predicts none.

        None also when the client has had its first token, through an earlier plan.
        """
        if plan.predicted_ttft_s is None or request.has_begun:
            return None
        return self._ttft[plan.kind].forecast(plan.predicted_ttft_s, passed_s=request.waited_s)

    def ttft_error(self, plan: Plan | Refused) -> float:
        """Return by which factor most first tokens are later than predicted, with such a plan or a remote one."""
        kind = plan.kind if isinstance(plan, Plan) else PlanKind.REMOTE
        return min(max(self._ttft[kind].factor(MOST), 1.0), MAX_ERROR)

    def gap_error(self) -> float:
        """Return by which factor most mean gaps are longer than predicted.

        Answers that join a batch later make its gaps longer, too, and count on purpose: while load rises, workers are
        filled to less than the objective, by at most MAX_ERROR, since reports lag and routers do not see each other's
        choices. The factor reaches that only where batches grow by nearly half during an answer, and forgets a rise
        when WINDOW answers have ended after it. The planner does not read it: no worker is started because of it.
        """
        return min(max(self._tpot.factor(MOST), 1.0), MAX_ERROR)

    def tpot(self, plan: Plan) -> DurationForecast | None:
        """Return the mean gap between tokens with a plan; None when the policy predicts none."""
        return None if plan.predicted_tpot_s is None else self._tpot.forecast(plan.predicted_tpot_s)

    def learn(self, decision: "DecisionRecord") -> None:
        """Learn from a decision whose attempt has ended."""
        if decision.ttft_s is not None:
            whole_s = decision.waited_s + decision.ttft_s
            if decision.ttft_forecast is not None:
                self._ttft[decision.plan.kind].learn(decision.ttft_forecast, whole_s)
            if decision.line_forecast is not None:
                self._in_line.learn(decision.line_forecast, whole_s)
        if decision.tpot_s is not None and decision.tpot_forecast is not None:
            self._tpot.learn(decision.tpot_forecast, decision.tpot_s)
