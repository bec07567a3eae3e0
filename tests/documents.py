"""The commands in the documents: their fenced blocks, and what a block may hold."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[1]
NO_RUN = "no-run"
"""Marks a block that no test runs: it needs another host, a GPU, a file of the reader's, or hours."""
SHELL, PYTHON = ("bash", "console", "sh"), ("python",)
_FENCE = re.compile(r"^```(\w*)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block."""

    document: str
    language: str
    runs: bool
    text: str

    @property
    def commands(self) -> list[str]:
        """Its lines without comments, those that end in a backslash joined with the next."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [found for line in lines if (found := re.sub(r"(^|\s)#.*", "", line).strip())]


def documents() -> list[str]:
    """Return the documents that hold commands; the page of all commands is made from their declarations."""
    found = [*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("benchmarks/*.md")]
    made = ("CHANGELOG.md", "docs/commands.md")
    return sorted(name for path in found if (name := path.relative_to(REPO).as_posix()) not in made)


def blocks(document: str, text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a document, in order."""
    for language, marks, code in _FENCE.findall(text):
        yield Block(document=document, language=language, runs=NO_RUN not in marks, text=code)


def blocks_of(document: str) -> list[Block]:
    """Return the fenced blocks of a document of the repository."""
    return list(blocks(document, (REPO / document).read_text(encoding="utf-8")))
