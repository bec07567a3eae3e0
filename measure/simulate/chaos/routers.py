"""The routers of a walk. They may die: then their clients go on at another one, as `kvrelay.client` does."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from measure.simulate.network import SimNetwork
from router.parts import RouterParts


class RouterGone(Exception):
    """The router of a request has died."""


class ChaosRouters:
    """Routers at fixed addresses, of which at least one lives. Event loop only. Close with `aclose`."""

    def __init__(
        self, addresses: Sequence[str], make: Callable[[str], RouterParts], network: SimNetwork, *, may_die: bool
    ) -> None:
        """`make` returns a router that calls workers from an address."""
        self._addresses = addresses
        self._make = make
        self._network = network
        self._may_die = may_die
        self.alive = {address: make(address) for address in addresses}
        """By address; changes when one dies or is back."""
        self.on_back: Callable[[], None] = lambda: None
        """Called when a router is back, which knows no workers yet."""
        self._num_replans_of_dead = 0
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[asyncio.Task[None], RouterParts] = {}
        self._returning: dict[str, asyncio.TimerHandle] = {}
        self._closing: list[asyncio.Task[None]] = []

    @property
    def num_replans(self) -> int:
        """Replans of all routers, also of those that have died."""
        return self._num_replans_of_dead + sum(
            router.orchestrator.calls.totals.num_replans for router in self.alive.values()
        )

    def start(self) -> None:
        """Begin to watch for workers that fall silent."""
        for address in self.alive:
            self._watch(address)

    def for_client(self, number: int) -> RouterParts:
        """Return the router that a client asks first, or the next one that lives."""
        wanted = (self._addresses[(number + step) % len(self._addresses)] for step in range(len(self._addresses)))
        return next(self.alive[address] for address in wanted if address in self.alive)

    async def attempt(self, router: RouterParts, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run what a client does with a router. Raises RouterGone when the router dies."""
        if not self._may_die:
            await work()
            return
        if router not in self.alive.values():
            raise RouterGone
        task = asyncio.create_task(work())
        self._attempts[task] = router
        try:
            await task
        except asyncio.CancelledError:
            client = asyncio.current_task()
            has_left = client is not None and client.cancelling() > 0
            if has_left or router in self.alive.values():
                raise
            raise RouterGone from None
        finally:
            del self._attempts[task]

    def die(self, address: str, *, down_s: float) -> None:
        """End a router with all that it does, and bring a new one up after some seconds."""
        router = self.alive.pop(address)
        self._num_replans_of_dead += router.orchestrator.calls.totals.num_replans
        self._network.crash(address)
        for task, its_router in self._attempts.items():
            if its_router is router:
                task.cancel()
        self._close(address, router)
        loop = self._network.loop
        self._returning[address] = loop.call_later(down_s, self._come_back, address)

    def spare(self) -> None:
        """Bring all up now."""
        for address, timer in list(self._returning.items()):
            timer.cancel()
            self._come_back(address)

    async def aclose(self) -> None:
        """End all."""
        for address, router in self.alive.items():
            self._close(address, router)
        if self._closing:
            await asyncio.wait(self._closing)

    def _come_back(self, address: str) -> None:
        del self._returning[address]
        self.alive[address] = self._make(address)
        self._watch(address)
        self.on_back()

    def _watch(self, address: str) -> None:
        silence = self.alive[address].silence
        if silence is not None:
            self._watches[address] = self._network.loop.create_task(silence.watch())

    def _close(self, address: str, router: RouterParts) -> None:
        if address in self._watches:
            self._watches.pop(address).cancel()
        self._closing.append(self._network.loop.create_task(router.fleet.aclose()))
