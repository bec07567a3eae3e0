"""Service-level objectives, and whether requests met them."""

from dataclasses import dataclass
from typing import Protocol


class ServedOutcome(Protocol):
    """Outcome of one request, measured or simulated. Times in seconds."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of its prompt."""

    @property
    def is_complete(self) -> bool:
        """Whether every token arrived. Refusals, errors and cancellations are not complete."""

    @property
    def ttft_s(self) -> float | None:
        """Time from its due time to its first token; None without one."""

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between its tokens; None with fewer than two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Service-level objectives."""

    ttft_s: float
    """Longest time to the first token; in proportion longer for prompts above `ttft_tokens`."""
    tpot_s: float
    """Largest mean gap between a request's tokens."""
    ttft_tokens: int = 8192

    def ttft_of(self, num_prompt_tokens: int) -> float:
        """Return the objective for the first token of a prompt."""
        return self.ttft_s * max(1.0, num_prompt_tokens / self.ttft_tokens)

    def meets_ttft(self, request: ServedOutcome) -> bool:
        """Return whether the first token arrived in time."""
        return request.ttft_s is not None and request.ttft_s <= self.ttft_of(request.num_prompt_tokens)

    def meets_tpot(self, request: ServedOutcome) -> bool:
        """Return whether the tokens arrived fast enough; a single token always does."""
        return request.tpot_s is None or request.tpot_s <= self.tpot_s

    def is_good(self, request: ServedOutcome) -> bool:
        """Return whether the request was answered to its end within the objectives."""
        return request.is_complete and self.meets_ttft(request) and self.meets_tpot(request)
