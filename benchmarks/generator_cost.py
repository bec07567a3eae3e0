"""Cost of a request and of a token to the load generator: CPU time of one process, and how exact it is.

`python -m benchmarks.generator_cost [--rounds 3] [--json FILE]`

Method. 1P1D of fake engines (`model.engine: fake`, 2 ms a step) with both doors, and one generator process, driven by
`run_load` as `kvrelay bench` does. Loads arrive at constant intervals, so that every repetition is the same work:
`requests`: 40 requests/s for a single token each; `tokens`: 4 requests/s for 150 tokens each. Prompts are token ids, 64
or 4096 of them. The process's CPU time (user + system, from the kernel) is read at seconds 1.5 and 6.5 of the run, when
everything is warm. The cost of its heartbeat (a run of one request a second) is taken off, and the rest divided by the
requests that ended in between; of `tokens`, what single-token requests explain is taken off as well, and the rest is
divided by the messages that arrived. CPU time, since the machine is shared; the median of the rounds is reported with
their range.
`at 60 %` is what a process does until it gets company (`selfcheck.BUSY_SHARE`).
"""

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures
from measure.load.records import PoolSample, RequestRecord
from measure.load.run import run_load
from measure.load.selfcheck import BUSY_SHARE
from measure.load.spec import LoadSpec
from measure.load.targets.interface import TargetInfo, TargetSpec
from measure.workload.build import build_workload
from measure.workload.spec import parse_workload

BEGIN_S, END_S = 1.5, 6.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Work between two readings of the process's CPU time."""

    cpu_s: float
    num_requests: int
    num_pieces: int
    """Messages that brought tokens."""
    lag_p50_ms: float
    lag_p99_ms: float
    loop_lag_p99_ms: float


class _Reader:
    """Reads the generator process's CPU time while a run goes on; an `Observer`."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []
        self._readings: list[asyncio.TimerHandle] = []

    def started(self, spec: LoadSpec, target: TargetInfo) -> None:
        """Set two readings."""
        loop = asyncio.get_running_loop()
        self._readings = [loop.call_later(at_s, self._read) for at_s in (BEGIN_S, END_S)]

    def record(self, request: RequestRecord) -> None:
        """Do nothing: the run keeps it."""

    def sample(self, sample: PoolSample) -> None:
        """Do nothing."""

    def _read(self) -> None:
        for child in psutil.Process().children(recursive=True):
            if "measure.load.process" in child.cmdline():
                times = child.cpu_times()
                self.cpu_s.append(times.user + times.system)


async def measure(url: str, *, rate: float, num_prompt_tokens: int, num_output_tokens: int) -> Window:
    """Run one load of so many requests per second and return its window."""
    raw: dict[str, Any] = {
        "duration_s": END_S + 0.5,
        "streams": [
            {
                "name": "load",
                "arrivals": {"rate": rate, "process": "constant"},
                "first_tokens": num_prompt_tokens,
                "output_tokens": num_output_tokens,
            }
        ],
    }
    workload = build_workload(parse_workload(raw, source="benchmark"))
    reader = _Reader()
    run = await run_load(
        LoadSpec(name="cost", target=TargetSpec(url=url), workload=workload, processes=1, sample_period_s=60.0), reader
    )
    failed = [request.error for request in run.requests if not request.is_complete]
    if failed:
        raise SystemExit(f"{url}: {len(failed)} requests failed, the first with {failed[0]}")
    inside = [request for request in run.requests if BEGIN_S <= request.end_s < END_S]
    begin_s, end_s = reader.cpu_s
    generator = run.info.generator
    return Window(
        cpu_s=end_s - begin_s,
        num_requests=len(inside),
        num_pieces=sum(len(request.chunk_s) for request in inside),
        lag_p50_ms=generator.lag_p50_s * 1e3,
        lag_p99_ms=generator.lag_p99_s * 1e3,
        loop_lag_p99_ms=generator.loop_lag_p99_s * 1e3,
    )


def cost(idle_s: float, requests: Window, tokens: Window) -> dict[str, float]:
    """Return CPU time for each request and each piece of an answer, and what fits into a process until it is busy."""
    request_s = (requests.cpu_s - idle_s) / requests.num_requests
    piece_s = (tokens.cpu_s - idle_s - tokens.num_requests * request_s) / (tokens.num_pieces - tokens.num_requests)
    return {
        "us_per_request": request_s * 1e6,
        "us_per_piece": piece_s * 1e6,
        "requests_per_s_at_60": BUSY_SHARE / request_s,
        "pieces_per_s_at_60": BUSY_SHARE / piece_s,
    }


def main() -> None:
    """Measure everything and write it down."""
    args = command_line("generator_cost", __doc__, rounds=3).parse_args()
    model = {"engine": "fake", "fake_step_ms": 2.0, "max_model_len": 8192}
    pools = {name: {"num_blocks": 4096, "block_size": 16, "max_step_tokens": 8192} for name in ("prefill", "decode")}
    console, figures, kept = terminal(), Figures(), []
    with running_doors(launcher="local", console=console, model=model, pools=pools, router={"http_port": 0}) as (
        info,
        _config,
    ):
        urls = {"grpc": info.address, "http": f"http://{info.http_address}/v1"}
        idle = asyncio.run(measure(urls["grpc"], rate=1.0, num_prompt_tokens=64, num_output_tokens=1))
        for door, url in urls.items():
            for length in (64, 4096):
                for _ in range(args.rounds):
                    windows = [
                        asyncio.run(measure(url, rate=rate, num_prompt_tokens=length, num_output_tokens=num_tokens))
                        for rate, num_tokens in ((40.0, 1), (4.0, 150))
                    ]
                    figures.add("generator", f"{length} prompt tokens", door, **cost(idle.cpu_s, *windows))
                    kept.append({"door": door, "num_prompt_tokens": length, "windows": list(map(asdict, windows))})
                    console.print(f"{kept[-1]}")
    figures.show(console)
    write_figures(args.json, figures, method="benchmarks/generator_cost.py", idle=asdict(idle), runs=kept)


if __name__ == "__main__":
    main()
