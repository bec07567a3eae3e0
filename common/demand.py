"""Recent demand on a cluster, as routers report it and planners use it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """Cost of one request, as its router saw it. Lengths in tokens."""

    num_prompt_tokens: int
    num_computed_tokens: int
    """Prompt tokens that were in no cache and had to be computed."""
    num_output_tokens: int


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
    itl_p90_s: float | None
    """90th percentile of the mean gap between their tokens."""
    burstiness: float = 1.0
    """Variance over mean of the arrivals per second; 1.0: independent arrivals (Poisson)."""
