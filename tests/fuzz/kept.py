"""Inputs in the tree: a corpus for each target, one a line, and what once found something, one a file."""

from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
REGRESSIONS = Path(__file__).parent / "regressions"


def kept_file(name: str) -> Path:
    """Return the file of a target's corpus, which may not exist."""
    return CORPUS / f"{name}.txt"


def read_kept(name: str) -> list[bytes]:
    """Return a target's corpus."""
    path = kept_file(name)
    return [bytes.fromhex(line) for line in path.read_text().split()] if path.exists() else []


def read_inputs(folders: Sequence[Path]) -> list[bytes]:
    """Return the inputs in some folders, one a file, in order."""
    return [path.read_bytes() for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]
