from pathlib import Path
from typing import Any

import pytest

from measure.workload.sessions import Content
from measure.workload.spec import (
    SessionStreamSpec,
    TraceStreamSpec,
    WorkloadError,
    WorkloadSpec,
    load_workload,
    parse_workload,
)

CHATS: dict[str, Any] = {
    "name": "chats",
    "arrivals": {"rate": 0.5},
    "turns": 5,
    "think_s": "lognormal:5,0.5",
    "prefix": {"share": 0.8, "tokens": 512, "count": 4, "zipf": 1.1},
    "first_tokens": "lognormal:400,0.8,max=2000",
    "turn_tokens": 50,
    "output_tokens": "uniform:20,60",
}
REPLAY: dict[str, Any] = {"name": "replay", "trace": {"path": "a.jsonl", "speed": 2.0, "shrink": 32, "limit": 300}}


def make_raw(*streams: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"duration_s": 60, "streams": list(streams or (CHATS,))} | keys


def changed(stream: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {key: value for key, value in (stream | keys).items() if value is not None}


def complaints(raw: object) -> list[str]:
    with pytest.raises(WorkloadError) as caught:
        parse_workload(raw, source="w.yaml")
    return str(caught.value).splitlines()


def test_yaml_file_becomes_a_specification_with_traces_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(
        """
content: chat
duration_s: 60
streams:
  - {name: chats, arrivals: {rate: [[0, 1], [30, 2]]}, first_tokens: 100, output_tokens: 10}
  - {name: busy, concurrency: 4, first_tokens: 100, output_tokens: 10}
  - {name: replay, trace: {path: some/trace.jsonl}}
"""
    )
    spec = load_workload(path)
    assert (spec.name, spec.content, spec.duration_s) == ("mix", Content.CHAT, 60)
    chats, busy, replay = spec.streams
    assert isinstance(chats, SessionStreamSpec)
    assert isinstance(busy, SessionStreamSpec)
    assert isinstance(replay, TraceStreamSpec)
    assert replay.trace.path == tmp_path / "some" / "trace.jsonl"


def test_changes_take_the_place_of_a_files_keys(tmp_path: Path) -> None:
    path = tmp_path / "w.yaml"
    path.write_text("streams: [{name: busy, concurrency: 4, first_tokens: 100, output_tokens: 10}]\n")
    spec = load_workload(path, changes={"max_requests": 7, "content": "text"})
    assert (spec.max_requests, spec.content) == (7, Content.TEXT)
    with pytest.raises(WorkloadError, match="seed: Input should be greater than or equal to 0"):
        load_workload(path, changes={"max_requests": 7, "seed": -1})


@pytest.mark.parametrize("raw", [make_raw(), make_raw(REPLAY), make_raw(CHATS, REPLAY, name="both", seed=3)])
def test_specification_comes_back_from_its_own_json(raw: dict[str, Any]) -> None:
    spec = parse_workload(raw, source="here")
    assert parse_workload(spec.model_dump(mode="json"), source="there") == spec
    assert WorkloadSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ([], "w.yaml: must be a mapping of keys to values, not a list"),
        (None, "w.yaml: must be a mapping of keys to values, not nothing"),
        (make_raw(speed=2), "w.yaml:speed: unknown key"),
        (make_raw(streams=[]), "w.yaml:streams: empty"),
        (make_raw(streams={"chats": CHATS}), "w.yaml:streams: must be a list"),
        (make_raw(streams=["chats"]), "w.yaml:streams.0: must be a mapping of keys to values"),
        (make_raw(content="songs"), "w.yaml:content: Input should be 'tokens', 'text' or 'chat'"),
        (make_raw(changed(CHATS, turn_token=4)), "w.yaml:streams.0.turn_token: unknown key"),
        (make_raw(changed(CHATS, first_tokens=None)), "w.yaml:streams.0.first_tokens: Field required"),
        (
            make_raw(changed(CHATS, first_tokens="normal:4")),
            "w.yaml:streams.0.first_tokens: 'normal:4': normal takes 2",
        ),
        (make_raw(changed(CHATS, output_tokens=0)), "w.yaml:streams.0.output_tokens: '0' never reaches 1"),
        (make_raw(changed(CHATS, turns=2.5)), "w.yaml:streams.0.turns: '2.5' is not a whole number"),
        (make_raw(changed(CHATS, think_s=-1)), "w.yaml:streams.0.think_s: '-1' includes negative times"),
        (make_raw(changed(CHATS, turn_tokens=None)), "w.yaml:streams.0: turn_tokens: missing; with turns: 5"),
        (make_raw(changed(CHATS, arrivals=None)), "w.yaml:streams.0: must have one of arrivals (open loop), concurr"),
        (make_raw(changed(CHATS, concurrency=3)), "w.yaml:streams.0: must have one of arrivals (open loop), concurr"),
        (make_raw(changed(REPLAY, concurrency=3)), "w.yaml:streams.0.concurrency: unknown key"),
        (make_raw(changed(REPLAY, turns=3)), "w.yaml:streams.0.turns: unknown key"),
        (make_raw(changed(REPLAY, trace={})), "w.yaml:streams.0.trace.path: Field required"),
        (make_raw(CHATS, CHATS), "w.yaml:streams: two are called 'chats'"),
        (make_raw(duration_s=None), "w.yaml:never ends: stream 'chats' goes on until duration_s or max_requests"),
        (make_raw(changed(CHATS, prefix={"tokens": 9, "share": 2})), "w.yaml:streams.0.prefix.share: Input should be"),
    ],
)
def test_bad_specification_is_refused_with_file_key_and_reason(raw: object, complaint: str) -> None:
    (line,) = complaints(raw)
    assert line.startswith(complaint)


