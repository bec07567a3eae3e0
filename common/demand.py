"""What was asked of a cluster lately: what routers tell, and planners decide by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What one request cost, as its router saw it. Lengths in tokens."""

    num_prompt_tokens: int
    num_computed_tokens: int
    """Prompt tokens that were in no cache and had to be computed."""
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What was asked in the last `window_s` seconds, of all routers together."""

    window_s: float
    num_arrived: int
    """Requests that came, refused ones included."""
    num_refused: int
    num_finished: int
    num_good: int
    """Of the finished ones: within the objectives for the first token and for the gap between tokens."""
    shapes: tuple[RequestShape, ...]
    """A uniform sample of the requests that finished in the window; empty until one has."""
    num_queued: int
    """Requests that wait in routers' lines now."""
    num_queued_tokens: int
    """Prompt tokens of those."""
    ttft_p90_s: float | None
    """Of the requests that finished in the window, as far as they are sampled; None: of none."""
    itl_p90_s: float | None
    """The same of their mean gaps."""
    burstiness: float = 1.0
    """Variance over mean of the numbers that arrived in each second; 1.0: independent arrivals (Poisson)."""
