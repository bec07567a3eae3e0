"""What a load test needs of a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.client.records import ChatMessage
from loadtest.records import PoolSample, ServerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What a target says of itself."""

    system: str
    """"kvrelay 0.1.0", "vllm 0.12.1", …"""
    model: str
    max_model_len: int | None
    vocab_size: int | None
    num_workers: dict[str, int]
    """By role; empty: not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """A request, written out."""

    prompt: str | Sequence[int] | Sequence[ChatMessage]
    num_prompt_tokens: int
    """As planned; text has about so many."""
    num_output_tokens: int
    """Exactly so many are wanted: end-of-sequence tokens are ignored."""
    seed: int
    timeout_s: float
    ttft_slo_s: float | None = None
    itl_slo_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAnswer:
    """What came, but for its times."""

    text: str
    token_ids: tuple[int, ...] | None
    """None: the server told no ids."""
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    """By the server's own count; None: not told."""
    report: ServerReport


class ChunkSink(Protocol):
    """Takes the times of an answer."""

    def __call__(self, num_tokens: int) -> None:
        """Note that tokens came just now."""


class Target(Protocol):
    """A server under load. One event loop."""

    @property
    def name(self) -> str:
        """Kind and address, for people."""

    async def describe(self) -> TargetInfo:
        """Return what it says of itself. Raises Unreachable, or another KvrelayError."""

    async def send(self, request: TargetRequest, on_chunk: ChunkSink) -> TargetAnswer:
        """Send a request and read the answer to its end; `on_chunk` is called as soon as tokens are read.

        Raises Overloaded for a refusal, DeadlineExceeded after the timeout, another KvrelayError for a failure.
        Cancelling the call cancels the request on the server.
        """

    async def sample(self, at_s: float) -> PoolSample | None:
        """Return the workers' state now, stamped with `at_s`; None when the target tells nothing."""

    async def aclose(self) -> None:
        """Close its connections."""
