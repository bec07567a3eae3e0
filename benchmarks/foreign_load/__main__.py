"""Runs foreign load generators and ours in turns."""

import argparse
import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.clusters import running_doors
from benchmarks.command import terminal, write_figures
from benchmarks.figures import Figures, in_turn
from benchmarks.foreign_load.ours import ours
from benchmarks.foreign_load.peers import aiperf, guidellm
from benchmarks.foreign_load.report import OURS, Asked, Load, Tool, ToolFailed, add_report, verdicts
from benchmarks.peers.venv import AIPERF, GUIDELLM, VenvFailed, ensure_venv
from cluster.lifecycle import ClusterError
from common.model_files import DEFAULT_MODEL_ID, ModelNotFound, resolve_model
from common.signals import sigterm_interrupts
from measure.load.store import StoreError

_PEERS = {"guidellm": (GUIDELLM, guidellm), "aiperf": (AIPERF, aiperf)}
_WARM_UP_SEED = 1_000_000
_FAKE_STEP_MS = 20.0


def main() -> int:
    """Run everything; 1 when a tool failed or counted something else than what was asked for."""
    console = terminal(stderr=True)
    args = _arguments()
    try:
        with sigterm_interrupts():
            figures = _run(args, console)
    except (ToolFailed, VenvFailed, ClusterError, ModelNotFound, StoreError) as error:
        console.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    out = terminal()
    figures.show(out)
    for line in verdicts(figures):
        out.print(line)
    write_figures(args.out / "foreign_load.json", figures, method="benchmarks/foreign_load/__init__.py")
    return 0


def _run(args: argparse.Namespace, console: Console) -> Figures:
    tools = _tools(args.tools, console)
    model_dir = resolve_model(DEFAULT_MODEL_ID, local_files_only=True)
    figures = Figures()
    served = {"engine": "fake", "fake_step_ms": _FAKE_STEP_MS} if args.engine == "fake" else {}
    name = "fake" if args.engine == "fake" else model_dir.name
    with running_doors(launcher="local", console=console, model=served) as (info, _):
        asked = Asked(root_url=f"http://{info.http_address}", model=name, tokenizer_dir=model_dir)
        ours(asked, _load(args, users=max(args.concurrency), seed=_WARM_UP_SEED), _folder(args.out / "warm-up"))
        for number in range(args.rounds):
            for users in args.concurrency:
                for name in in_turn(list(tools), number):
                    load, tool = _load(args, users=users, seed=number * 1000 + users), tools[name]
                    report = tool(asked, load, _folder(args.out / f"{name.replace(' ', '-')}-{users}-{number}"))
                    if faults := report.faults(load):
                        raise ToolFailed(f"{name}, {users} users: {'; '.join(faults)}")
                    add_report(figures, users, name, report)
                    console.print(f"round {number + 1}: {name}, {users} users: as asked for")
    return figures


def _tools(names: str, console: Console) -> dict[str, Tool]:
    """Return what is run, by name; makes environments that are not there. Raises VenvFailed."""
    tools: dict[str, Tool] = {OURS: ours}
    for name in names.split(","):
        packages, run = _PEERS[name]
        tools[name] = partial(run, ensure_venv(packages, console.print))
    return tools


def _load(args: argparse.Namespace, *, users: int, seed: int) -> Load:
    return Load(
        concurrency=users,
        num_requests=args.requests * users,
        num_prompt_tokens=args.prompt_tokens,
        num_output_tokens=args.output_tokens,
        seed=seed,
    )


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Foreign load generators and ours against kvrelay's HTTP door.")
    parser.add_argument("--out", type=Path, required=True, help="folder for reports and logs; must not hold any")
    parser.add_argument("--tools", default=",".join(_PEERS), help=f"default: {','.join(_PEERS)}")
    parser.add_argument("--engine", choices=["torch", "fake"], default="torch")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4], help="users")
    parser.add_argument("--requests", type=int, default=10, help="of each user, in the mean")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for name in args.tools.split(","):
        if name not in _PEERS:
            parser.error(f"--tools: {name!r} is none of {', '.join(_PEERS)}")
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"--out: {args.out} is not empty")
    return args


if __name__ == "__main__":
    sys.exit(main())
