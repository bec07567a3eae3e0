"""A policy whose plans also predict their first token.

For simulations: most published policies predict no times, so that `router.shed` refuses a request only when no worker
at all could serve it in time, those included that the policy would not choose. With a forecast of its own plan such a
policy refuses what it would serve late, which is the best shedding for a comparison under overload.
"""

from dataclasses import replace

from common.errors import Refused
from router.placement.plans import FleetView, PlacementRequest, Plan, Policy
from router.placement.policies.forecast import forecast_prompt


class WithForecast:
    """Chooses as another policy does."""

    def __init__(self, policy: Policy) -> None:
        """`policy`: one whose plans neither predict nor pull."""
        self._policy = policy

    def choose(self, request: PlacementRequest, fleet: FleetView) -> Plan | Refused:
        """Return the policy's plan with the wait and the computation at its worker, or the policy's refusal."""
        plan = self._policy.choose(request, fleet)
        if isinstance(plan, Refused):
            return plan
        worker = (fleet.decode if plan.prefill is None else fleet.prefill).find(plan.computes)
        assert worker is not None, f"{plan.computes} is not in the view"
        return replace(plan, predicted_ttft_s=forecast_prompt(request, worker).ttft_s)
