"""Recorded sessions: their files, and the turns that they become."""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from measure.workload.build import build_workload
from measure.workload.recorded import shrunk_session
from measure.workload.session_files import is_session_trace, read_sessions
from measure.workload.session_traces import RecordedSession
from measure.workload.sessions import Beginning, Session, Workload
from measure.workload.spec import WorkloadError, parse_workload
from measure.workload.traces import TraceError


def ask(t: float, num_in: int, out: int, new: list[list[int]], **more: Any) -> dict[str, Any]:
    return {"t": t, "in": num_in, "out": out, "stop": "tool_use", "api_s": 2.0, "new": new} | more


CHAT = {
    "session": "chat",
    "tool_tokens": 100,
    "system_tokens": 28,
    "requests": [
        ask(0, 200, 40, [[1, 3]], think_s=0.0),
        ask(10, 300, 30, [[4, 1]], think_s=8.0, like=[0, 3]),
        ask(20, 310, 50, [], think_s=7.5, like=[1, 4]),  # the answer was not kept: it thought
        ask(30, 150, 9, [[9, 1]], think_s=8.0, like=[0, 1]),
    ],
}
AGENTS = {
    "session": "agents",
    "requests": [
        ask(0, 130, 20, [[1, 2]], think_s=0.0),
        ask(5, 128, 7, [[50, 2]], think_s=None, agent="a"),
        ask(6, 190, 7, [[70, 1]], think_s=None, agent="b", like=[1, 2]),
        ask(9, 140, 9, [[60, 0]], think_s=2.0, agent="a", like=[1, 2]),
        ask(4, 200, 10, [[3, 1]], think_s=2.0, like=[0, 2]),
        ask(30, 260, 10, [[4, 1]], think_s=24.0, like=[4, 3]),
    ],
}


def write(folder: Path, *sessions: dict[str, Any], name: str = "sessions.jsonl.gz") -> Path:
    text = "".join(json.dumps(session) + "\n" for session in sessions)
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def read(folder: Path, session: dict[str, Any]) -> RecordedSession:
    (found,) = read_sessions(write(folder, session))
    return found


def lengths(session: RecordedSession) -> list[int]:
    return Session(index=0, kind="", start_s=0.0, turns=session.turns).prompt_lengths()


def test_prompts_have_the_lengths_of_the_file_and_hold_the_answers_that_they_kept(tmp_path: Path) -> None:
    session = read(tmp_path, CHAT)
    assert lengths(session) == [200, 300, 310, 150]
    beginnings = [turn.beginning for turn in session.turns]
    assert beginnings == [Beginning(0, 0), Beginning(0, 240), Beginning(1, 300), Beginning(0, 64)]
    assert [turn.think_s for turn in session.turns] == [0.0, 8.0, 7.5, 8.0]
    assert [turn.after for turn in session.turns] == [(), (0,), (1,), (2,)]


def test_answers_that_call_tools_are_known_where_the_file_says_so(tmp_path: Path) -> None:
    calls = [ask(0, 200, 40, [[1, 3]]), ask(9, 300, 30, [[4, 1]], stop="end_turn")]
    session = read(tmp_path, {"session": "s", "requests": calls})
    assert [turn.calls_tool for turn in session.turns] == [True, False]


def test_sub_agents_begin_after_an_answer_of_their_parent_which_goes_on_beside_them(tmp_path: Path) -> None:
    session = read(tmp_path, AGENTS)
    assert session.num_agents == 3
    assert [turn.after for turn in session.turns] == [(), (0,), (0,), (1,), (0,), (4,)]
    assert [turn.think_s for turn in session.turns] == [0.0, 3.0, 4.0, 2.0, 2.0, 24.0]
    assert lengths(session) == [130, 128, 190, 140, 200, 260]


def test_sub_agent_that_begins_like_one_beside_it_has_the_same_contents(tmp_path: Path) -> None:
    session = read(tmp_path, AGENTS)
    one, other = session.turns[1:3]
    assert other.beginning == Beginning(0, 0)
    assert other.segments[0] == one.segments[0]


def test_parent_waits_for_sub_agents_that_had_ended_when_it_went_on(tmp_path: Path) -> None:
    requests = [AGENTS["requests"][index] for index in (0, 1, 5)]
    requests[2] = requests[2] | {"like": [0, 2]}  # type: ignore[operator]
    session = read(tmp_path, AGENTS | {"requests": requests})
    assert session.turns[2].after == (0, 1)
    assert session.turns[2].think_s == 23.0  # since the sub-agent's end


