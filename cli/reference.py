"""Writes the reference of all commands, from their declarations: `python -m cli.reference docs/commands.md`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

_HEAD = """# Commands

Every command of `kvrelay` with its arguments and options; `kvrelay COMMAND --help` shows the same in the terminal.
`python -m cli.reference docs/commands.md` generates this page from the declarations in `cli/`.
"""
_EXAMPLES = "\b\n"


def reference() -> str:
    """Return the page."""
    from cli.main import app

    return "\n".join([_HEAD, *_commands(typer.main.get_command(app), "kvrelay", depth=2)])


def _commands(group: Any, path: str, *, depth: int) -> Iterator[str]:
    panel = None
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if depth == 2 and command.rich_help_panel != panel:
            panel = command.rich_help_panel
            yield f"## {panel}\n"
        yield from _command(command, f"{path} {name}", depth=depth + 1)


def _command(command: Any, path: str, *, depth: int) -> Iterator[str]:
    yield f"{'#' * depth} {path}\n"
    text, _, examples = (command.help or "").partition(_EXAMPLES)
    paragraphs = (" ".join(each.split()) for each in text.split("\n\n"))
    yield "\n\n".join(each for each in paragraphs if each) + "\n"
    if examples:
        yield f"```\n{examples.strip()}\n```\n"
    rows = [_row(each) for each in command.params if not getattr(each, "hidden", False)]
    if rows:
        yield "\n".join(["| | default | meaning |", "|---|---|---|", *rows]) + "\n"
    if hasattr(command, "commands"):
        yield from _commands(command, path, depth=depth)


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
