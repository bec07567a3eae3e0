"""What tiers are worth to agents that come back: sessions of a coding agent on simulated workers.

    python -m benchmarks.tiers --trace sessions.jsonl.gz [--json results/tiers.json]

Method: sessions of the trace begin one after the other, evenly over `--span` seconds. Within a session every agent (the
main one, and each sub-agent) sends its requests one by one, each `think_s` after the answer before; a sub-agent's first
request comes at its own time. No request is sent after `--until` seconds. Router and workers are the serving code in
virtual time (`measure/simulate/`): prefill and decode workers of one model and device, whose pages hold a quarter of
the working set: the least size of one LRU cache of all requests, in the order of the trace's own times, that has 99 %
of the hits of an infinite one. Sessions with a prompt longer than `--longest` are left out, since workers must hold
several of them. Three arms with the same sessions: these pages alone, these pages with tiers (`--tiers`, of each
worker), and infinite pages. Hit rate: cached prompt tokens over all. A *first* turn is the first request of an agent;
its other requests are *follow-ups*. What different sessions share is not known, so they share nothing.
"""

import gzip
import json
import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.command import command_line, machine, terminal, write_json
from common.config import RouterConfig
from measure.load.records import RequestRecord
from measure.simulate.cluster import run
from measure.simulate.records import Arrival, ClusterShape, NetworkShape, SimRun, SimSettings, TierShape
from measure.simulate.results import count_cached_tokens
from measure.simulate.roofline import Hardware
from measure.simulate.store import in_processes

TRACE_BLOCK = 64
"""Tokens of the trace's blocks."""
PAGE_SHARE = 0.25
HIT_SHARE = 0.99
_NUM_IDS = 1 << 20
"""Contents of a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A request of the trace."""

    at_s: float
    """Time since its session began."""
    think_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    agent: str
    block_ids: np.ndarray[Any, np.dtype[np.uint32]]
    """Content of each block of 64 tokens, a partial last one included."""

    def prompt(self) -> "array[int]":
        """Return its tokens."""
        return array("I", np.repeat(self.block_ids, TRACE_BLOCK)[: self.num_prompt_tokens].tobytes())


Session = Sequence[AgentRequest]


def read_sessions(path: Path) -> Iterator[Session]:
    """Yield the sessions of a trace: JSON lines, compressed with gzip. Contents of different sessions differ."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            session: list[AgentRequest] = []
            for raw in json.loads(line)["requests"]:
                j, k = raw.get("like", (0, 0))
                same = [session[j].block_ids[:k]] if k else []
                new = [np.arange(first, first + count) + number * _NUM_IDS for first, count in raw["new"]]
                ids = np.concatenate([*same, *new]).astype(np.uint32)
                session.append(
                    AgentRequest(
                        at_s=raw["t"],
                        think_s=raw["think_s"] or 0.0,
                        num_prompt_tokens=min(raw["in"], TRACE_BLOCK * len(ids)),
                        num_output_tokens=max(1, raw["out"]),
                        agent=raw.get("agent", ""),
                        block_ids=ids,
                    )
                )
            yield session


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The requests of one agent of a session, each of which follows from the one before."""

    begin_s: float
    requests: Session


def chains(sessions: Sequence[Session], *, span_s: float) -> list[Chain]:
    """Return all agents, in order of their first requests; sessions begin evenly over some seconds."""
    found: list[Chain] = []
    for number, session in enumerate(sessions):
        for agent in dict.fromkeys(request.agent for request in session):
            own = [request for request in session if request.agent == agent]
            found.append(Chain(begin_s=span_s * number / len(sessions) + own[0].at_s, requests=own))
    return sorted(found, key=lambda chain: chain.begin_s)


def arrivals(agents: Sequence[Chain], *, until_s: float) -> list[Arrival]:
    """Return the first request of each agent, numbered as a session; the others follow from it until a time."""

    def turn(number: int, index: int, at_s: float) -> Arrival:
        requests = agents[number].requests

        def follow_up(result: RequestRecord) -> Arrival | None:
            if index + 1 == len(requests) or (next_s := result.end_s + requests[index + 1].think_s) > until_s:
                return None
            return turn(number, index + 1, next_s)

        return Arrival(
            at_s=at_s,
            prompt=requests[index].prompt(),
            num_output_tokens=requests[index].num_output_tokens,
            session=number,
            turn=index,
            kind="follow-up" if index else "first",
            follow_up=follow_up,
        )

    return [turn(number, 0, agent.begin_s) for number, agent in enumerate(agents) if agent.begin_s <= until_s]


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


def figures_of(arm: str, shape: ClusterShape, finished: SimRun) -> ArmFigures:
    """Return the figures of a run."""
    requests = [each for each in finished.requests if each.is_complete]

    def ttft_s(kind: str) -> tuple[float, float]:
        p50, p90 = np.percentile([each.ttft_s or 0.0 for each in requests if each.kind == kind], [50, 90])
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

    def agents(self) -> list[Chain]:
        """Return the agents of the first sessions of the trace whose prompts are short enough."""
        sessions = read_sessions(self.trace)
        fitting = (each for each in sessions if max(r.num_prompt_tokens for r in each) <= self.longest)
        return chains(list(islice(fitting, self.num_sessions)), span_s=self.span_s)

    def pages(self, page: int) -> list[list[int]]:
        """Return the prompts as pages of so many tokens, in the order of the trace's own times."""
        stride = page // TRACE_BLOCK
        timed = [
            (agent.begin_s + request.at_s - agent.requests[0].at_s, request)
            for agent in self.agents()
            for request in agent.requests
        ]
        timed = [each for each in timed if each[0] <= self.until_s]
        return [request.block_ids[stride - 1 :: stride].tolist() for _at_s, request in sorted(timed, key=itemgetter(0))]


def serve(arm: str, load: Load, shape: ClusterShape, hardware: Hardware) -> ArmFigures:
    """Serve the sessions on one arm."""
    pace, link, _kv = hardware.pace(shape.max_step_tokens)
    settings = SimSettings(
        prefill=pace,
        decode=pace,
        network=NetworkShape(kv_bytes_per_s=link.bytes_per_s),
        router=RouterConfig.model_validate({"metrics_port": None, "shed": "none", "queue_timeout_s": 3600}),
    )
    return figures_of(arm, shape, run(shape, settings, arrivals(load.agents(), until_s=load.until_s)))


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
