"""`kvrelay bench`'s generator as one tool among others."""

import asyncio
import statistics
from pathlib import Path

from benchmarks.foreign_load.report import Asked, Load, ToolFailed, ToolReport
from common.errors import KvrelayError
from measure.load.records import Run
from measure.load.run import run_load
from measure.load.spec import LoadSpec, LoadTestFailed
from measure.load.store import write_run
from measure.load.targets.interface import TargetSpec
from measure.workload.build import build_workload
from measure.workload.spec import parse_workload


def ours(asked: Asked, load: Load, folder: Path) -> ToolReport:
    """Run the load with our own generator; keeps the run as `kvrelay bench` does. Raises ToolFailed."""
    raw = {
        "name": "foreign-load",
        "content": "chat",
        "max_requests": load.num_requests,
        "streams": [
            {
                "name": "chat",
                "concurrency": load.concurrency,
                "first_tokens": load.num_prompt_tokens,
                "output_tokens": load.num_output_tokens,
            }
        ],
    }
    workload = build_workload(parse_workload(raw, source="foreign load"), seed=load.seed)
    spec = LoadSpec(name="ours", target=TargetSpec(url=f"{asked.root_url}/v1"), workload=workload, specification=raw)
    try:
        run = asyncio.run(run_load(spec))
    except (KvrelayError, LoadTestFailed) as error:
        raise ToolFailed(f"our generator: {error}") from error
    write_run(run, folder / "run")
    return _report(run)


def _report(run: Run) -> ToolReport:
    complete = [request for request in run.requests if request.is_complete]
    ttft = [request.ttft_s for request in complete if request.ttft_s is not None]
    tpot = [request.tpot_s for request in complete if request.tpot_s is not None]
    if not ttft or not tpot:
        raise ToolFailed("our generator got no answer")
    return ToolReport(
        num_complete=len(complete),
        num_failed=len(run.requests) - len(complete),
        num_prompt_tokens=sum(request.num_prompt_tokens for request in complete),
        num_output_tokens=sum(request.num_output_tokens for request in complete),
        ttft_p50_s=statistics.median(ttft),
        ttft_mean_s=statistics.fmean(ttft),
        tpot_p50_s=statistics.median(tpot),
        tpot_mean_s=statistics.fmean(tpot),
        e2e_p50_s=statistics.median(request.e2e_s for request in complete),
    )
