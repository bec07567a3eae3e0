"""What tiers are worth to agents that come back: sessions of a coding agent on simulated workers.

    python -m benchmarks.tiers --trace sessions.jsonl.gz [--json results/tiers.json]

Method: sessions of the trace begin one after the other, evenly over `--span` seconds, each as a closed loop as in
docs/loadtest.md. No request is sent after `--until` seconds. Router and workers are the serving code in
virtual time (`measure/simulate/`): prefill and decode workers of one model and device, whose pages hold a quarter of
the working set: the least size of one LRU cache of all requests, in the order of times without a server, that has 99 %
of the hits of an infinite one. Sessions with a prompt longer than `--longest` are left out, since workers must hold
several of them. Three arms with the same sessions: these pages alone, these pages with tiers (`--tiers`, of each
worker), and infinite pages. Hit rate: cached prompt tokens over all. A *first* turn is one whose prompt begins anew;
other requests are *follow-ups*. What different sessions share is not known, so they share nothing.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks.command import command_line, machine, terminal, write_json
from common.config import RouterConfig
from common.slo import Slo
from measure.experiment.users import Users
from measure.load.records import RequestRecord
from measure.simulate.cluster import run
from measure.simulate.records import Arrival, ClusterShape, NetworkShape, SimRun, SimSettings, TierShape
from measure.simulate.results import count_cached_tokens
from measure.simulate.roofline import Hardware
from measure.simulate.store import in_processes
from measure.workload.arrivals import Process
from measure.workload.build import build_workload
from measure.workload.playing import SessionPlay, cut_segment
from measure.workload.sessions import Segment, Session, Turn, Workload
from measure.workload.spec import ArrivalsSpec, RecordedSpec, RecordedStreamSpec, WorkloadSpec

PAGE_SHARE = 0.25
HIT_SHARE = 0.99


def until(arrivals: Iterable[Arrival], end_s: float) -> Iterator[Arrival]:
    """Yield the arrivals before some time; none follows from them after it."""
    for arrival in arrivals:
        follow_up = arrival.follow_up
        if arrival.at_s <= end_s:
            yield arrival if follow_up is None else replace(arrival, follow_up=_followed(follow_up, end_s))


def _followed(
    follow_up: Callable[[RequestRecord], Sequence[Arrival]], end_s: float
) -> Callable[[RequestRecord], Sequence[Arrival]]:
    return lambda result: list(until(follow_up(result), end_s))


def num_hits(prompts: Sequence[Sequence[int]], capacity: float) -> int:
    """Return how many leading blocks of these prompts one LRU cache of so many blocks has, over all of them."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        num_cached = next((i for i, block in enumerate(prompt) if block not in cache), len(prompt))
        hits += num_cached
        for block in reversed(prompt):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def working_set(prompts: Sequence[Sequence[int]]) -> int:
    """Return the least blocks of an LRU cache that has HIT_SHARE of the hits of an infinite one."""
    wanted = HIT_SHARE * num_hits(prompts, math.inf)
    low, high = 0, len({block for prompt in prompts for block in prompt})
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if num_hits(prompts, middle) >= wanted else (middle, high)
    return high


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """What one arm reached."""

    arm: str
    num_blocks: int
    """Pages of each worker."""
    tiers: Sequence[TierShape]
    num_requests: int
    num_incomplete: int
    hit_rate: float
    first_ttft_s: tuple[float, float]
    """Median and 90th percentile of first turns."""
    follow_up_ttft_s: tuple[float, float]
    tpot_s: float
    """Median of the mean gaps."""
    wall_s: float


