"""Faults of the simulated network: messages that are lost, repeated, late or damaged, and cuts between hosts.

TCP sends lost packets again, so what arrives at a cut is held until it heals, then delivered in order. Whether the
connection lasts until then is decided by its keepalive (`SimNetwork.break_off`).
"""

import enum
import random
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from kvrelay.v1 import kv_transfer_pb2
from measure.simulate.loop import VirtualLoop

Direction = tuple[str, str]
"""Addresses of sender and receiver."""


class Transmission(enum.Enum):
    """How often a message arrives."""

    ONCE = "once"
    LOST = "lost"
    """The message vanishes. The connection breaks when the keepalive notices: TCP loses nothing and goes on."""
    DUPLICATED = "duplicated"
    """The message arrives twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Probabilities per message."""

    lose: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    max_delay_s: float = 0.0
    """Upper bound of the uniform delay of a late message."""
    stall: float = 0.0
    """Probability that the sending host stalls: all its messages wait."""
    stall_s: float = 0.0
    corrupt: float = 0.0
    """Probability that a byte of a message with KV is another one."""
    tear: float = 0.0
    """Probability that such a message arrives without its end."""
    max_notice_s: float = 0.0
    """Longest time until every end of every call of a lost connection has heard of it, in any order; 0: all at once."""


class SeededFaults:
    """Decides how every message arrives, in the order of sending; drawn from a seed."""

    def __init__(self, rates: FaultRates, *, seed: int, now_s: Callable[[], float]) -> None:
        self._rates = rates
        self._random = random.Random(seed)
        # Apart, so that they change no other draw.
        self._damage = random.Random(f"damage {seed}")
        self._notice = random.Random(f"notice {seed}")
        self._now_s = now_s
        self._silent_until_s: dict[str, float] = {}
        self.is_quiet = False
        """Whether faults are switched off."""
        self.num_lost = 0
        self.num_repeated = 0
        self.num_late = 0
        self.num_stalls = 0
        self.num_corrupted = 0
        self.num_torn = 0

    def damaged(self, message: kv_transfer_pb2.FetchBlocksResponse) -> kv_transfer_pb2.FetchBlocksResponse:
        """Return a message with a piece of KV as it arrives."""
        rates, draw = self._rates, self._damage
        if self.is_quiet or not (rates.corrupt or rates.tear):
            return message
        which, data = draw.random(), bytearray(message.chunk.data)
        if which < rates.corrupt:
            self.num_corrupted += 1
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif which < rates.corrupt + rates.tear:
            self.num_torn += 1
            del data[draw.randrange(len(data)) :]
        else:
            return message
        arrives = kv_transfer_pb2.FetchBlocksResponse()
        arrives.CopyFrom(message)
        arrives.chunk.data = bytes(data)
        return arrives

    @property
    def hear_apart(self) -> bool:
        """Whether the calls of a connection that is lost hear of it one by one."""
        return self._rates.max_notice_s > 0.0

    def notice_s(self) -> float:
        """Return the time after which one end of such a call does."""
        return self._notice.uniform(0.0, self._rates.max_notice_s)

    def transmission(self, source: str, target: str) -> tuple[Transmission, float]:
        """Return how often a message between two hosts arrives, and its delay in seconds."""
        rates, draw, now_s = self._rates, self._random.random, self._now_s()
        if self.is_quiet:
            return Transmission.ONCE, 0.0
        late_s = 0.0
        if draw() < rates.stall:
            self.num_stalls += 1
            self._silent_until_s[source] = now_s + rates.stall_s
        if draw() < rates.delay:
            self.num_late += 1
            late_s = draw() * rates.max_delay_s
        late_s = max(late_s, self._silent_until_s.get(source, 0.0) - now_s)
        which = draw()
        if which < rates.lose:
            self.num_lost += 1
            return Transmission.LOST, late_s
        if which < rates.lose + rates.repeat:
            self.num_repeated += 1
            return Transmission.DUPLICATED, late_s
        return Transmission.ONCE, late_s


class NetworkCuts:
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
