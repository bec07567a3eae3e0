"""Runs made by hand and by simulated queues."""

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from measure.load.records import (
    GeneratorReport,
    Outcome,
    PoolSample,
    RequestRecord,
    Run,
    RunInfo,
    WorkerSample,
)
from measure.load.store import RunWriter


def make_request(
    index: int = 0, *, due_s: float = 0.0, ttft_s: float = 0.1, gaps_s: Sequence[float] = (), **fields: Any
) -> RequestRecord:
    """Return a request whose answer comes in pieces of one token; complete unless `outcome` is given."""
    chunk_s = tuple(float(at_s) for at_s in due_s + ttft_s + np.cumsum([0.0, *gaps_s]))
    given: dict[str, Any] = {
        "index": index,
        "session": index,
        "turn": 0,
        "kind": "chat",
        "due_s": due_s,
        "sent_s": due_s,
        "chunk_s": chunk_s,
        "chunk_tokens": (1,) * len(chunk_s),
        "end_s": chunk_s[-1],
        "outcome": Outcome.COMPLETED,
        "num_prompt_tokens": 100,
        "num_wanted_tokens": len(chunk_s),
    }
    return RequestRecord(**(given | fields))


def make_failure(index: int, outcome: Outcome, *, due_s: float = 0.0, error: str = "", **fields: Any) -> RequestRecord:
    """Return a request that failed after a second, without an answer."""
    nothing: dict[str, Any] = {"chunk_s": (), "chunk_tokens": (), "end_s": due_s + 1, "num_wanted_tokens": 1}
    return make_request(index, due_s=due_s, outcome=outcome, error=error, **(nothing | fields))


def make_info(**fields: Any) -> RunInfo:
    given: dict[str, Any] = {
        "name": "test",
        "target": "grpc://127.0.0.1:50051",
        "system": "kvrelay 0",
        "model": "fake",
        "workload": {},
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 10.0,
        "num_workers": {"prefill": 1, "decode": 1},
        "generator": make_generator(),
    }
    return RunInfo(**(given | fields))


def make_generator(*warnings: str) -> GeneratorReport:
    return GeneratorReport(
        num_processes=1,
        lag_p50_s=0.0001,
        lag_p99_s=0.001,
        lag_max_s=0.002,
        loop_lag_p99_s=0.001,
        cpu_share=0.1,
        num_late=0,
        warnings=warnings,
    )


def make_run(requests: Sequence[RequestRecord], *, samples: Sequence[PoolSample] = (), **info: Any) -> Run:
    return Run(info=make_info(**info), requests=tuple(requests), samples=tuple(samples))


def made_run(*, name: str = "made", num_refused: int = 0, ttft_s: float = 0.2) -> Run:
    """Return a run of 40 requests a second apart, the last ones of which were refused."""
    requests: list[RequestRecord] = [
        make_failure(i, Outcome.REFUSED, due_s=float(i), error="Overloaded: full")
        if i >= 40 - num_refused
        else make_request(i, due_s=float(i), ttft_s=ttft_s, gaps_s=[0.02, 0.03])
        for i in range(40)
    ]
    return make_run(requests, name=name)


def make_worker(worker_id: str, role: str, **fields: Any) -> WorkerSample:
    given: dict[str, Any] = {"num_running": 0, "num_waiting": 0, "num_blocks": 100, "num_used_blocks": 0}
    return WorkerSample(worker_id=worker_id, role=role, **(given | fields))


def queue_run(*, load: float, num_requests: int, num_servers: int = 1, seed: int = 0) -> list[RequestRecord]:
    """Return requests through an M/M/c queue at `load` of its capacity; the mean service time is a second."""
    rng = np.random.default_rng(seed)
    free_s = [0.0] * num_servers
    requests = []
    for index, due_s in enumerate(np.cumsum(rng.exponential(1 / (load * num_servers), size=num_requests)).tolist()):
        end_s = max(due_s, heapq.heappop(free_s)) + rng.exponential()
        heapq.heappush(free_s, end_s)
        requests.append(make_request(index, due_s=due_s, ttft_s=end_s - due_s))
    return requests


def write_run(run: Run, folder: Path) -> None:
    with RunWriter(folder) as writer:
        for request in run.requests:
            writer.record(request)
        for sample in run.samples:
            writer.sample(sample)
        writer.finish(run.info)
