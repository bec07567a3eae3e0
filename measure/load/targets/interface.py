"""What a load test needs of a server."""

import enum
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from common.errors import InvalidRequest
from kvrelay.client.records import ChatMessage
from measure.load.records import PoolSample, ServerReport


class Feature(enum.StrEnum):
    """What not every OpenAI-compatible server takes."""

    IGNORE_EOS = "ignore_eos"
    MIN_TOKENS = "min_tokens"
    TOKEN_IDS = "return_token_ids"
    """Tells the ids of an answer's tokens when asked."""
    REPORT = "kvrelay"
    """Takes objectives and tells plan and timings (docs/openai.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What a process needs to know in order to reach a target."""

    url: str
    """`HOST:PORT` or `grpc://HOST:PORT`: our gRPC API. `http(s)://HOST[:PORT]/v1`: an OpenAI-compatible server."""
    api_key: str | None = None
    model: str | None = None
    """None: the first one that is served."""
    tls: bool | str | None = None
    """How to connect, as `kvrelay.client.tls.Tls`: a file with certificates, or a word."""
    direct: bool = False
    """gRPC: tokens come straight from the decode workers."""
    features: tuple[Feature, ...] | None = None
    """Of an OpenAI-compatible server; None: not known before `describe`."""


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
    notes: tuple[str, ...] = ()
    """What the server does not offer, and what that means for the numbers, in words."""


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
    wants_token_ids: bool = False
    """Whether a later request continues the answer by its token ids."""


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

    def __call__(self, num_tokens: int, /) -> None:
        """Note that tokens came just now."""


PreparedCall: TypeAlias = Callable[[ChunkSink], Coroutine[Any, Any, TargetAnswer]]
"""Sends a request and reads the answer to its end; to be called once. The sink is called as soon as tokens are read,
and once for all that came together.

Raises Overloaded for a refusal, DeadlineExceeded after the timeout, another KvrelayError for a failure. Cancelling the
call cancels the request on the server.
"""


class Target(Protocol):
    """A server under load. One event loop."""

    @property
    def name(self) -> str:
        """Kind and address, for people."""

    @property
    def spec(self) -> TargetSpec:
        """What another process makes the same target from; after `describe`, with what that has found."""

    async def describe(self) -> TargetInfo:
        """Return what it says of itself. Raises Unreachable, or another KvrelayError."""

    def prepare(self, request: TargetRequest) -> PreparedCall:
        """Write a request out ahead of its time, so that little is left to do when it is due. Raises KvrelayError."""

    async def sample(self, at_s: float) -> PoolSample | None:
        """Return the workers' state now, stamped with `at_s`; None: the target tells nothing. Raises KvrelayError."""

    async def aclose(self) -> None:
        """Close its connections."""


def make_target(spec: TargetSpec) -> Target:
    """Return a target that is not connected yet. Belongs to the event loop that first uses it. Raises InvalidRequest.

    Imports only what its kind needs: a generator process starts while others measure.
    """
    scheme, separator, rest = spec.url.partition("://")
    if separator and scheme in ("http", "https"):
        from measure.load.targets.openai import OpenAiTarget

        if not urlsplit(spec.url).hostname:
            raise InvalidRequest(f"target {spec.url!r} names no host", field="target")
        return OpenAiTarget(spec)
    address = rest if separator else spec.url
    if (separator and scheme != "grpc") or not all(map(_is_address, address.split(","))):
        raise InvalidRequest(
            f"target {spec.url!r} is neither HOST:PORT[,…], grpc://HOST:PORT[,…] nor http(s)://HOST[:PORT]/v1",
            field="target",
        )
    from measure.load.targets.grpc import GrpcTarget

    return GrpcTarget(spec, address)


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 1 << 16
