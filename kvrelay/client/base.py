"""Arguments and requests that the blocking and the asyncio client share."""

from collections.abc import Callable, Sequence
from typing import Any

from common.sampling import SamplingOptions
from kvrelay.client.failover import RouterList, countdown
from kvrelay.client.records import Prompt, ServiceTerms
from kvrelay.client.requests import credentials, generate_request
from kvrelay.v1 import inference_pb2

DEFAULT_ADDRESS = "127.0.0.1:50051"
TimeLeft = Callable[[], float | None]


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of the generating calls: those of sampling, and four of the request."""

    model: str
    """Name of a served model; default: the only one."""
    label: str
    """Appears in the cluster's logs."""
    timeout_s: float | None
    """Deadline of the whole call; default: the client's."""
    terms: ServiceTerms | None
    """How soon the answer is needed."""


class BaseClient:
    """The routers, the deadline and the API key of a client."""

    def __init__(
        self, addresses: str | Sequence[str], *, timeout_s: float | None, api_key: str | None, max_attempts: int | None
    ) -> None:
        self._routers = RouterList(addresses, max_attempts=max_attempts)
        self._timeout_s = timeout_s
        self._metadata = credentials(api_key)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All routers that the client knows."""
        return self._routers.addresses

    @property
    def address(self) -> str:
        """The router that calls go to."""
        return self._routers.current

    def _time_left(self, timeout_s: float | None) -> TimeLeft:
        """Start the deadline of a call."""
        return countdown(self._timeout_s if timeout_s is None else timeout_s)

    def _request(self, prompt: Prompt, options: GenerateOptions) -> tuple[inference_pb2.GenerateRequest, TimeLeft]:
        """Return the message and its deadline. Raises InvalidRequest for values that cannot be sent, TypeError."""
        sampling: Any = dict(options)
        timeout_s, terms = sampling.pop("timeout_s", None), sampling.pop("terms", None)
        model, label = sampling.pop("model", ""), sampling.pop("label", "")
        return generate_request(prompt, sampling, model=model, label=label, terms=terms), self._time_left(timeout_s)

    def _same_router(self) -> RouterList:
        """Return the current router alone, for a stream that cannot be resumed by another one."""
        return RouterList([self.address], max_attempts=1)
