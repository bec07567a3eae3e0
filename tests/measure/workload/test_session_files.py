"""Sessions in files of kv-cache-tester, and as spans of OpenTelemetry."""

import json
from pathlib import Path
from typing import Any

import pytest

from measure.workload.session_files import read_sessions
from measure.workload.session_traces import RecordedSession
from measure.workload.sessions import Beginning, Session
from measure.workload.traces import TraceError


def read(folder: Path, document: object) -> RecordedSession:
    path = folder / "session.json"
    path.write_text(json.dumps(document))
    (session,) = read_sessions(path)
    return session


def lengths(session: RecordedSession) -> list[int]:
    return Session(index=0, kind="", start_s=0.0, turns=session.turns).prompt_lengths()


def call(t: float, num_in: int, out: int, hash_ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "model": "m", "in": num_in, "out": out, "hash_ids": hash_ids, "api_time": 2.0} | more


HASHED = {
    "id": "f64a",
    "models": ["m"],
    "block_size": 64,
    "tool_tokens": 64,
    "system_tokens": 20,
    "requests": [
        call(0.0, 140, 30, [1, 2], think_time=0.0),
        {
            "t": 4.5,
            "type": "subagent",
            "agent_id": "agent_001",
            "subagent_type": "Explore",
            "requests": [
                call(0.0, 70, 9, [50], type="n"),
                call(5.0, 150, 9, [50, 51], think_time=3.0, type="n"),
            ],
        },
        call(9.0, 260, 20, [1, 2, 3, 4], think_time=7.0, stop="tool_use"),
        call(14.0, 100, 20, [1], think_time=3.0, stop="end_turn"),
    ],
}


def test_kv_cache_testers_blocks_become_beginnings_of_prompts(tmp_path: Path) -> None:
    session = read(tmp_path, HASHED)
    assert (session.name, session.num_tool_tokens, session.num_agents) == ("f64a", 64, 2)
    assert lengths(session) == [140, 70, 150, 260, 100]
    beginnings = [turn.beginning for turn in session.turns]
    assert beginnings == [
        Beginning(0, 0),
        Beginning(0, 0),
        Beginning(1, 79),
        Beginning(0, 170),
        Beginning(3, 64),
    ]
    assert [turn.after for turn in session.turns] == [(), (0,), (1,), (0,), (3,)]
    assert [turn.think_s for turn in session.turns] == [0.0, 2.5, 3.0, 7.0, 3.0]


def test_a_folder_has_a_session_in_each_file_in_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(HASHED | {"id": name}))
    assert [session.name for session in read_sessions(tmp_path)] == ["a", "b"]
    with pytest.raises(TraceError, match=r"has no \.json files"):
        list(read_sessions(_empty(tmp_path)))


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def span(number: int, start_s: float, end_s: float, *, parent: str | None = None, **values: Any) -> dict[str, Any]:
    def at(seconds: float) -> str:
        return f"2026-02-25T10:00:{seconds:09.6f}"

    attributes = {f"gen_ai.{name.replace('__', '.')}": value for name, value in values.items()}
    return {
        "span_id": f"s{number}",
        "parent_span_id": parent,
        "name": "chat gpt-4" if values else "agent",
        "start_time": at(start_s),
        "end_time": at(end_s),
        "attributes": attributes,
    }


def tokens(num_in: int, out: int) -> dict[str, Any]:
    return {"usage__input_tokens": num_in, "usage__output_tokens": out}


def test_spans_wait_for_those_that_had_ended_and_continue_what_they_outgrow(tmp_path: Path) -> None:
    spans = [
        span(0, 0, 2, **tokens(100, 20)),
        span(1, 2.5, 4.5, **tokens(90, 10)),
        span(2, 3, 5, **tokens(150, 10)),
        span(3, 6, 9, **tokens(400, 30)),
    ]
    session = read(tmp_path, {"trace_id": "t", "spans": spans[::-1]})
    assert [turn.after for turn in session.turns] == [(), (0,), (0,), (1, 2)]
    assert [turn.think_s for turn in session.turns] == [0.0, 0.5, 1.0, 1.0]
    assert [turn.beginning for turn in session.turns] == [
        Beginning(0, 0),
        Beginning(0, 0),  # its prompt is shorter than what was said
        Beginning(0, 120),
        Beginning(2, 160),
    ]
    assert lengths(session) == [100, 90, 150, 400]


def test_agents_under_other_parents_do_not_wait_for_each_other(tmp_path: Path) -> None:
    spans = [
        span(10, 0, 9),
        span(11, 0, 9, parent="s10"),
        span(12, 0, 9, parent="s10"),
        span(0, 0, 1, parent="s10", **tokens(50, 5)),
        span(1, 2, 3, parent="s11", **tokens(60, 5)),
        span(2, 4, 5, parent="s12", **tokens(70, 5)),
        span(3, 6, 7, parent="s10", **tokens(80, 5)),
    ]
    session = read(tmp_path, {"spans": spans})
    assert [turn.after for turn in session.turns] == [(), (0,), (0,), (1, 2)]
    assert session.num_agents == 3


