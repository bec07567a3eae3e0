"""The benchmark of tiers plays sessions until a time, and finds the size of their working set."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiers import Load, num_hits, until, working_set
from common.slo import Slo
from measure.experiment.users import Users
from tests.measure.load.made_runs import make_request

FIRST: dict[str, Any] = {"t": 0.0, "in": 150, "out": 5, "api_s": 1.0, "think_s": 0.0, "new": [[1, 2]]}
NEXT = {"t": 9.0, "in": 200, "out": 7, "api_s": 1.0, "think_s": 2.0, "like": [0, 2], "new": [[7, 1]]}
HELPER = {"t": 4.0, "in": 64, "out": 1, "api_s": 20.0, "think_s": None, "new": [[20, 1]], "agent": "a1"}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    path = tmp_path / "sessions.jsonl.gz"
    lines = [json.dumps({"session": name, "requests": [FIRST, HELPER, NEXT]}) for name in "ab"]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return Load(trace=path, num_sessions=2, longest=1000, span_s=100.0, until_s=110.0)


def test_no_request_follows_after_the_end(load: Load) -> None:
    users = Users(load.workload(), slo=Slo(ttft_s=9.0, tpot_s=9.0))
    first, other = list(until(users.arrivals(), 110.0))
    assert other.at_s - first.at_s == pytest.approx(50.0)
    assert first.follow_up is not None
    assert other.follow_up is not None
    ended = make_request(due_s=first.at_s, ttft_s=3.0)
    following = first.follow_up(ended)
    assert [(each.at_s, each.turn) for each in following] == [(ended.end_s + 3.0, 1), (ended.end_s + 2.0, 2)]
    assert other.follow_up(make_request(due_s=109.0, ttft_s=0.0)) == []


def test_first_turns_are_those_whose_prompts_begin_anew(load: Load) -> None:
    assert [load.is_first(make_request(session=1, turn=turn)) for turn in range(3)] == [True, True, False]


def test_pages_of_a_session_share_its_prefixes_and_nothing_with_another(load: Load) -> None:
    prompts = sorted(load.pages(16), key=len)
    assert [len(pages) for pages in prompts] == [4, 4, 9, 9, 12, 12]
    for first in prompts[2:4]:
        later = [pages for pages in prompts[4:] if pages[0] == first[0]]
        assert [pages[:9] for pages in later] == [first]
    assert prompts[4][0] != prompts[5][0]


def test_working_set_is_the_least_cache_with_nearly_all_hits() -> None:
    prompts = [[turn, turn + 100] for turn in (*range(50), *range(50))]
    assert num_hits(prompts, 1000) == num_hits(prompts, 100) == 100
    assert num_hits(prompts, 50) == 0
    assert 99 <= working_set(prompts) <= 100
