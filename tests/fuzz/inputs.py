"""Inputs that are kept in the tree, and new ones by chance."""

import random
from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
"""A file for each target, with an input on each line in hexadecimal digits."""
REGRESSIONS = Path(__file__).parent / "regressions"
"""A folder for each target, with a file for each input that has found something."""
_MAX_KEPT = 60
"""Inputs of one target in its corpus."""


def read_kept(name: str) -> list[bytes]:
    """Return a target's corpus."""
    path = CORPUS / f"{name}.txt"
    return [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []


def keep(name: str, inputs: Sequence[bytes]) -> None:
    """Replace a target's corpus by some of the inputs, small ones and large ones."""
    inputs = sorted(set(inputs), key=lambda data: (len(data), data))
    kept = inputs[:: -(-len(inputs) // _MAX_KEPT)] if inputs else []
    (CORPUS / f"{name}.txt").write_text("".join(data.hex() + "\n" for data in kept))


def read_inputs(folder: Path) -> list[bytes]:
    """Return the inputs in a folder, one a file, in order."""
    return [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []


def mutate(draw: random.Random, inputs: Sequence[bytes]) -> bytes:
    """Return an input that is like one of those given, or like none."""
    if not inputs or draw.random() < 0.3:
        return draw.randbytes(draw.choice((2, 8, 30, 100, 300)))
    data = bytearray(draw.choice(inputs))
    for _ in range(draw.randrange(1, 5)):
        place = draw.randrange(len(data) + 1)
        data[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(4))
    return bytes(data)
