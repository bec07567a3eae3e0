"""Writes the reference of all commands, from their declarations: `python -m cli.reference docs/commands.md`."""

import sys
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import typer

_HEAD = """# Commands

Every command of `kvrelay` with its arguments and options; `kvrelay COMMAND --help` shows the same in the terminal.
`python -m cli.reference docs/commands.md` generates this page from the declarations in `cli/`.
"""
_COMMON = """## Options of several commands

Described here once; each command below names those that it takes.
"""
_EXAMPLES = "\b\n"
_MIN_SHARING = 3
"""Number of commands from which on an option that is the same in all of them is described once."""


def reference() -> str:
    """Return the page."""
    from cli.main import app

    root = typer.main.get_command(app)
    shared = Counter(_row(each) for command in _all_commands(root) for each in _shown(command))
    common = {row: None for row, num_commands in shared.items() if num_commands >= _MIN_SHARING}
    return "\n".join([_HEAD, _COMMON, _table([*common]), *_commands(root, "kvrelay", common.keys(), depth=2)])


def _all_commands(group: Any) -> Iterator[Any]:
    for command in group.commands.values():
        if not command.hidden:
            yield command
            if hasattr(command, "commands"):
                yield from _all_commands(command)


def _commands(group: Any, path: str, common: Set[str], *, depth: int) -> Iterator[str]:
    panel = None
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if depth == 2 and command.rich_help_panel != panel:
            panel = command.rich_help_panel
            yield f"## {panel}\n"
        yield from _command(command, f"{path} {name}", common, depth=depth + 1)


def _command(command: Any, path: str, common: Set[str], *, depth: int) -> Iterator[str]:
    yield f"{'#' * depth} {path}\n"
    text, _, examples = (command.help or "").partition(_EXAMPLES)
    paragraphs = (" ".join(each.split()) for each in text.split("\n\n"))
    yield "\n\n".join(each for each in paragraphs if each) + "\n"
    if examples:
        yield f"```\n{examples.strip()}\n```\n"
    rows = {_row(each): each for each in _shown(command)}
    if own := [row for row in rows if row not in common]:
        yield _table(own)
    if also := [f"`{each.opts[0]}`" for row, each in rows.items() if row in common]:
        yield f"[Common options](#options-of-several-commands): {', '.join(also)}\n"
    if hasattr(command, "commands"):
        yield from _commands(command, path, common, depth=depth)


def _shown(command: Any) -> list[Any]:
    return [each for each in command.params if not getattr(each, "hidden", False)]


def _table(rows: list[str]) -> str:
    return "\n".join(["| | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _row(parameter: Any) -> str:
    """Return the line of an argument or an option."""
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    else:
        named = [*parameter.opts, *parameter.secondary_opts]
        names = ", ".join(f"`{each}{f' {parameter.metavar}' if parameter.metavar else ''}`" for each in named)
    if parameter.envvar:
        names += f" (`{parameter.envvar}`)"
    return f"| {_cell(names)} | {_cell(_default(parameter))} | {_cell(parameter.help or '')} |"


def _default(parameter: Any) -> str:
    """Return what a parameter is when it is left out, as the help shows it; empty where that says it in words."""
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if not parameter.show_default or parameter.default in (None, False, (), [], "") or callable(parameter.default):
        return ""
    if parameter.default is True:
        return f"`{parameter.opts[0]}`"
    return f"`{getattr(parameter.default, 'value', parameter.default)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
