"""What a lookup in the prefix index found: groups of workers that hold equally much of a prompt."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from common.ids import WorkerId


class PrefixMatches(Mapping[WorkerId, int]):
    """How many leading blocks each worker holds; a worker that holds none is absent.

    Hundreds of workers often fall into two or three groups, so the mapping is made only when somebody asks for it:
    a policy that looks for the longest prefix reads `groups` or `best`. Valid for one decision; event loop only.
    """

    __slots__ = ("_by_worker", "_owners", "groups")

    def __init__(self, groups: Sequence[tuple[int, int]], owners: Sequence[WorkerId | None]) -> None:
        """`groups`: (blocks, bit mask of slots), few blocks first; `owners`: by slot, not changed afterwards."""
        self.groups = groups
        self._owners = owners
        self._by_worker: dict[WorkerId, int] | None = None

    @property
    def longest(self) -> int:
        """Leading blocks that the best worker holds; 0 when nobody holds any."""
        return self.groups[-1][0] if self.groups else 0

    def best(self, num_workers: int) -> list[tuple[int, WorkerId]]:
        """Return (blocks, worker) of those that hold most, best first, at least so many where there are: the last
        group is not cut.
        """
        found: list[tuple[int, WorkerId]] = []
        for num_blocks, workers in reversed(self.groups):
            if len(found) >= num_workers:
                break
            found.extend((num_blocks, worker_id) for worker_id in self._members(workers))
        return found

    def correct(self, worker_id: WorkerId, num_blocks: int) -> None:
        """Replace one worker's number. The groups stay as they were found."""
        self._expanded()[worker_id] = num_blocks

    def __getitem__(self, worker_id: WorkerId) -> int:
        return self._expanded()[worker_id]

    def get(self, worker_id: WorkerId, default: int = 0) -> int:  # type: ignore[override]  # no other default is of use
        """Return the worker's number of blocks."""
        by_worker = self._by_worker
        if by_worker is None:
            by_worker = self._expanded()
        return by_worker.get(worker_id, default)

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._expanded()

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(self._expanded())

    def __len__(self) -> int:
        return sum(workers.bit_count() for _num_blocks, workers in self.groups)

    def _expanded(self) -> dict[WorkerId, int]:
        if self._by_worker is None:
            self._by_worker = {}
            for num_blocks, workers in self.groups:
                self._by_worker.update(dict.fromkeys(self._members(workers), num_blocks))
        return self._by_worker

    def _members(self, workers: int) -> Iterator[WorkerId]:
        raw = np.frombuffer(workers.to_bytes(-(-len(self._owners) // 8), "little"), dtype=np.uint8)
        for slot in np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist():
            worker_id = self._owners[slot]
            assert worker_id is not None, f"slot {slot} has no owner"
            yield worker_id
