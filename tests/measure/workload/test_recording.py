"""Recordings as traces, and the round trip of a workload: served, recorded, and replayed."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient, RecordedRequest
from measure.workload.build import build_workload
from measure.workload.content import ContentWriter
from measure.workload.sessions import Session
from measure.workload.spec import parse_workload
from measure.workload.traces import TraceError, TraceRequest, TrafficTrace, read_trace, write_trace
from tests.router.fake_service import VOCAB_SIZE
from tests.router.fake_worker import BLOCK_SIZE, DECODE, PREFILL, FakeWorker
from tests.router.fakes import running_cluster


def recorded(
    at_s: float,
    keys: tuple[int, ...],
    *,
    num_output_tokens: float = 5,
    outcome: str = "completed",
    block_size: int = 16,
) -> RecordedRequest:
    return RecordedRequest(
        arrival_s=at_s,
        num_prompt_tokens=block_size * len(keys),
        num_output_tokens=num_output_tokens,
        outcome=outcome,
        block_size=block_size,
        block_keys=keys,
    )


def written(folder: Path, *requests: RecordedRequest) -> Path:
    trace = TrafficTrace()
    for request in requests:
        trace.add(request)
    assert trace.num_requests == len(requests)
    trace.write(folder / "recording.jsonl")
    return folder / "recording.jsonl"


def test_recording_is_read_back_in_order_of_arrival_with_small_ids(tmp_path: Path) -> None:
    late = recorded(3.5, (2**63, 77), num_output_tokens=2.5)
    early = recorded(1.25, (2**63, 11, 12))
    trace = read_trace(written(tmp_path, late, early))
    assert trace.block_size == 16
    assert [request.arrival_s for request in trace.requests] == [0, 2.25]
    assert [request.block_ids for request in trace.requests] == [(0, 1, 2), (0, 3)]
    assert [request.num_output_tokens for request in trace.requests] == [5, 2]


def test_request_without_an_answer_is_kept_with_its_outcome(tmp_path: Path) -> None:
    path = written(tmp_path, recorded(0, (1,), num_output_tokens=0, outcome="Overloaded"))
    (row,) = (json.loads(line) for line in path.read_text().splitlines())
    assert row == {
        "timestamp": 0,
        "input_length": 16,
        "output_length": 1,
        "hash_ids": [0],
        "block_size": 16,
        "outcome": "Overloaded",
    }


def test_recording_ends_where_the_block_size_changes() -> None:
    trace = TrafficTrace()
    trace.add(recorded(0, (1,)))
    with pytest.raises(TraceError, match="blocks of 32 tokens after blocks of 16"):
        trace.add(recorded(1, (1,), block_size=32))
    assert trace.num_requests == 1


# The round trip.

CONVERSATION = (
    (10, 3, (90, 31, 52)),
    (10, 4, (90, 31, 52)),
    (12, 5, (90, 31, 73)),
    (21, 2, (90, 31, 73, 4, 5, 6)),
    (4, 6, (17,)),
    (3, 2, (28,)),
    (8, 1, (17, 9)),
)
"""Prompt and output tokens, and block ids of the prompt."""


def conversation(folder: Path) -> Path:
    requests = [
        TraceRequest(arrival_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output, block_ids=ids)
        for at_s, (prompt, output, ids) in enumerate(CONVERSATION)
    ]
    write_trace(folder / "conversation.jsonl", requests, block_size=BLOCK_SIZE)
    return folder / "conversation.jsonl"


def sessions(trace: Path) -> tuple[list[Session], ContentWriter]:
    raw = {"streams": [{"name": "replay", "trace": {"path": str(trace)}}]}
    workload = build_workload(parse_workload(raw, source="test"))
    return list(workload.streams[0].sessions), ContentWriter(seed=workload.seed, num_tokens=VOCAB_SIZE)


def num_shared_blocks(prompts: Iterable[list[int]]) -> list[int]:
    """Return the number of leading blocks that each pair of prompts shares."""
    split = [[prompt[start : start + BLOCK_SIZE] for start in range(0, len(prompt), BLOCK_SIZE)] for prompt in prompts]
    return [
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
        for one, two in itertools.combinations(split, 2)
    ]


async def test_workload_that_is_served_and_recorded_replays_as_it_was(tmp_path: Path) -> None:
    original, writer = sessions(conversation(tmp_path))
    trace = TrafficTrace()
    async with (
        running_cluster(FakeWorker("p0", PREFILL), FakeWorker("d0", DECODE)) as cluster,
        AsyncClient(cluster.router.address, timeout_s=60) as client,
        client.record() as stream,
    ):
        for session in original:
            (turn,) = session.turns
            await client.generate(writer.tokens(turn.segments), max_tokens=turn.num_output_tokens, temperature=0)
            trace.add(await anext(stream))
    trace.write(tmp_path / "recording.jsonl")
    again, writer = sessions(tmp_path / "recording.jsonl")
    assert [session.start_s for session in again] == sorted(session.start_s for session in again)
    assert [session.turns[0].num_output_tokens for session in again] == [output for _, output, _ in CONVERSATION]
    before, after = ([list(writer.tokens(s.turns[0].segments)) for s in each] for each in (original, again))
    assert [len(prompt) for prompt in after] == [len(prompt) for prompt in before]
    assert num_shared_blocks(after) == num_shared_blocks(before)
    shared = set(num_shared_blocks(after))
    assert shared == {0, 1, 2, 3}
