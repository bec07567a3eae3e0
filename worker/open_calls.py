"""The calls that a worker serves now, and whether it is idle."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kv_transfer.handoff import HandoffTable


class OpenCalls:
    """Counts calls of routers and of other workers. Event loop only."""

    def __init__(self, handoffs: HandoffTable) -> None:
        """`handoffs`: while the worker holds any, it is not idle."""
        self._handoffs = handoffs
        self._none_open = asyncio.Event()
        self._none_open.set()
        self.num_open = 0
        self.num_begun = 0
        """Calls since process start."""
        self.num_requests = 0
        """Calls that served a request, since process start."""
        self.num_cancelled = 0
        """Calls of `num_requests` that were cancelled."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a call that serves a request, and whether it was cancelled."""
        self.num_requests += 1
        with self.transfer():
            try:
                yield
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """Count a call that serves a transfer."""
        self.num_begun += 1
        self.num_open += 1
        self._none_open.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._none_open.set()

    @property
    def is_idle(self) -> bool:
        """Whether there are no calls and no handoffs."""
        return not (self.num_open or self._handoffs.num_leases)

    async def until_idle(self) -> None:
        """Wait until `is_idle`, which holds until the caller's next await."""
        while not self.is_idle:
            await self._none_open.wait()
            await self._handoffs.until_empty()
