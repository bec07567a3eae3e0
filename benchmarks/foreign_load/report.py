"""Request to a load generator, and its report."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class ToolFailed(Exception):
    """A tool could not be run, or its report cannot be read; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A closed loop."""

    concurrency: int
    num_requests: int
    num_prompt_tokens: int
    """Tokens of the user's message; the chat template adds more."""
    num_output_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whom a tool asks."""

    root_url: str
    """Without /v1."""
    model: str
    tokenizer_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReport:
    """A tool's own figures of one run."""

    num_complete: int
    num_failed: int
    num_prompt_tokens: int
    """Tokens of all requests, by the server's count."""
    num_output_tokens: int
    ttft_p50_s: float
    ttft_mean_s: float
    tpot_p50_s: float
    """A request's mean gap between tokens: what guidellm and aiperf call inter-token latency."""
    tpot_mean_s: float
    e2e_p50_s: float

    def faults(self, load: Load) -> list[str]:
        """Return what is not as it was asked for, in words."""
        faults = []
        if self.num_failed or self.num_complete != load.num_requests:
            faults.append(f"{self.num_complete} of {load.num_requests} answered, {self.num_failed} failed")
        wanted = load.num_requests * load.num_output_tokens
        if self.num_output_tokens != wanted:
            faults.append(f"{self.num_output_tokens} output tokens, not {wanted}")
        if self.num_prompt_tokens < load.num_requests * load.num_prompt_tokens:
            faults.append(f"only {self.num_prompt_tokens} prompt tokens")
        return faults


Tool = Callable[[Asked, Load, Path], ToolReport]
"""Runs a load; keeps what it writes in a folder of its own, which exists. Raises ToolFailed."""