def figures_of(arm: str, shape: ClusterShape, load: "Load", finished: SimRun) -> ArmFigures:
    """Return the figures of a run."""
    requests = [each for each in finished.requests if each.is_complete]

    def ttft_s(kind: str) -> tuple[float, float]:
        is_first = kind == "first"
        p50, p90 = np.percentile([each.ttft_s or 0.0 for each in requests if load.is_first(each) is is_first], [50, 90])
        return float(p50), float(p90)

    return ArmFigures(
        arm=arm,
        num_blocks=shape.num_blocks,
        tiers=shape.tiers,
        num_requests=len(finished.requests),
        num_incomplete=len(finished.requests) - len(requests),
        hit_rate=sum(map(count_cached_tokens, requests)) / sum(each.num_prompt_tokens for each in requests),
        first_ttft_s=ttft_s("first"),
        follow_up_ttft_s=ttft_s("follow-up"),
        tpot_s=float(np.median([each.tpot_s for each in requests if each.tpot_s])),
        wall_s=finished.wall_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The sessions that all arms serve."""

    trace: Path
    num_sessions: int
    longest: int
    span_s: float
    until_s: float

    def workload(self) -> Workload:
        """Return the first sessions of the trace whose prompts are short enough, which begin evenly."""
        stream = RecordedStreamSpec(
            name="agents",
            sessions=RecordedSpec(path=self.trace, limit=self.num_sessions, longest=self.longest),
            arrivals=ArrivalsSpec(rate=self.num_sessions / self.span_s, process=Process.CONSTANT),
        )
        return build_workload(WorkloadSpec(streams=(stream,)))

    def is_first(self, request: RequestRecord) -> bool:
        """Return whether a request is the first one of an agent: its prompt begins anew."""
        kept = self._turns(request.session)[request.turn].beginning
        return kept is None or not kept.num_tokens

    def _turns(self, session: int) -> Sequence[Turn]:
        return _recorded(self)[session].turns

    def pages(self, page: int) -> list[list[int]]:
        """Return the prompts as pages of so many tokens, in the order of an idle system's times."""
        timed: list[tuple[float, int, list[int]]] = []
        for session in _recorded(self):
            play = SessionPlay(session, cut_segment)
            due = play.begin(session.start_s)
            while due:
                turn, at_s = due[0].turn, due[0].due_s
                prompt = play.prompt(turn, session.turns[turn].segments)
                answer = Segment(-1 - len(timed), session.turns[turn].num_output_tokens)
                timed.append((at_s, len(timed), _pages(prompt, page)))
                due = sorted((*due[1:], *play.answered(turn, answer, at_s)), key=attrgetter("due_s"))
        return [pages for at_s, _, pages in sorted(timed) if at_s <= self.until_s]


@lru_cache(maxsize=1)
def _recorded(load: Load) -> Sequence[Session]:
    (stream,) = load.workload().streams
    return list(stream.sessions)


def _pages(prompt: Sequence[Segment], page: int) -> list[int]:
    """Return a name for each full page of a prompt: that of all before it."""
    names: list[int] = []
    before, begin = 0, 0
    for segment in prompt:
        end = begin + segment.num_tokens
        ends = range((begin // page + 1) * page, end + 1, page)
        names += [hash((before, segment.content, place - begin)) for place in ends]
        before, begin = hash((before, segment.content, segment.num_tokens)), end
    return names


def serve(arm: str, load: Load, shape: ClusterShape, hardware: Hardware) -> ArmFigures:
    """Serve the sessions on one arm."""
    pace, link, _kv = hardware.pace(shape.max_step_tokens)
    settings = SimSettings(
        prefill=pace,
        decode=pace,
        network=NetworkShape(kv_bytes_per_s=link.bytes_per_s),
        router=RouterConfig.model_validate({"metrics_port": None, "shed": "none", "queue_timeout_s": 3600}),
    )
    users = Users(load.workload(), slo=Slo(ttft_s=math.inf, tpot_s=math.inf))
    return figures_of(arm, shape, load, run(shape, settings, until(users.arrivals(), load.until_s)))


def main() -> None:
    """Run the arms and print their table."""
    parser = command_line("tiers", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="sessions, as JSON lines compressed with gzip")
    parser.add_argument("--sessions", type=int, default=200, help="number of sessions (default 200)")
    parser.add_argument("--longest", type=int, default=160_000, help="longest prompt of a session (default 160000)")
    parser.add_argument("--span", type=float, default=200.0, help="seconds in which they begin (default 200)")
    parser.add_argument("--until", type=float, default=420.0, help="seconds of requests (default 420)")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--device", default="h200-tp4")
    parser.add_argument("--workers", default="4P4D")
    parser.add_argument("--page", type=int, default=512, help="tokens of a page (default 512)")
    parser.add_argument("--tiers", default="512@40,2048@8", help="GiB@GB/s of each tier (default 512@40,2048@8)")
    parser.add_argument("--jobs", type=int, default=1, help="arms at a time (default 1)")
    options = parser.parse_args()
    console = terminal()

    load = Load(
        trace=options.trace,
        num_sessions=options.sessions,
        longest=options.longest,
        span_s=options.span,
        until_s=options.until,
    )
    hardware = Hardware(model=options.model, device=options.device, timing_file=None)
    prompts = load.pages(options.page)
    needed = working_set(prompts)
    num_prefill, num_decode = ClusterShape.parse_workers(options.workers)
    block_bytes = options.page * hardware.pace(8192)[2].bytes_per_token
    pages = ClusterShape(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_blocks=int(PAGE_SHARE * needed / (num_prefill + num_decode)),
        block_size=options.page,
        block_bytes=block_bytes,
    )
    sizes = (tuple(map(float, text.split("@"))) for text in options.tiers.split(","))
    tiers = tuple(TierShape(num_blocks=int(gib * 2**30) // block_bytes, bytes_per_s=rate * 1e9) for gib, rate in sizes)
    shapes = {
        "without tiers": pages,
        "with tiers": replace(pages, tiers=tiers),
        "infinite pages": replace(pages, num_blocks=2 * len({block for prompt in prompts for block in prompt})),
    }
    tasks = [(arm, load, shape, hardware) for arm, shape in shapes.items()]
    found = {each.arm: each for each in in_processes(serve, tasks, num_jobs=options.jobs)}
    arms = [found[arm] for arm in shapes]
    gib = needed * block_bytes / 2**30
    console.print(f"working set: {needed * options.page / 1e6:.1f} million tokens, {gib:.0f} GiB")
    console.print(_table(arms))
    arguments = {key: str(value) for key, value in vars(options).items() if key not in ("json", "trace", "jobs")}
    document = {"method": "benchmarks/tiers.py", "machine": machine(), "options": arguments}
    figures = {"working_set_tokens": needed * options.page, "arms": [asdict(arm) for arm in arms]}
    write_json(options.json, document | figures)


def _table(arms: Sequence[ArmFigures]) -> Table:
    table = Table("arm", "pages", "hit rate", "of infinite", "first p50", "p90", "follow-up p50", "p90", "TPOT p50")
    best = arms[-1].hit_rate
    for arm in arms:
        seconds = (*arm.first_ttft_s, *arm.follow_up_ttft_s)
        table.add_row(
            arm.arm,
            str(arm.num_blocks),
            f"{arm.hit_rate:.1%}",
            f"{arm.hit_rate / best:.1%}",
            *(f"{each:.2f} s" for each in seconds),
            f"{arm.tpot_s * 1e3:.1f} ms",
        )
    return table


if __name__ == "__main__":
    main()
