"""The seam between a rank's connector and what connects to other servers."""

from collections.abc import Collection
from typing import Protocol

from engine.vllm.connector.orders import Chunk, Offer, Pull, RankAddress, RankResults


class Ready(Protocol):
    """Event of a device."""

    def synchronize(self) -> None:
        """Wait until it comes."""
        ...


class Endpoint(Protocol):
    """Transfers of one rank. Methods return at once, unless they say more."""

    address: RankAddress

    def begin(self, offer: Offer) -> None:
        """Expect the chunks of a prompt, and its puller."""
        ...

    def add(self, chunk: Chunk, ready: Ready | None) -> None:
        """Make pages of an offer available, once `ready` has come: a device may still be at work on them."""
        ...

    def end(self, request_ids: Collection[str]) -> None:
        """End the copies of offers, and those offers that are not whole; all then show up in the results."""
        ...

    def settle(self, request_ids: Collection[str]) -> None:
        """Wait until all chunks of offers so far are copied."""
        ...

    def pull(self, pull: Pull, ready: Ready | None) -> None:
        """Fill pages, once `ready` has come."""
        ...

    def cancel(self, request_ids: Collection[str]) -> None:
        """End the pulls of requests, if there are any; they still show up in the results."""
        ...

    def take_results(self, wait_s: float = 0.0) -> RankResults:
        """Return what has ended since the last call. If nothing has, wait so long for an end that is to come."""
        ...

    def close(self) -> None:
        """Stop listening; ends after the last write into pages."""
        ...
