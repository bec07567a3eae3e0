"""Cuts of the simulated network: directions between two hosts in which nothing arrives.

TCP sends lost packets again, so what arrives at a cut is held until it heals, then delivered in order. Whether the
connection lasts until then is decided by its keepalive (`SimNetwork.break_off`).
"""

from collections import Counter
from collections.abc import Callable
from contextvars import Context
from typing import Any

from measure.simulate.loop import VirtualLoop

Direction = tuple[str, str]
"""Addresses of sender and receiver."""


class Cuts:
    """Directions that are cut, and what waits there. Event loop only."""

    def __init__(self, loop: VirtualLoop, context: Context) -> None:
        """`context`: that of deliveries."""
        self._loop = loop
        self._context = context
        self._num_cuts: Counter[Direction] = Counter()
        self._held: dict[Direction, list[tuple[Callable[..., object], tuple[Any, ...]]]] = {}

    def cut(self, direction: Direction) -> None:
        """Cut a direction; as many `heal` restore it."""
        self._num_cuts[direction] += 1

    def heal(self, direction: Direction) -> None:
        """Undo one `cut`; with the last one, everything that was held arrives."""
        self._num_cuts[direction] -= 1
        if not self._num_cuts[direction]:
            del self._num_cuts[direction]
            for deliver, arguments in self._held.pop(direction, ()):
                self._loop.call_soon(deliver, *arguments, context=self._context)

    def parts(self, one: str, other: str) -> bool:
        """Return whether two hosts are cut off from each other, in one direction at least."""
        return (one, other) in self._num_cuts or (other, one) in self._num_cuts

    def arrive(self, direction: Direction, deliver: Callable[..., object], *arguments: Any) -> None:
        """Call `deliver`, now or when the direction is healed."""
        if direction in self._num_cuts:
            self._held.setdefault(direction, []).append((deliver, arguments))
        else:
            deliver(*arguments)
