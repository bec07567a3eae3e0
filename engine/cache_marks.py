"""Marks of a request: which leading blocks of its prompt stay cached, for how long, within which bounds."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMark:
    """The end of a prefix that is to stay cached."""

    num_blocks: int
    """Leading blocks of the prompt, whole ones."""
    ttl_s: float
    """Time after the last use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMarks:
    """The marks of a request whose tenant may pin blocks."""

    tenant: str
    max_blocks: int
    """Most blocks that the tenant may have pinned on this worker."""
    marks: tuple[CacheMark, ...] = ()
    """Shortest prefix first; none: the request only uses what is pinned."""

    @property
    def num_blocks(self) -> int:
        """Leading blocks that are marked."""
        return self.marks[-1].num_blocks if self.marks else 0

    def spans(self) -> Iterator[tuple[int, float]]:
        """Yield the marks with the time of their blocks: a later mark that lasts longer covers them, too."""
        for place, mark in enumerate(self.marks):
            yield mark.num_blocks, max(each.ttl_s for each in self.marks[place:])