def test_messages_in_common_are_a_prompts_beginning(tmp_path: Path) -> None:
    def said(*texts: str) -> str:
        return json.dumps([{"role": "user", "content": text} for text in texts])

    spans = [
        span(0, 0, 1, input__messages=said("a" * 100), **tokens(100, 20)),
        span(1, 2, 3, input__messages=said("a" * 100, "an answer", "b" * 50), **tokens(200, 20)),
        span(2, 4, 5, input__messages=said("a" * 100, "c" * 100), **tokens(180, 20)),
        span(3, 6, 7, input__messages=said("d"), output__text="e" * 40),
    ]
    session = read(tmp_path, {"spans": spans})
    beginnings = [turn.beginning for turn in session.turns]
    assert beginnings[:2] == [Beginning(0, 0), Beginning(0, 120)]
    assert beginnings[2] is not None
    assert beginnings[2].turn == 1
    assert 95 <= beginnings[2].num_tokens <= 105  # 100, by their characters
    assert beginnings[3] == Beginning(0, 0)
    assert session.turns[3].num_output_tokens == 10  # four characters are a token


def test_otlps_own_json_is_read(tmp_path: Path) -> None:
    def otlp(number: int, begin_s: int, num_in: int) -> dict[str, Any]:
        values = {"gen_ai.usage.prompt_tokens": num_in, "gen_ai.usage.completion_tokens": 10}
        attributes = [{"key": key, "value": {"intValue": str(value)}} for key, value in values.items()]
        times = {"startTimeUnixNano": str(begin_s * 10**9), "endTimeUnixNano": str((begin_s + 1) * 10**9)}
        return {"spanId": f"s{number}", "name": "chat", "attributes": attributes} | times

    spans = [otlp(0, 5, 40), otlp(1, 9, 90)]
    session = read(tmp_path, {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    assert lengths(session) == [40, 90]
    assert [turn.think_s for turn in session.turns] == [0.0, 3.0]


def test_times_of_spans_may_have_offsets(tmp_path: Path) -> None:
    east = span(0, 0, 2, **tokens(100, 20)) | {"start_time": "2026-02-25T12:00:00+02:00"}
    session = read(tmp_path, {"spans": [span(1, 5, 6, **tokens(150, 5)), east]})
    assert lengths(session) == [100, 150]
    assert [turn.think_s for turn in session.turns] == [0.0, 3.0]


def test_calls_at_one_moment_do_not_hide_each_other_from_the_next(tmp_path: Path) -> None:
    spans = [span(number, at, at, **tokens(100, 5)) for number, at in enumerate((1, 1, 4))]
    assert [turn.after for turn in read(tmp_path, {"spans": spans}).turns] == [(), (0,), (1,)]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "Input should be an object"),
        ({}, "has neither requests"),
        ({"spans": [span(1, 0, 1) | {"start_time": None}]}, "spans.0: has neither start_time nor startTimeUnixNano"),
        ({"spans": [span(1, 0, 1) | {"end_time": "soon"}]}, "spans.0.end_time: .*, not 'soon'"),
        ({"spans": [span(1, 2, 1)]}, "spans.0: ends before it starts"),
        ({"spans": [span(1, 0, 1)]}, "none is a call of a model"),
        ({"spans": [span(1, 0, 1), span(1, 2, 3)]}, "spans.1: has the span_id s1 of an earlier span"),
        ({"spans": [span(1, 0, 1, parent="s2"), span(2, 0, 1, parent="s1")]}, "spans.0: parent_span_id: s2 is within"),
        ({"spans": [span(1, 0, 1, **tokens(-5, 1))]}, "spans.0.attributes: gen_ai.usage.input_tokens: .*, not '-5'"),
        ({"spans": [span(1, 0, 1) | {"attributes": [7]}]}, "spans.0.attributes: an attribute is not"),
        ({"spans": [span(n, 0, 1, **tokens(5, 1)) for n in range(4097)]}, "spans: 4,097 are calls of a model; no more"),
        ({"resourceSpans": [{"scopeSpans": [{"spans": [3]}]}]}, r"resourceSpans.0.scopeSpans.0.spans.0: "),
        ({"requests": [{"t": 0, "type": "x"}]}, "requests.0: Input tag 'x'"),
        ({"requests": [HASHED["requests"][1] | {"requests": []}]}, "has none of its own"),  # type: ignore[index]
        (
            {"requests": [HASHED["requests"][1] | {"requests": [call(0, 5, 1, [])] * 4097}]},  # type: ignore[index]
            "requests: has 4,097 with those of sub-agents",
        ),
    ],
)
def test_unusable_documents_are_named(tmp_path: Path, document: object, message: str) -> None:
    with pytest.raises(TraceError, match=f"session.json: .*{message}"):
        read(tmp_path, document)
