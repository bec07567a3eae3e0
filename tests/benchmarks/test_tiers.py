"""The benchmark of tiers reads sessions as its trace means them, and finds the size of their working set."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiers import arrivals, chains, num_hits, read_sessions, working_set
from measure.load.records import Outcome, RequestRecord, ServerReport

FIRST: dict[str, Any] = {"t": 0.0, "in": 150, "out": 5, "think_s": 0.0, "new": [[1, 3]]}
NEXT = {"t": 9.0, "in": 200, "out": 7, "think_s": 2.0, "like": [0, 2], "new": [[7, 2]]}
HELPER = {"t": 4.0, "in": 64, "out": 1, "think_s": None, "new": [[20, 1]], "agent": "a1"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl.gz"
    lines = [
        json.dumps({"session": str(number), "requests": [FIRST, HELPER, NEXT | {"like": [0, 2]}]}) for number in "ab"
    ]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return path


def ended(end_s: float) -> RequestRecord:
    return RequestRecord(
        index=0,
        session=0,
        turn=0,
        kind="first",
        due_s=0.0,
        sent_s=0.0,
        chunk_s=(),
        chunk_tokens=(),
        end_s=end_s,
        outcome=Outcome.COMPLETED,
        error="",
        num_prompt_tokens=150,
        num_wanted_tokens=5,
        server=ServerReport(),
    )


def test_sessions_share_prefixes_within_and_nothing_among_each_other(trace: Path) -> None:
    one, other = read_sessions(trace)
    assert [len(request.prompt()) for request in one] == [150, 64, 200]
    first, _helper, later = (request.prompt() for request in one)
    assert first[:128] == later[:128]
    assert first[128] != later[128]
    assert not {*first, *later} & {*other[0].prompt(), *other[2].prompt()}


def test_each_agent_asks_again_its_think_time_after_its_answer_until_the_end(trace: Path) -> None:
    agents = chains(list(read_sessions(trace)), span_s=100.0)
    first = arrivals(agents, until_s=60.0)
    assert [(each.at_s, each.kind, each.num_output_tokens) for each in first] == [
        (0.0, "first", 5),
        (4.0, "first", 1),
        (50.0, "first", 5),
        (54.0, "first", 1),
    ]
    main, helper = first[:2]
    assert main.follow_up is not None
    assert helper.follow_up is not None
    following = main.follow_up(ended(30.0))
    assert following is not None
    assert (following.at_s, following.kind, following.session, following.turn) == (32.0, "follow-up", main.session, 1)
    assert helper.follow_up(ended(30.0)) is None
    assert main.follow_up(ended(59.0)) is None


def test_working_set_is_the_least_cache_with_nearly_all_hits() -> None:
    prompts = [[turn, turn + 100] for turn in (*range(50), *range(50))]
    assert num_hits(prompts, 1000) == num_hits(prompts, 100) == 100
    assert num_hits(prompts, 50) == 0
    assert 99 <= working_set(prompts) <= 100
