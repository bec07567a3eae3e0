"""Sessions of a coding agent become a trace that the simulator reads: times, lengths and shared prefixes stay."""

import gzip
import json
from pathlib import Path

import pytest

from benchmarks import agentic_trace
from measure.workload.traces import TraceRequest, read_trace

FIRST = {"t": 0.0, "in": 1100, "out": 5, "think_s": 0.0, "new": [[1, 18]]}
LATER = {"t": 9.0, "in": 1600, "out": 7, "think_s": 2.0, "like": [0, 16], "new": [[30, 9]]}
OTHER = {"t": 30.0, "in": 1100, "out": 9, "think_s": 2.0, "like": [0, 7], "new": [[50, 11]]}


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for number in range(4):
            requests = [FIRST | {"out": 5 + number}, LATER, OTHER]
            file.write(json.dumps({"session": str(number), "requests": requests}) + "\n")
    return path


def written(sessions: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[TraceRequest]:
    out = sessions.with_name("trace.jsonl")
    monkeypatch.setattr("sys.argv", ["agentic_trace", str(sessions), "--out", str(out), *options])
    agentic_trace.main()
    trace = read_trace(out)
    assert trace.block_size == 512
    return list(trace.requests)


def test_requests_keep_their_times_and_prefixes_within_a_session(
    sessions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later, other = written(sessions, monkeypatch, "--num-sessions", "1")
    assert [each.arrival_s for each in (first, later, other)] == [0.0, 9.0, 30.0]
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in (first, later)] == [(1100, 5), (1600, 7)]
    assert first.block_ids[:2] == later.block_ids[:2]
    assert first.block_ids[2] != later.block_ids[2], "the rest of a block is another block once it is full"
    assert first.block_ids[0] != other.block_ids[0], "blocks of 512 tokens of which 448 agree are two"
    assert not {*first.block_ids[1:]} & {*other.block_ids}, "ids name all the content before them, too"


def test_halves_share_no_session_and_a_limit_cuts_the_latest(sessions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = written(sessions, monkeypatch, "--span", "5", "--half", "1")
    assert len(every) == 6
    assert len({each.block_ids[0] for each in every}) == 4, "two sessions, each with two beginnings"
    assert written(sessions, monkeypatch, "--span", "5", "--half", "1", "--limit", "4") == every[:4]
    assert {each.num_output_tokens for each in every} == {6, 8, 7, 9}
    other = written(sessions, monkeypatch, "--span", "5", "--half", "0")
    assert {each.num_output_tokens for each in other} == {5, 7, 9}
