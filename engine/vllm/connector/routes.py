"""Which rank of a server takes which heads from which rank of another, for any two numbers of ranks.

vLLM gives each rank an equal run of the key-value heads or, when there are more ranks than heads, one head to several
ranks. A latent (MLA) is one head, which every rank has.
"""

from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Place of a rank in its server."""

    rank: int
    num_ranks: int
    num_heads: int
    """Key-value heads of the model."""

    @property
    def heads(self) -> range:
        """Heads of this rank."""
        return _heads(self.rank, self.num_ranks, self.num_heads)

    def own(self, heads: range) -> range:
        """Return some of its heads as this rank numbers its own."""
        return range(heads.start - self.heads.start, heads.stop - self.heads.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Heads that travel together."""

    source: int
    """Rank that has them."""
    puller: int
    """Rank that takes them."""
    heads: range


def routes(num_heads: int, *, num_sources: int, num_pullers: int) -> tuple[Route, ...]:
    """Return all routes between two servers. Each rank that pulls takes each of its heads once."""
    found: list[Route] = []
    for puller in range(num_pullers):
        source_of = {
            head: _source(head, puller, num_heads, num_sources=num_sources, num_pullers=num_pullers)
            for head in _heads(puller, num_pullers, num_heads)
        }
        for source, group in groupby(source_of, key=source_of.__getitem__):
            heads = list(group)
            found.append(Route(source=source, puller=puller, heads=range(heads[0], heads[-1] + 1)))
    return tuple(found)


def _heads(rank: int, num_ranks: int, num_heads: int) -> range:
    first = rank * num_heads // num_ranks
    return range(first, first + max(1, num_heads // num_ranks))


def _source(head: int, puller: int, num_heads: int, *, num_sources: int, num_pullers: int) -> int:
    """Return the rank that sends a head; pullers of one head take turns among the ranks that have it."""
    num_holders = max(1, num_sources // num_heads)
    num_takers = max(1, num_pullers // num_heads)
    holder = puller % num_takers * num_holders // num_takers
    return head * num_sources // num_heads + holder