@pytest.mark.parametrize("factor", [2, 7, 64])
def test_shrunk_sessions_keep_what_they_share_and_have_no_empty_prompt(tmp_path: Path, factor: int) -> None:
    for recorded in (CHAT, AGENTS):
        whole = read(tmp_path, recorded)
        small = shrunk_session(whole, factor)
        assert all(turn.segments and turn.num_output_tokens >= 1 for turn in small.turns)
        for length, before in zip(lengths(small), lengths(whole), strict=True):
            assert length >= max(1, before // factor)
        first, second = small.turns[:2]
        if recorded is CHAT and factor == 2:
            assert second.beginning == Beginning(0, 100 + first.num_output_tokens)


def workload(path: Path, *, load: float | None = None, at_a_time: float | None = None, **stream: Any) -> Workload:
    recorded = {"path": str(path), **stream.pop("sessions", {})}
    spec = {"streams": [{"name": "agents", "sessions": recorded, **(stream or {"concurrency": 2})}]}
    return build_workload(parse_workload(spec, source="test"), load=load, sessions=at_a_time)


def sessions(asked: Workload) -> list[Session]:
    (stream,) = asked.streams
    return list(stream.sessions)


def test_sessions_share_tools_and_system_prompts_only_where_asked(tmp_path: Path) -> None:
    path = write(tmp_path, CHAT, CHAT, CHAT | {"tool_tokens": 90})
    apart = [{s.content for turn in each.turns for s in turn.segments} for each in sessions(workload(path))]
    assert not apart[0] & apart[1]
    asked = workload(path, concurrency=1, sessions={"shares_tools": True})
    one, two, other = (each.turns[0].segments for each in sessions(asked))
    assert one[:2] == two[:2]
    assert [segment.num_tokens for segment in one] == [100, 28, 72]
    assert one[2].content != two[2].content
    assert other[0].content != one[0].content


def test_closed_loops_have_so_many_sessions_at_a_time_which_begin_in_the_ramp(tmp_path: Path) -> None:
    path = write(tmp_path, *[CHAT] * 6)
    asked = workload(path, at_a_time=4, concurrency=2, ramp_s=8.0)
    assert asked.streams[0].concurrency == 4
    assert [each.start_s for each in sessions(asked)] == [0.0, 2.0, 4.0, 6.0, 0.0, 0.0]
    with pytest.raises(WorkloadError, match=r"cannot have 0\.5 sessions at a time"):
        workload(path, at_a_time=0.5)
    with pytest.raises(WorkloadError, match="cannot have 3 sessions at a time"):
        workload(path, at_a_time=3, arrivals={"rate": 1})


def test_open_loop_begins_each_session_once(tmp_path: Path) -> None:
    asked = workload(write(tmp_path, *[CHAT] * 5), arrivals={"rate": 0.5, "process": "constant"})
    starts = [each.start_s for each in sessions(asked)]
    assert [later - sooner for sooner, later in itertools.pairwise(starts)] == pytest.approx([2.0] * 4)
    faster = workload(write(tmp_path, *[CHAT] * 5), load=4.0, arrivals={"rate": 0.5, "process": "constant"})
    assert sessions(faster)[1].start_s - sessions(faster)[0].start_s == pytest.approx(1.0)


def test_sessions_are_chosen_and_their_pauses_limited(tmp_path: Path) -> None:
    chosen = {"skip": 1, "limit": 1, "longest": 330, "turns": 2, "speed": 2.0, "max_pause_s": 3.0}
    (only,) = sessions(workload(write(tmp_path, CHAT, AGENTS, CHAT), sessions=chosen, concurrency=1))
    assert len(only.turns) == 2
    assert only.turns[1].think_s == 1.5  # of the sub-agent
    with pytest.raises(WorkloadError, match="no sessions that are short enough"):
        workload(write(tmp_path, CHAT), sessions={"longest": 99})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"requests": []}', "requests: List should have"),
        ('{"requests": [{"t": 0, "in": 5}]}', "requests.0.out: Field required"),
        ('{"requests": [{"t": 0, "in": 5, "out": 1, "like": [3, 1]}]}', "request 3 is not an earlier one"),
        (
            '{"requests": [{"t": 0, "in": 5, "out": 1}, {"t": 1, "in": 9, "out": 1, "like": [0, 2]}]}',
            "fewer than 2 blocks",
        ),
        ('{"requests": [{"t": NaN, "in": 5, "out": 1}]}', "requests.0.t: Input should be a finite number, not 'nan'"),
        ('{"requests": [{"t": 0, "in": 99999999, "out": 1}]}', "requests.0.in: .* less than or equal to 16777216"),
        ('{"requests": [', "not JSON"),
    ],
)
def test_unusable_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=f"sessions.jsonl:1: .*{message}"):
        list(read_sessions(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"requests"')[:-6], "cannot be unpacked"),
        (gzip.compress(b"[1, 2, 3]")[:10] + b"\xff" * 30, "cannot be unpacked"),
        (b'{"requests"', "leave .gz out of its name"),
        (gzip.compress(b"\xff\xfe"), "is not text in UTF-8"),
        (gzip.compress(b"\n"), "has no sessions"),
    ],
    ids=["cut", "damaged", "no gzip", "no text", "empty"],
)
def test_broken_archive_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "sessions.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        list(read_sessions(path))


def test_session_with_more_requests_than_can_be_played_is_refused(tmp_path: Path) -> None:
    requests = [{"t": 0, "in": 5, "out": 1}] * 4097
    with pytest.raises(TraceError, match="requests: List should have at most 4096 items"):
        list(read_sessions(write(tmp_path, {"requests": requests})))


def test_session_begins_with_its_first_request_whatever_its_clock_says(tmp_path: Path) -> None:
    requests = [{"t": t, "in": 500, "out": 1, "api_s": 1.0} for t in (1.7e9, 1.7e9 + 4)]
    (session,) = read_sessions(write(tmp_path, {"requests": requests}))
    assert [turn.think_s for turn in session.turns] == [0.0, 3.0]


def test_pauses_may_be_left_out(tmp_path: Path) -> None:
    (only,) = sessions(workload(write(tmp_path, CHAT), sessions={"max_pause_s": 0}, concurrency=1))
    assert {turn.think_s for turn in only.turns} == {0.0}


def test_traces_of_sessions_are_told_from_those_of_requests(tmp_path: Path) -> None:
    assert is_session_trace(write(tmp_path, CHAT))
    assert is_session_trace(write(tmp_path, CHAT, name="sessions.jsonl"))
    assert is_session_trace(tmp_path)
    mooncake = tmp_path / "conversation.jsonl"
    mooncake.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n')
    assert not is_session_trace(mooncake)
