"""Interface between a load test and the servers under load."""

import enum
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from common.errors import InvalidRequest
from kvrelay.client.chat import ChatMessage
from measure.load.records import PoolSample, ServerReport

USUAL_VOCAB = 32_000
"""Vocabulary size that nearly all models exceed."""


class Feature(enum.StrEnum):
    """Extension that not every OpenAI-compatible server has."""

    IGNORE_EOS = "ignore_eos"
    MIN_TOKENS = "min_tokens"
    TOKEN_IDS = "return_token_ids"
    """Returns the token ids of an answer on request."""
    REPORT = "kvrelay"
    """Takes objectives and returns plan and timings (docs/openai.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """Everything that a process needs to reach a target."""

    url: str
    """`HOST:PORT` or `grpc://HOST:PORT`: our gRPC API. `http(s)://HOST[:PORT]/v1`: an OpenAI-compatible server;
    `anthropic+http(s)://HOST[:PORT]/v1`: one with Anthropic's Messages API."""
    api_key: str | None = None
    model: str | None = None
    """Name of a served model; None: the first one."""
    tls: bool | str | None = None
    """How to connect, in the form of `kvrelay.client.tls.Tls`: a file with certificates, or a keyword."""
    direct: bool = False
    """gRPC only: tokens come directly from the decode workers."""
    features: tuple[Feature, ...] | None = None
    """Extensions of an OpenAI-compatible server; None before `describe`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """Description of a target by itself."""

    system: str
    """"kvrelay 0.1.0", "vllm 0.12.1", …"""
    model: str
    max_model_len: int | None
    vocab_size: int | None
    num_workers: dict[str, int]
    """Workers by role; empty when the target does not report them."""
    takes_objectives: bool = False
    """Whether the server reads the objectives that a request names."""
    notes: tuple[str, ...] = ()
    """Features that the server does not have, and what follows for the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """A request with its full prompt."""

    prompt: str | Sequence[int] | Sequence[ChatMessage]
    num_prompt_tokens: int
    """Planned length; approximate for text."""
    num_output_tokens: int
    """Exact length of the answer: end-of-sequence tokens are ignored."""
    seed: int
    timeout_s: float
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    wants_token_ids: bool = False
    """Whether a later request continues the answer by its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAnswer:
    """An answer without its times."""

    text: str
    token_ids: tuple[int, ...] | None
    """None when the server returned no ids."""
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    """Server's own count; None when it is not reported."""
    report: ServerReport


class ChunkSink(Protocol):
    """Notes the arrival of tokens."""

    def __call__(self, num_tokens: int, /) -> None:
        """Note that tokens have just arrived; 0: something that the server's count may show to be one."""


PreparedCall: TypeAlias = Callable[[ChunkSink], Coroutine[Any, Any, TargetAnswer]]
"""Sends a request and reads the answer to its end; to be called once. The sink is called as soon as tokens are read,
once for all that arrived together.

Raises Overloaded for a refusal, DeadlineExceeded after the timeout, another KvrelayError for a failure. Cancelling the
call cancels the request on the server.
"""


class Target(Protocol):
    """A server under load. One event loop."""

    @property
    def name(self) -> str:
        """Kind and address, for display."""

    @property
    def spec(self) -> TargetSpec:
        """Specification from which another process makes the same target; complete after `describe`."""

    async def describe(self) -> TargetInfo:
        """Return the description of the target. Raises Unreachable or another KvrelayError."""

    def prepare(self, request: TargetRequest) -> PreparedCall:
        """Prepare a request ahead of its time, so that little is left to do when it is due. Raises KvrelayError."""

    async def sample(self, at_s: float) -> PoolSample | None:
        """Return the current state, stamped with `at_s`; None when the target reports nothing. Raises KvrelayError."""

    async def aclose(self) -> None:
        """Close the connections."""


def make_target(spec: TargetSpec) -> Target:
    """Return an unconnected target, which belongs to the event loop that first uses it. Raises InvalidRequest.

    Imports only the modules of its kind: a generator process starts while others measure.
    """
    scheme, separator, rest = spec.url.partition("://")
    is_anthropic = scheme.startswith("anthropic+")
    if separator and scheme.removeprefix("anthropic+") in ("http", "https"):
        from measure.load.targets.openai import OpenAiTarget

        try:
            host, _port = urlsplit(spec.url).hostname, urlsplit(spec.url).port
        except ValueError as error:
            raise InvalidRequest(f"target {spec.url!r} is no URL: {error}", field="target") from None
        if not host:
            raise InvalidRequest(f"target {spec.url!r} has no host", field="target")
        if not is_anthropic:
            return OpenAiTarget(spec)
        from measure.load.targets.anthropic import AnthropicTarget

        return AnthropicTarget(spec)
    address = rest if separator else spec.url
    if (separator and scheme != "grpc") or not all(map(_is_address, address.split(","))):
        raise InvalidRequest(
            f"target {spec.url!r} is neither HOST:PORT[,…], grpc://HOST:PORT[,…] nor [anthropic+]http(s)://HOST[:PORT]/v1",
            field="target",
        )
    from measure.load.targets.grpc import GrpcTarget

    return GrpcTarget(spec, address)


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 1 << 16
