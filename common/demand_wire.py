"""Converts demand to and from the wire, and merges the demand of several routers."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from common.demand import Demand, RequestShape
from kvrelay.v1 import router_admin_pb2

_LONGEST_S = 86_400.0
_COUNTS = ("num_arrived", "num_refused", "num_finished", "num_good", "num_queued", "num_queued_tokens")


def demand_to_proto(demand: Demand) -> router_admin_pb2.Demand:
    """Return the message."""
    return router_admin_pb2.Demand(**asdict(demand))


def demand_from_proto(message: router_admin_pb2.Demand) -> Demand:
    """Return the record. Raises ValueError, naming the field, for a value that no router can have counted."""
    counts = {name: getattr(message, name) for name in _COUNTS}
    seconds: dict[str, Any] = {
        name: _checked(getattr(message, name), f"demand.{name}") if message.HasField(name) else None
        for name in ("ttft_p90_s", "itl_p90_s")
    }
    return Demand(
        **counts,
        **seconds,
        window_s=_checked(message.window_s, "demand.window_s"),
        burstiness=_checked(message.burstiness, "demand.burstiness"),
        shapes=tuple(
            RequestShape(
                num_prompt_tokens=shape.num_prompt_tokens,
                num_computed_tokens=min(shape.num_computed_tokens, shape.num_prompt_tokens),
                num_output_tokens=shape.num_output_tokens,
            )
            for shape in message.shapes
        ),
    )


def merge_demands(demands: Sequence[Demand]) -> Demand:
    """Return the demand of one or several routers together.

    A router that started within the window counts as if its pace had been the same before. Each router's sample is cut
    in proportion to its requests, so that the whole is uniform again. The worst percentile counts.
    """
    window_s = max(demand.window_s for demand in demands)
    fractions = [len(demand.shapes) / demand.num_finished for demand in demands if demand.num_finished]
    fraction = min(fractions, default=0.0)
    num_arrived = sum(demand.num_arrived for demand in demands)
    weighted = sum(demand.num_arrived * demand.burstiness for demand in demands)
    return Demand(
        window_s=window_s,
        num_arrived=round(sum(d.num_arrived * window_s / d.window_s for d in demands if d.window_s)),
        num_refused=sum(demand.num_refused for demand in demands),
        num_finished=sum(demand.num_finished for demand in demands),
        num_good=sum(demand.num_good for demand in demands),
        shapes=tuple(
            shape for demand in demands for shape in demand.shapes[: math.ceil(fraction * demand.num_finished)]
        ),
        num_queued=sum(demand.num_queued for demand in demands),
        num_queued_tokens=sum(demand.num_queued_tokens for demand in demands),
        ttft_p90_s=max((d.ttft_p90_s for d in demands if d.ttft_p90_s is not None), default=None),
        itl_p90_s=max((d.itl_p90_s for d in demands if d.itl_p90_s is not None), default=None),
        burstiness=weighted / num_arrived if num_arrived else 1.0,
    )


def _checked(value: float, field: str) -> float:
    if not (0.0 <= value <= _LONGEST_S and math.isfinite(value)):
        raise ValueError(f"{field} is {value}; it must be finite, at least 0 and at most {_LONGEST_S:g}")
    return value
