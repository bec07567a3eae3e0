"""Recent demand on a cluster, as routers report it and planners use it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.wire import check_number
from kvrelay.v1 import router_admin_pb2

_LONGEST_S = 86_400.0
_COUNTS = ("num_arrived", "num_refused", "num_finished", "num_good", "num_queued", "num_queued_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """Cost of one request, as its router saw it. Lengths in tokens."""

    num_prompt_tokens: int
    num_computed_tokens: int
    """Prompt tokens that were in no cache and had to be computed."""
    num_output_tokens: int
    num_read_tokens: int = 0
    """Cached prompt tokens that were planned to be read from tiers."""
    num_evicted_tokens: int = 0
    """Computed tokens that had been cached and were evicted before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Demand of the last `window_s` seconds on all routers together."""

    window_s: float
    num_arrived: int
    """Requests that arrived, refused ones included."""
    num_refused: int
    num_finished: int
    num_good: int
    """Finished requests within the objectives for the first token and for the gap between tokens."""
    shapes: tuple[RequestShape, ...]
    """A uniform sample of the requests that finished in the window; empty until one has."""
    num_queued: int
    """Requests that wait in routers' lines now."""
    num_queued_tokens: int
    """Prompt tokens of the waiting requests."""
    ttft_p90_s: float | None
    """90th percentile over the sampled requests that finished in the window; None without any."""
    tpot_p90_s: float | None
    """90th percentile of the mean gap between their tokens."""
    burstiness: float = 1.0
    """Variance over mean of the arrivals per second; 1.0: independent arrivals (Poisson)."""


def demand_to_proto(demand: Demand) -> router_admin_pb2.Demand:
    """Return the message."""
    return router_admin_pb2.Demand(**asdict(demand))


def demand_from_proto(message: router_admin_pb2.Demand) -> Demand:
    """Return the record. Raises ValueError, naming the field, for a value that no router can have counted."""
    counts = {name: getattr(message, name) for name in _COUNTS}
    seconds: dict[str, Any] = {
        name: check_number(getattr(message, name), f"demand.{name}", highest=_LONGEST_S)
        if message.HasField(name)
        else None
        for name in ("ttft_p90_s", "tpot_p90_s")
    }
    return Demand(
        **counts,
        **seconds,
        window_s=check_number(message.window_s, "demand.window_s", highest=_LONGEST_S),
        burstiness=check_number(message.burstiness, "demand.burstiness", highest=_LONGEST_S),
        shapes=tuple(
            RequestShape(
                num_prompt_tokens=shape.num_prompt_tokens,
                num_computed_tokens=min(shape.num_computed_tokens, shape.num_prompt_tokens),
                num_output_tokens=shape.num_output_tokens,
                num_read_tokens=min(shape.num_read_tokens, _num_cached(shape)),
                num_evicted_tokens=min(shape.num_evicted_tokens, shape.num_computed_tokens, shape.num_prompt_tokens),
            )
            for shape in message.shapes
        ),
    )


def _num_cached(shape: router_admin_pb2.RequestShape) -> int:
    return max(0, shape.num_prompt_tokens - shape.num_computed_tokens)


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
        tpot_p90_s=max((d.tpot_p90_s for d in demands if d.tpot_p90_s is not None), default=None),
        burstiness=weighted / num_arrived if num_arrived else 1.0,
    )
