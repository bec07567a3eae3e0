"""What users were promised, and whether they got it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Served(Protocol):
    """What became of one request, measured or simulated. Times in seconds."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of its prompt."""

    @property
    def is_complete(self) -> bool:
        """Whether every token came. Refusals, errors and cancellations are not complete."""

    @property
    def ttft_s(self) -> float | None:
        """When it was due to its first token; None without one."""

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between its tokens; None with fewer than two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What users were promised."""

    ttft_s: float
    """Request to first token, for each started `ttft_tokens` of its prompt, counted in fractions above the first."""
    tpot_s: float
    """Mean gap between a request's tokens."""
    ttft_tokens: int = 8192

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Slo":
        """Return the objectives of a stored run; version 0.1 stored `tpot_s` as `itl_s`. Raises TypeError."""
        return cls(**{"tpot_s" if key == "itl_s" else key: value for key, value in stored.items()})

    def ttft_of(self, num_prompt_tokens: int) -> float:
        """Return how long a prompt's first token may take."""
        return self.ttft_s * max(1.0, num_prompt_tokens / self.ttft_tokens)

    def meets_ttft(self, request: Served) -> bool:
        """Return whether the first token came in time."""
        return request.ttft_s is not None and request.ttft_s <= self.ttft_of(request.num_prompt_tokens)

    def meets_tpot(self, request: Served) -> bool:
        """Return whether the tokens came fast enough; one token has no gaps."""
        return request.tpot_s is None or request.tpot_s <= self.tpot_s

    def is_good(self, request: Served) -> bool:
        """Return whether the request was answered to its end as promised."""
        return request.is_complete and self.meets_ttft(request) and self.meets_tpot(request)
