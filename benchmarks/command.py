"""The command line of a benchmark, the terminal that it prints to, and the file that it writes."""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.figures import Figures
from common.cgroups import usable_cores

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")


def command_line(name: str, description: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks share: --json, and --rounds with this default."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"measured rounds (default {rounds})")
    parser.add_argument("--json", type=Path, help="write the values of all rounds to this file")
    return parser


def terminal(*, stderr: bool = False) -> Console:
    """Return a console; it is wide enough for every table where the output is not a terminal."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=200, soft_wrap=stderr)


def write_json(path: Path | None, document: Any) -> None:
    """Write a document; does nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_figures(path: Path | None, figures: Figures, *, method: str, **more: Any) -> None:
    """Write all rounds of all figures, the machine, and the file that has the method; does nothing without a path."""
    document = {"method": method, "machine": machine(), **more, "missing": figures.missing, "figures": figures.rows()}
    write_json(path, document)


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, its cores and instruction sets, kernel, Python."""
    fields = _cpuinfo()
    flags = set(fields.get("flags", "").split())
    return {
        "processor": fields.get("model name", platform.processor()),
        "cores": usable_cores(),
        "instructions": [flag for flag in _FLAGS if flag in flags],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor; empty where the kernel does not report them."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
