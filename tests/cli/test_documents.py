"""The documents' commands exist, with their options, modules, targets and files."""

import re
from importlib.util import find_spec
from typing import Any

import pytest
import typer

from cli.main import app
from tests.documents import REPO, SHELL, Block, blocks, blocks_of, documents

_INLINE = re.compile(r"`((?:\.venv/bin/)?kvrelay [a-z][^`\n]*)`")
_OURS = re.compile(r"(?:^|[\s/'\"])kvrelay (?!@)(?=[a-z])([^|;&>)]*)")
_TARGET = re.compile(r"^([a-z-]+):.*##", re.MULTILINE)
_COMMANDS: Any = typer.main.get_command(app)
_FOLDERS = ("docs/", "deploy/", "benchmarks/", "tests/")


def fault_of(command: str) -> str:
    """Return what is wrong with a command line; nothing if it can be called."""
    for words in map(_words, _OURS.findall(command)):
        known = _COMMANDS
        while words and (commands := getattr(known, "commands", None)) is not None:
            name = words.pop(0)
            if name not in commands:
                return f"kvrelay has no command {name}"
            known = commands[name]
        options = {"--help", *(option for each in known.params for option in (*each.opts, *each.secondary_opts))}
        for word in words:
            if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options:
                return f"kvrelay {known.name} has no option {word}"
    for module in re.findall(r"python -m ([\w.]+)", command):
        if module.partition(".")[0] not in ("venv", "pip") and find_spec(module) is None:
            return f"there is no module {module}"
    targets = _TARGET.findall((REPO / "Makefile").read_text(encoding="utf-8"))
    if (made := re.match(r"make ([a-z-]+)", command)) and made[1] not in targets:
        return f"make has no target {made[1]}"
    read = _words(re.sub(r">\s*\S+", "", command))
    missing = [word for word in read if word.startswith(_FOLDERS) and not (REPO / word).exists()]
    return f"{missing} is not in the repository" if missing else ""


def _words(command: str) -> list[str]:
    return re.sub(r"['\"…]", "", command).split()


def unnamed(block: Block) -> list[str]:
    """Return the commands of a block whose language does not say that they are some."""
    return [line for line in block.commands if not block.language and re.match(r"(kvrelay|python|make|curl) ", line)]


@pytest.mark.parametrize("document", documents())
def test_every_fence_of_a_document_is_closed_before_the_next_one_opens(document: str) -> None:
    fences = [line for line in (REPO / document).read_text(encoding="utf-8").splitlines() if line.startswith("```")]
    assert [fence for fence in fences[1::2] if fence != "```"] == [], "what follows is shown as code"
    assert len(fences) % 2 == 0


@pytest.mark.parametrize("document", documents())
def test_commands_in_a_document_exist_with_their_options_and_files(document: str) -> None:
    found = blocks_of(document)
    text = (REPO / document).read_text(encoding="utf-8")
    lines = [line for block in found if block.language in SHELL for line in block.commands] + _INLINE.findall(text)

    assert {line: fault for line in lines if (fault := fault_of(line))} == {}
    assert [line for block in found for line in unnamed(block)] == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (".venv/bin/kvrelay up -c a.yaml", ""),
        ("kvrelay upp", "kvrelay has no command upp"),
        ("kvrelay bench run --rait 3", "kvrelay run has no option --rait"),
        ("python -m benchmarks.engin", "there is no module benchmarks.engin"),
        ("make tests", "make has no target tests"),
        ("kvrelay experiment run docs/examples/none.yaml", "['docs/examples/none.yaml'] is not in the repository"),
    ],
)
def test_command_that_cannot_be_called_is_found(command: str, fault: str) -> None:
    assert fault_of(command) == fault


def test_blocks_say_whether_they_run() -> None:
    text = "```bash {.no-run}\nmake demo  # all\n```\n\n```bash\na \\\n  b # c\n```\n\n```\nmake demo\n```\n"
    found = list(blocks("a.md", text))

    assert [(block.runs, block.commands) for block in found] == [
        (False, ["make demo"]),
        (True, ["a    b"]),
        (True, ["make demo"]),
    ]
    assert [unnamed(block) for block in found] == [[], [], ["make demo"]]
