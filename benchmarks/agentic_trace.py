"""Writes sessions of a coding agent as an open-loop trace that `kvrelay simulate` reads.

    python -m benchmarks.agentic_trace sessions.jsonl.gz --half 0 --out agentic.jsonl

Method: sessions of one half of the file (those of even or odd numbers, so that what is tried on one half can be judged
on the other) begin at random times, uniform over `--span` seconds. A request arrives when the original did, counted
from the beginning of its session, whatever becomes of the requests before it. The first `--limit` requests in order of
arrival are written in Mooncake's format, with ids of 512-token blocks: equal leading ids mean equal leading tokens.
What different sessions share is not known, so they share nothing.
"""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.command import command_line, terminal
from measure.workload.traces import MOONCAKE_BLOCK_SIZE, TraceRequest, write_trace

TRACE_BLOCK = 64
"""Tokens of the file's blocks."""
_STRIDE = MOONCAKE_BLOCK_SIZE // TRACE_BLOCK


_NUM_IDS = 1 << 20
"""Contents of a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A request of a session."""

    at_s: float
    """Time since its session began."""
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: list[int]
    """Content of each block of 64 tokens, a partial last one included."""


Session = Sequence[AgentRequest]


def read_sessions(path: Path) -> Iterator[Session]:
    """Yield the sessions of a file with the requests' own times. Contents of different sessions differ."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            session: list[AgentRequest] = []
            for raw in json.loads(line)["requests"]:
                j, k = raw.get("like", (0, 0))
                ids = session[j].block_ids[:k] if k else []
                for first, count in raw["new"]:
                    ids = [*ids, *range(number * _NUM_IDS + first, number * _NUM_IDS + first + count)]
                session.append(
                    AgentRequest(
                        at_s=raw["t"],
                        num_prompt_tokens=min(raw["in"], TRACE_BLOCK * len(ids)),
                        num_output_tokens=max(1, raw["out"]),
                        block_ids=ids,
                    )
                )
            yield session


class _BlockIds:
    """Ids of 512-token blocks by all the content up to their ends."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], int] = {}

    def of(self, request: AgentRequest) -> tuple[int, ...]:
        """Return the ids of a prompt's blocks, a partial last one included."""
        contents = request.block_ids[: -(-request.num_prompt_tokens // TRACE_BLOCK)]
        ids, before = [], -1
        for start in range(0, len(contents), _STRIDE):
            before = self._known.setdefault((before, *contents[start : start + _STRIDE]), len(self._known))
            ids.append(before)
        return tuple(ids)


def open_loop(sessions: Sequence[Session], *, span_s: float, limit: int, seed: int) -> Iterator[TraceRequest]:
    """Yield the first requests of sessions that begin at random times, in order of arrival."""
    draw, ids = random.Random(seed), _BlockIds()
    begins = [draw.uniform(0.0, span_s) for _ in sessions]
    timed = [
        (begin_s + request.at_s, request)
        for begin_s, session in zip(begins, sessions, strict=True)
        for request in session
    ]
    for arrival_s, request in islice(sorted(timed, key=lambda each: each[0]), limit):
        yield TraceRequest(
            arrival_s=arrival_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            block_ids=ids.of(request),
        )


def main() -> None:
    """Write the trace."""
    parser = command_line("agentic_trace", __doc__)
    parser.add_argument("sessions", type=Path, help="sessions, as JSON lines compressed with gzip")
    parser.add_argument("--out", type=Path, required=True, help="trace to write (.jsonl)")
    parser.add_argument("--half", type=int, choices=(0, 1), default=0, help="sessions of even or odd numbers")
    parser.add_argument("--num-sessions", type=int, default=150, help="number of sessions (default 150)")
    parser.add_argument("--span", type=float, default=2000.0, help="seconds in which they begin (default 2000)")
    parser.add_argument("--limit", type=int, default=3000, help="number of requests (default 3000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the beginnings (default 0)")
    options = parser.parse_args()
    sessions = list(islice(read_sessions(options.sessions), options.half, None, 2))[: options.num_sessions]
    requests = list(open_loop(sessions, span_s=options.span, limit=options.limit, seed=options.seed))
    write_trace(options.out, requests)
    mean = sum(request.num_prompt_tokens for request in requests) / len(requests)
    terminal().print(f"{len(requests)} requests, {mean:.0f} prompt tokens on average, to {options.out}")


if __name__ == "__main__":
    main()
