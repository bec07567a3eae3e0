"""What was asked of a simulated cluster lately, from what became of its requests."""

from collections.abc import Sequence

import numpy as np

from common.demand import Demand, RequestShape
from router.parts import RouterParts
from simulator.records import RequestResult

_NUM_SHAPES = 256


def demand_of(
    results: Sequence[RequestResult], routers: Sequence[RouterParts], now_s: float, window_s: float
) -> Demand:
    """Return the demand of the last `window_s` seconds. Shapes are of the latest requests; objectives are not known."""
    window_s = min(window_s, now_s)
    since_s = now_s - window_s
    ended = [result for result in results if result.end_s is not None and result.end_s > since_s]
    finished = [result for result in ended if result.is_complete]
    waiting = [result for result in results if result.end_s is None and not result.decode_worker]
    answering = [result for result in results if result.first_token_s is not None and result.first_token_s > since_s]
    return Demand(
        window_s=window_s,
        num_arrived=sum(result.arrival_s > since_s for result in results),
        num_refused=len(ended) - len(finished),
        num_finished=len(finished),
        num_good=len(finished),
        shapes=tuple(
            RequestShape(
                num_prompt_tokens=result.num_prompt_tokens,
                num_computed_tokens=result.num_prompt_tokens - result.num_cached_tokens,
                num_output_tokens=result.num_output_tokens,
            )
            for result in finished[-_NUM_SHAPES:]
        ),
        num_queued=sum(router.admission.num_queued for router in routers),
        num_queued_tokens=sum(result.num_prompt_tokens for result in waiting),
        ttft_p90_s=_p90([result.ttft_s for result in answering if result.ttft_s is not None]),
        itl_p90_s=_p90([result.itl_s for result in finished if result.itl_s is not None]),
    )


def _p90(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 90)) if values else None
