"""Realistic runs: a small deterministic model of two pools under load, with full reports of the server.

Chats of several turns and long documents arrive as Poisson processes. Prefill workers serve one prompt at a time; steps
of a decode worker take longer with more requests. Long waits are refused, and a few requests fail.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np

from measure.load.records import Outcome, PoolSample, RequestRecord, Run, RunInfo, ServerReport, WorkerSample
from tests.measure.load.made_runs import make_generator, make_info

NUM_BLOCKS = 4000
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Parameters of a run."""

    num_requests: int = 400
    rate: float = 4.0
    num_prefill: int = 1
    """0 for aggregated serving."""
    num_decode: int = 2
    document_share: float = 0.15
    max_wait_s: float = 8.0
    """Longest wait; longer ones are refused."""
    is_silent: bool = False
    """Whether the server sends only answers, no reports."""
    seed: int = 1
    name: str = "synthetic"
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class _Pools:
    shape: Shape
    prefill_free_s: list[float]
    decode_ends: list[list[float]]
    intervals: list[tuple[str, float, float, int]] = field(default_factory=list)
    """(worker, start, end, blocks) of each piece of work."""
    waits: list[tuple[float, float]] = field(default_factory=list)


def make_run(shape: Shape | None = None) -> Run:
    """Return a run. Equal shapes give equal runs."""
    shape = shape or Shape()
    rng = np.random.default_rng(shape.seed)
    due = np.cumsum(rng.exponential(1 / shape.rate, shape.num_requests))
    pools = _Pools(
        shape=shape,
        prefill_free_s=[0.0] * (shape.num_prefill or shape.num_decode),
        decode_ends=[[] for _ in range(shape.num_decode)],
    )
    requests = tuple(_request(index, float(due_s), pools, rng) for index, due_s in enumerate(due))
    end_s = max((request.end_s for request in requests), default=0.0)
    return Run(info=_info(shape, end_s), requests=requests, samples=() if shape.is_silent else _samples(pools, end_s))


