"""Runs of chats beside documents with full reports of the server, drawn at random: what pages are made of."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from measure.load.records import Outcome, PoolSample, RequestRecord, Run, ServerReport
from tests.measure.load import made_runs
from tests.measure.load.made_runs import make_failure, make_generator, make_request, make_worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Parameters of a run."""

    num_requests: int = 400
    rate: float = 4.0
    num_prefill: int = 1
    """0 for aggregated serving, where prompts delay the answers of others."""
    num_decode: int = 2
    is_silent: bool = False
    """Whether the server sends only answers, no reports."""
    seed: int = 1
    name: str = "synthetic"
    warnings: tuple[str, ...] = ()


def make_run(shape: Shape | None = None) -> Run:
    """Return a run. Equal shapes give equal runs."""
    shape = shape or Shape()
    rng = np.random.default_rng(shape.seed)
    due = np.cumsum(rng.exponential(1 / shape.rate, shape.num_requests))
    requests = [_request(index, float(due_s), shape, rng) for index, due_s in enumerate(due)]
    workers = {"prefill": shape.num_prefill, "decode": shape.num_decode}
    run = made_runs.make_run(
        requests,
        samples=[_sample(at_s, shape, rng) for at_s in np.arange(0, due[-1] + 5, 0.5)],
        name=shape.name,
        workload={"name": "chats beside documents", "seed": shape.seed},
        num_workers={role: number for role, number in workers.items() if number},
        generator=make_generator(*shape.warnings),
        labels={"arm": "aggregated" if not shape.num_prefill else "disaggregated"},
    )
    if not shape.is_silent:
        return run
    silent = tuple(replace(request, server=ServerReport()) for request in run.requests)
    return Run(info=replace(run.info, num_workers={}), requests=silent)


def _request(index: int, due_s: float, shape: Shape, rng: np.random.Generator) -> RequestRecord:
    is_document, turn = rng.random() < 0.15, int(rng.integers(0, 5))
    fields: dict[str, Any] = {
        "session": index // 3,
        "turn": 0 if is_document else turn,
        "kind": "documents" if is_document else "chat",
        "sent_s": due_s + 0.0004,
        "num_prompt_tokens": int(rng.lognormal(8.3, 0.5)) if is_document else int(rng.lognormal(5.5, 0.6)) + 300 * turn,
    }
    queue_s, prefill_s, exposed_s = float(rng.exponential(0.1)), fields["num_prompt_tokens"] * 1e-4, rng.gamma(2, 0.004)
    gaps_s = rng.gamma(4, 0.004, size=1 + int(rng.gamma(2, 40))) * (1 if shape.num_prefill else 3)
    failure = rng.random()
    if index and failure < 0.02:
        outcome = Outcome.REFUSED if failure < 0.01 else Outcome.FAILED
        return make_failure(index, outcome, due_s=due_s, error=f"{outcome}: no worker 7f3a", **fields)
    moves = shape.num_prefill > 0
    server = ServerReport(
        request_id=f"r-{index}", queue_s=queue_s, prefill_s=prefill_s, ttft_s=queue_s + prefill_s, num_attempts=1,
        transfer_s=exposed_s + 0.4 * prefill_s if moves else None, transfer_exposed_s=exposed_s if moves else None,
        num_cached_tokens=0 if is_document else 300 * turn, num_pulled_tokens=0 if is_document else 150 * turn,
        transfer_bytes=fields["num_prompt_tokens"] * 6144 if moves else 0, transport="shm" if moves else None,
        prefill_worker="prefill-0" if moves else None, decode_worker=f"decode-{index % shape.num_decode}",
        predicted_ttft_s=0.2,
    )  # fmt: skip
    ttft_s = queue_s + prefill_s + 0.003
    return make_request(index, due_s=due_s, ttft_s=ttft_s, gaps_s=gaps_s.tolist(), server=server, **fields)


def _sample(at_s: float, shape: Shape, rng: np.random.Generator) -> PoolSample:
    names = [f"prefill-{n}" for n in range(shape.num_prefill)] + [f"decode-{n}" for n in range(shape.num_decode)]
    workers = tuple(
        make_worker(
            name,
            name.partition("-")[0],
            num_running=int(rng.integers(0, 9)),
            num_waiting=int(rng.integers(0, 3)),
            num_used_blocks=int(rng.integers(10, 90)),
            num_computed_tokens=int(1000 * at_s),
            busy_s=0.8 * float(at_s),
        )
        for name in names
    )
    return PoolSample(at_s=float(at_s), num_queued=int(rng.integers(0, 4)), workers=workers)
