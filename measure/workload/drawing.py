"""Draws the sessions of a stream: random generators, and unique numbers of contents and sessions.

Contents have unique numbers: (counter · 3 + sort) · streams + position of the stream, where the sort distinguishes a
session's own texts, shared prefixes and blocks of a trace.
"""

import enum
from dataclasses import dataclass
from hashlib import blake2b
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Parameters for drawing the sessions of a stream."""

    seed: int
    position: int
    num_streams: int
    speed: float
    """Factor on the specified rate of arrivals."""
    duration_s: float
    """Time after which no session begins; infinity: no limit."""
    max_requests: float
    """Requests of the stream after which no session begins."""
    concurrency: int | None = None
    """Sessions at any time of a closed loop; None: an open loop."""

    def random(self, name: str, purpose: str, number: int = 0) -> Random:
        """Return a random generator that depends only on the seed and the arguments."""
        key = f"{self.seed}\0{name}\0{purpose}\0{number}".encode()
        return Random(int.from_bytes(blake2b(key, digest_size=16).digest()))

    def content(self, sort: "Sort", counter: int) -> int:
        """Return the number of a content."""
        return (counter * len(Sort) + sort) * self.num_streams + self.position

    def index(self, number: int) -> int:
        """Return the index of the stream's session with this number."""
        return number * self.num_streams + self.position


class Sort(enum.IntEnum):
    """Sort of a content."""

    OWN = 0
    PREFIX = 1
    BLOCK = 2