@pytest.mark.parametrize(
    ("arrivals", "complaint"),
    [
        ({}, ": must have one of rate and steps"),
        ({"rate": 1, "steps": [[0, 1]]}, ": must have one of rate and steps"),
        ({"rate": 0}, ".rate: Input should be greater than 0"),
        ({"rate": "fast"}, ".rate: Input should be a valid number"),
        ({"rate": [[0]]}, ".rate.0.1: Field required"),
        ({"rate": [[5, 1]]}, ": the first point is at second 5; it must be at 0"),
        ({"steps": [[0, 1], [9, 2], [9, 3]]}, ": the points must be in order of time"),
        ({"steps": [[0, 0], [9, 0]]}, ": the rate is 0 at every point"),
        ({"steps": []}, ": there are no points"),
        ({"steps": [[0, -1]]}, ".steps.0.1: Input should be greater than or equal to 0"),
        ({"rate": 1, "process": "weibull"}, ".process: Input should be 'poisson', 'gamma' or 'constant'"),
        ({"rate": 1, "burstiness": 0.5}, ": burstiness: 0.5 is for process: gamma, not poisson"),
    ],
)
def test_bad_arrivals_are_refused_with_key_and_reason(arrivals: dict[str, Any], complaint: str) -> None:
    (line,) = complaints(make_raw(changed(CHATS, arrivals=arrivals)))
    assert line.startswith(f"w.yaml:streams.0.arrivals{complaint}")


def test_every_problem_has_a_line() -> None:
    raw = make_raw(changed(CHATS, first_tokens="x", output_tokens="uniform:9,3"), speed=2)
    assert len(complaints(raw)) == 3


@pytest.mark.parametrize(
    "raw",
    [
        make_raw(REPLAY, duration_s=None),
        make_raw(duration_s=None, max_requests=10),
        make_raw(changed(CHATS, arrivals={"steps": [[0, 3], [60, 0]]}), duration_s=None),
    ],
)
def test_workload_that_ends_by_itself_needs_no_duration(raw: dict[str, Any]) -> None:
    assert parse_workload(raw, source="w.yaml").duration_s is None


@pytest.mark.parametrize(("text", "complaint"), [("a: [", "not YAML"), ("", "must be a mapping")])
def test_file_that_holds_no_workload_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=complaint) as caught:
        load_workload(path)
    assert str(caught.value).startswith(str(path))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read: No such file"):
        load_workload(tmp_path / "w.yaml")
