"""A rule of PTX: between the end of Hopper's asynchronous products and a refill of their operands stands a barrier.

`wgmma.wait_group` waits for the products of the warps that call it. Other warps' may still read the shared memory that
the next refill overwrites, unless all warps of the program meet in between.
"""

import re

_LABEL = re.compile(r"(\$\w+):")
_BRANCH = re.compile(r"(?:@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+);")
_COPY = re.compile(r"cp\.async\.(c[ag]|bulk)\S*\.shared")
_PRODUCT = re.compile(r"^wgmma\.mma_async")
_STORE = re.compile(r"st\.shared\.v4")


def refills_without_barrier(ptx: str) -> list[str]:
    """Return the refills that a wait for products precedes, and no barrier in between.

    Refills are copies from global memory; where a loop of products stores to shared memory, they are these stores, of
    operands that it has widened. Paths are the text from its beginning, and each loop twice.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    loops = _loops(lines)
    widens = any(_has(_PRODUCT, loop) and _has(_STORE, loop) for loop in loops)
    refill = _STORE if widens else _COPY
    return [line for path in (lines, *(2 * loop for loop in loops)) for line in _scan(path, refill)]


def _loops(lines: list[str]) -> list[list[str]]:
    """Return the lines from each label to the branches back to it."""
    labels: dict[str, int] = {}
    loops = []
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = number
        elif (branch := _BRANCH.match(line)) and branch[1] in labels:
            loops.append(lines[labels[branch[1]] : number])
    return loops


def _has(pattern: re.Pattern[str], lines: list[str]) -> bool:
    return any(pattern.search(line) for line in lines)


def _scan(lines: list[str], refill: re.Pattern[str]) -> list[str]:
    found = []
    is_behind_wait = False
    for line in lines:
        if line.startswith("wgmma.wait_group"):
            is_behind_wait = True
        elif line.startswith(("bar.sync", "barrier.sync")):
            is_behind_wait = False
        elif is_behind_wait and refill.search(line):
            found.append(line)
    return found
