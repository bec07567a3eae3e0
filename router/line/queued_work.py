"""The work of waiting requests in the order of the line, so that a newcomer learns how much is before it."""

from bisect import bisect_left, insort

Rank = tuple[float, ...]
_BLOCK_SIZE = 64


class QueuedWork:
    """A sum of work by rank.

    Entries stand in order in blocks whose sums are kept: every operation on n entries looks at one block and at the
    sums of the n / _BLOCK_SIZE others.
    """

    def __init__(self) -> None:
        self._blocks: list[list[tuple[Rank, float]]] = []
        self._sums: list[float] = []

    @property
    def total_s(self) -> float:
        """Work of all entries."""
        return sum(self._sums)

    def before_s(self, rank: Rank) -> float:
        """Return the work of all entries with a lower rank."""
        position = self._find((rank, 0.0))
        if position == len(self._blocks):
            return self.total_s
        block = self._blocks[position]
        inside = block[: bisect_left(block, (rank, 0.0))]
        return sum(self._sums[:position]) + sum(work_s for _rank, work_s in inside)

    def add(self, rank: Rank, work_s: float) -> None:
        """Count work, at least 0."""
        if not self._blocks:
            self._blocks.append([(rank, work_s)])
            self._sums.append(work_s)
            return
        position = min(self._find((rank, work_s)), len(self._blocks) - 1)
        block = self._blocks[position]
        insort(block, (rank, work_s))
        if len(block) > 2 * _BLOCK_SIZE:
            self._blocks.insert(position + 1, block[_BLOCK_SIZE:])
            self._sums.insert(position + 1, 0.0)
            del block[_BLOCK_SIZE:]
            self._add_up(position + 1)
        self._add_up(position)

    def remove(self, rank: Rank, work_s: float) -> None:
        """Take back an entry that was added with exactly these values."""
        position = self._find((rank, work_s))
        block = self._blocks[position]
        index = bisect_left(block, (rank, work_s))
        assert block[index] == (rank, work_s), f"no entry of rank {rank}"
        del block[index]
        if block:
            self._add_up(position)
        else:
            del self._blocks[position], self._sums[position]

    def _find(self, entry: tuple[Rank, float]) -> int:
        """Return the block that holds the first entry from this one on; one past the last without any."""
        return bisect_left(self._blocks, entry, key=lambda block: block[-1])

    def _add_up(self, position: int) -> None:
        # Added up anew, not corrected by the difference: rounding errors would grow for ever.
        self._sums[position] = sum(work_s for _rank, work_s in self._blocks[position])