def _request(index: int, due_s: float, pools: _Pools, rng: np.random.Generator) -> RequestRecord:
    shape = pools.shape
    is_document = rng.random() < shape.document_share
    turn = 0 if is_document else int(rng.integers(0, 5))
    num_prompt = int(rng.lognormal(8.3, 0.5)) if is_document else int(rng.lognormal(5.5, 0.6)) + 300 * turn
    num_output = 1 + int(rng.gamma(2, 40))
    sent_s = due_s + float(rng.exponential(0.0004))
    worker = int(np.argmin(pools.prefill_free_s))
    begin_s = max(sent_s + 0.002, pools.prefill_free_s[worker])
    common = {
        "index": index, "session": index // 3, "turn": turn, "kind": "documents" if is_document else "chat",
        "due_s": due_s, "sent_s": sent_s, "num_prompt_tokens": num_prompt, "num_wanted_tokens": num_output,
    }  # fmt: skip
    if begin_s - due_s > shape.max_wait_s:
        refused = {"chunk_s": (), "chunk_tokens": (), "end_s": sent_s + 0.01, "outcome": Outcome.REFUSED}
        return RequestRecord(**common, **refused, error="Overloaded: no worker can be in time")  # type: ignore[arg-type]
    num_cached = 0 if is_document or not turn else min(num_prompt - 1, 300 * turn)
    prefill_s = 0.01 + (num_prompt - num_cached) * 1.2e-4
    pools.prefill_free_s[worker] = begin_s + prefill_s
    decode = int(np.argmin([len(ends) for ends in pools.decode_ends])) if shape.num_prefill else worker
    pulls = shape.num_prefill > 0
    exposed_s = float(rng.gamma(2, 0.004)) + num_prompt * 2e-6 if pulls else 0.0
    first_s = begin_s + prefill_s + 0.003
    chunks = _chunks(pools, decode, (first_s, first_s + exposed_s), num_output, rng)
    blocks = -(-num_prompt // BLOCK_SIZE)
    prefill_name = f"prefill-{worker}" if pulls else f"decode-{worker}"
    pools.intervals.append((prefill_name, begin_s, begin_s + prefill_s, blocks))
    pools.intervals.append((f"decode-{decode}", chunks[0], chunks[-1], blocks))
    pools.waits.append((sent_s, begin_s))
    report = ServerReport(
        request_id=f"r-{index}", queue_s=begin_s - sent_s - 0.001, prefill_s=prefill_s,
        transfer_s=exposed_s + 0.4 * prefill_s if pulls else None, transfer_exposed_s=exposed_s if pulls else None,
        ttft_s=first_s - sent_s - 0.001, e2e_s=chunks[-1] - sent_s - 0.001, num_cached_tokens=num_cached,
        num_pulled_tokens=num_cached // 2 if pulls else 0, num_decode_cached_tokens=0,
        transfer_bytes=blocks * 98_304 if pulls else 0, transport="shm" if pulls else None,
        prefill_worker=prefill_name if pulls else None, decode_worker=f"decode-{decode}", num_attempts=1,
        predicted_ttft_s=float((first_s - sent_s) * rng.normal(1, 0.2)), predicted_cached_tokens=num_cached,
    )  # fmt: skip
    if rng.random() < 0.01:
        kept = chunks[: len(chunks) // 2]
        outcome, error, end_s = Outcome.FAILED, "WorkerLost: decode worker 7f3a is gone", chunks[-1]
    else:
        kept, outcome, error, end_s = chunks, Outcome.COMPLETED, "", chunks[-1] + 0.0005
    return RequestRecord(
        **common,  # type: ignore[arg-type]
        chunk_s=tuple(kept), chunk_tokens=(1,) * len(kept), end_s=end_s, outcome=outcome, error=error,
        server=ServerReport() if shape.is_silent else report,
    )  # fmt: skip


def _chunks(
    pools: _Pools, decode: int, start: tuple[float, float], num_output: int, rng: np.random.Generator
) -> list[float]:
    """Return the arrival of the tokens: the first, then the others after the transfer."""
    first_s, ready_s = start
    running = pools.decode_ends[decode]
    while running and running[0] < first_s:
        heapq.heappop(running)
    stall = 4.0 if not pools.shape.num_prefill else 1.0  # aggregated: prompts are computed between the steps
    gaps = rng.gamma(9, (0.012 + 0.0012 * len(running)) / 9, num_output - 1)
    gaps[rng.random(num_output - 1) < 0.02] *= 3 * stall
    times = [first_s, *(ready_s + np.cumsum(gaps)).tolist()]
    heapq.heappush(running, times[-1])
    return times


def _samples(pools: _Pools, end_s: float) -> tuple[PoolSample, ...]:
    period_s = max(0.5, end_s / 400)
    names = sorted({f"decode-{index}" for index in range(pools.shape.num_decode)} | {it[0] for it in pools.intervals})
    table = {name: np.array([it[1:] for it in pools.intervals if it[0] == name]).reshape(-1, 3) for name in names}
    waits = np.array(pools.waits).reshape(-1, 2)
    samples = []
    for at_s in np.arange(0, end_s + period_s, period_s):
        workers = tuple(_worker(name, table[name], float(at_s)) for name in names)
        queued = int(((waits[:, 0] <= at_s) & (waits[:, 1] > at_s)).sum())
        samples.append(PoolSample(at_s=float(at_s), num_queued=queued, workers=workers))
    return tuple(samples)


def _worker(name: str, rows: np.ndarray, at_s: float) -> WorkerSample:
    is_running = (rows[:, 0] <= at_s) & (rows[:, 1] > at_s)
    done = np.clip(np.minimum(rows[:, 1], at_s) - rows[:, 0], 0, None)
    used = min(NUM_BLOCKS, int(rows[is_running, 2].sum()))
    seen = rows[rows[:, 1] <= at_s, 2].sum()
    return WorkerSample(
        worker_id=name,
        role=name.split("-")[0],
        num_running=int(is_running.sum()),
        num_waiting=int(((rows[:, 0] > at_s) & (rows[:, 0] < at_s + 0.3)).sum()),
        num_blocks=NUM_BLOCKS,
        num_used_blocks=used,
        num_cached_blocks=int(min(NUM_BLOCKS - used, 0.6 * seen)),
        num_computed_tokens=int(seen * BLOCK_SIZE * 0.7),
        num_cached_tokens=int(seen * BLOCK_SIZE * 0.3),
        busy_s=float(min(at_s, done.sum())) if name.startswith("prefill") else float(0.8 * at_s),
    )


def _info(shape: Shape, end_s: float) -> RunInfo:
    workers = {"prefill": shape.num_prefill, "decode": shape.num_decode}
    return make_info(
        name=shape.name,
        workload={"name": "chats beside documents", "seed": shape.seed, "rate": shape.rate},
        duration_s=end_s,
        num_workers={} if shape.is_silent else {role: number for role, number in workers.items() if number},
        generator=make_generator(*shape.warnings),
        labels={"arm": f"{shape.num_prefill}P{shape.num_decode}D" if shape.num_prefill else "aggregated"},
    )
