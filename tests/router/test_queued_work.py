"""Sums of the work before a rank, against a plain list."""

import random

import pytest

from router.line.queued_work import QueuedWork


@pytest.mark.parametrize("seed", range(5))
def test_work_before_every_rank_is_the_sum_of_what_was_added_and_not_removed(seed: int) -> None:
    chance, work = random.Random(seed), QueuedWork()
    entries: list[tuple[tuple[float, ...], float]] = []
    for number in range(2000):
        # More come than go in the first half, so that blocks split; then they empty again.
        if entries and chance.random() < (0.3 if number < 1000 else 0.7):
            entry = entries.pop(chance.randrange(len(entries)))
            work.remove(*entry)
        else:
            entry = ((-chance.randrange(2), chance.uniform(0, 9), number), float(chance.randrange(1, 100)))
            entries.append(entry)
            work.add(*entry)
        rank = (-chance.randrange(2), chance.uniform(0, 9))
        assert work.before_s(rank) == sum(work_s for other, work_s in entries if other < rank)
        assert work.total_s == sum(work_s for _rank, work_s in entries)
    while entries:
        work.remove(*entries.pop())
    assert (work.total_s, work.before_s((9.0,))) == (0.0, 0.0)


def test_entries_of_equal_rank_are_removed_one_by_one() -> None:
    work = QueuedWork()
    for work_s in (1.0, 2.0, 2.0):
        work.add((7,), work_s)
    work.remove((7,), 2.0)
    assert (work.total_s, work.before_s((7,)), work.before_s((8,))) == (3.0, 0.0, 3.0)
