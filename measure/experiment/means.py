"""What arms have to work with: by it they are compared."""

import enum
from collections.abc import Iterable

from measure.experiment.points import Arm


class Unit(enum.StrEnum):
    """What there is so many of."""

    WORKER = "worker"
    THREAD = "thread"


def num_threads(arm: Arm) -> int | None:
    """Return the threads of all workers of an arm; None where that is not said."""
    each = arm.settings.get("threads", "")
    return int(each) * arm.num_workers if each.isdecimal() else None


def unit_of(arms: Iterable[Arm]) -> Unit:
    """Return what to count: threads where all arms say how many they have and their workers differ in it."""
    counts = {None if (threads := num_threads(arm)) is None else threads / arm.num_workers for arm in arms}
    return Unit.THREAD if None not in counts and len(counts) > 1 else Unit.WORKER


def num_units(arm: Arm, unit: Unit) -> int:
    """Return how many of them an arm has; at least 1."""
    count = num_threads(arm) if unit is Unit.THREAD else arm.num_workers
    return max(1, count or arm.num_workers)


def are_equals(one: Arm, other: Arm) -> bool:
    """Return whether two arms have as many workers, or as many threads in all."""
    threads = num_threads(one)
    return one.num_workers == other.num_workers or (threads is not None and threads == num_threads(other))
