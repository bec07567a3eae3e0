"""Names of workers: stable while they live, whatever pool they are in.

A worker is named after the pool that it was started for, and keeps its name when its role flips. So a pool may hold
names of the other one, and a new worker takes the lowest number that nobody has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.processes.plan import ProcessRole, ProcessSpec


def home_first(spec: ProcessSpec) -> tuple[bool, str, int]:
    """Return the key of a pool's order: its own names first, by number. Whoever comes last goes, or flips, first."""
    home, _, _ = spec.name.rpartition("-")
    return home != spec.role, home, spec.index


def with_living_names(
    planned: Sequence[ProcessSpec], living: Mapping[ProcessRole, Sequence[ProcessSpec]]
) -> list[ProcessSpec]:
    """Return as many workers of each pool as planned: by the names of those that live, first ones first, then new ones.

    What is planned for a pool differs in names alone.
    """
    taken = {spec.name for pool in living.values() for spec in pool}
    named: list[ProcessSpec] = []
    for role in dict.fromkeys(spec.role for spec in planned):
        wanted = [spec for spec in planned if spec.role is role]
        names = [spec.name for spec in living.get(role, ())][: len(wanted)]
        free = (name for number in range(len(taken) + len(wanted)) if (name := f"{role}-{number}") not in taken)
        names += [next(free) for _ in range(len(wanted) - len(names))]
        named += [replace(spec, name=name) for spec, name in zip(wanted, names, strict=True)]
    return named
