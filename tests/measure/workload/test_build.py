import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from measure.workload.build import build_workload
from measure.workload.content import ContentWriter
from measure.workload.sessions import Segment, Session, Workload
from measure.workload.spec import WorkloadError, WorkloadSpec, parse_workload
from measure.workload.traces import Trace, TraceRequest, read_trace, write_trace

CHATS: dict[str, Any] = {
    "name": "chats",
    "arrivals": {"rate": 2.0},
    "turns": "uniform:1,5",
    "think_s": "lognormal:5,0.5",
    "prefix": {"share": 0.6, "tokens": "uniform:100,200", "count": 4, "zipf": 1.0},
    "first_tokens": "lognormal:40,0.8",
    "turn_tokens": 5,
    "output_tokens": "uniform:20,60",
}
SINGLE = {"name": "single", "arrivals": {"rate": 1.0}, "first_tokens": 10, "output_tokens": 3}
BUSY = {"name": "busy", "concurrency": 4, "first_tokens": 10, "output_tokens": 3}


def make_spec(*streams: dict[str, Any], **keys: Any) -> WorkloadSpec:
    return parse_workload({"duration_s": 600, "streams": list(streams)} | keys, source="test")


def sessions(workload: Workload, kind: str) -> list[Session]:
    (stream,) = (stream for stream in workload.streams if stream.kind == kind)
    return list(stream.sessions)


def segments(sessions: list[Session]) -> list[Segment]:
    return [segment for session in sessions for turn in session.turns for segment in turn.segments]


def trace_file(folder: Path, *requests: TraceRequest, block_size: int = 16) -> Path:
    path = folder / "trace.jsonl"
    write_trace(path, requests, block_size=block_size)
    return path


def request(arrival_s: float, num_prompt_tokens: int, *block_ids: int) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=7, block_ids=block_ids
    )


# Sessions.


def test_sessions_are_drawn_again_alike() -> None:
    (stream,) = build_workload(make_spec(CHATS)).streams
    assert list(stream.sessions) == list(stream.sessions)
    assert list(stream.sessions) == sessions(build_workload(make_spec(CHATS)), "chats")


def test_sessions_begin_in_order_within_the_duration_with_unique_indices() -> None:
    workload = build_workload(make_spec(CHATS, SINGLE))
    for kind in ("chats", "single"):
        starts = [session.start_s for session in sessions(workload, kind)]
        assert starts == sorted(starts)
        assert starts[0] >= 0
        assert 590 < starts[-1] <= 600
    indices = [session.index for stream in workload.streams for session in stream.sessions]
    assert len(indices) == len(set(indices))


def test_turns_follow_the_specification() -> None:
    for session in sessions(build_workload(make_spec(CHATS)), "chats"):
        first, *later = session.turns
        assert len(later) <= 4
        assert first.think_s == 0
        assert len(first.segments) <= 2
        assert all(turn.think_s > 0 and [part.num_tokens for part in turn.segments] == [5] for turn in later)
        assert all(20 <= turn.num_output_tokens <= 60 for turn in session.turns)


def test_sessions_are_the_same_at_every_load_and_beside_other_streams() -> None:
    alone = sessions(build_workload(make_spec(SINGLE, CHATS)), "chats")
    faster = sessions(build_workload(make_spec(SINGLE, CHATS), load=40), "chats")
    assert len(faster) > 1.5 * len(alone)
    for slow, fast in zip(alone, faster, strict=False):
        assert slow.turns == fast.turns
        assert fast.start_s == pytest.approx(slow.start_s * 7 / 40)
    other = sessions(build_workload(make_spec(BUSY, CHATS)), "chats")
    assert [session.turns for session in other] == [session.turns for session in alone]


def test_another_seed_changes_sessions_times_and_contents() -> None:
    one, two = (build_workload(make_spec(CHATS), seed=seed) for seed in (1, 2))
    assert (one.seed, two.seed) == (1, 2)
    first, second = sessions(one, "chats")[0], sessions(two, "chats")[0]
    assert first.start_s != second.start_s
    assert [turn.segments for turn in first.turns] != [turn.segments for turn in second.turns]
    written = [ContentWriter(seed=seed).tokens(segments([first])) for seed in (1, 2)]
    assert written[0] != written[1]


def test_closed_loop_offers_sessions_without_end_at_once() -> None:
    (stream,) = build_workload(make_spec(BUSY)).streams
    assert stream.concurrency == 4
    first = list(itertools.islice(stream.sessions, 5000))
    assert {session.start_s for session in first} == {0.0}
    assert len({session.index for session in first}) == 5000


@pytest.mark.parametrize("stream", [BUSY, CHATS])
def test_stream_has_no_more_sessions_than_the_most_requests_need(stream: dict[str, Any]) -> None:
    workload = build_workload(make_spec(stream, duration_s=None, max_requests=100))
    *before, last = sessions(workload, stream["name"])
    num_before = sum(len(session.turns) for session in before)
    assert num_before < 100 <= num_before + len(last.turns)
    assert (workload.max_requests, workload.duration_s) == (100, math.inf)


# Prefixes.


def test_prefixes_are_shared_by_the_share_and_popularity_asked_for() -> None:
    stream = CHATS | {"arrivals": {"rate": 20.0}}
    drawn = sessions(build_workload(make_spec(stream)), "chats")
    prefixes = [session.turns[0].segments[0] for session in drawn if len(session.turns[0].segments) == 2]
    assert len(prefixes) / len(drawn) == pytest.approx(0.6, abs=0.02)
    counts = [count for _, count in Counter(prefixes).most_common()]
    assert len(counts) == 4
    weights = [1 / rank for rank in range(1, 5)]
    assert [count / len(prefixes) for count in counts] == pytest.approx(
        [weight / sum(weights) for weight in weights], abs=0.02
    )


def test_prefix_has_one_length_in_all_sessions() -> None:
    drawn = sessions(build_workload(make_spec(CHATS)), "chats")
    prefixes = {session.turns[0].segments[0] for session in drawn if len(session.turns[0].segments) == 2}
    assert len({prefix.content for prefix in prefixes}) == len(prefixes) == 4
    assert all(100 <= prefix.num_tokens <= 200 for prefix in prefixes)


def test_texts_of_sessions_turns_and_streams_are_all_different(tmp_path: Path) -> None:
    path = trace_file(tmp_path, request(0, 40, 0, 1, 2), request(1, 33, 0, 1, 3))
    replay = {"name": "replay", "trace": {"path": str(path)}}
    chats = [CHATS | {"name": name, "prefix": {"tokens": 9, "count": 3}} for name in ("a", "b")]
    workload = build_workload(make_spec(*chats, replay))
    by_stream = [segments(sessions(workload, kind)) for kind in ("a", "b", "replay")]
    contents = [{segment.content for segment in parts} for parts in by_stream]
    assert not contents[0] & contents[1]
    assert not (contents[0] | contents[1]) & contents[2]
    for parts, num_shared in zip(by_stream, (3, 3, 2), strict=True):
        counts = Counter(segment.content for segment in parts)
        assert sum(count > 1 for count in counts.values()) == num_shared


# Traces.

traces = st.lists(
    st.tuples(st.integers(1, 64), st.lists(st.integers(0, 3), min_size=4, max_size=4)), min_size=2, max_size=6
)


@given(traces, st.sampled_from([1, 2, 4, 8, 16]))
def test_replayed_prompts_share_exactly_the_blocks_that_their_ids_share(
    tmp_path_factory: pytest.TempPathFactory, shape: list[tuple[int, list[int]]], page: int
) -> None:
    requests = [request(index, length, *ids[: -(-length // 16)]) for index, (length, ids) in enumerate(shape)]
    path = trace_file(tmp_path_factory.mktemp("trace"), *requests)
    workload = build_workload(make_spec({"name": "replay", "trace": {"path": str(path)}}))
    writer = ContentWriter(seed=workload.seed, num_tokens=1 << 32)  # so that none are equal by chance
    prompts = [list(writer.tokens(session.turns[0].segments)) for session in sessions(workload, "replay")]
    assert [len(prompt) for prompt in prompts] == [length for length, _ in shape]
    for (one, first), (two, second) in itertools.combinations(zip(requests, prompts, strict=True), 2):
        num_ids = _num_leading(list(one.block_ids), list(two.block_ids))
        num_tokens = min(num_ids * 16, len(first), len(second))
        assert _num_leading(_pages(first, page), _pages(second, page)) == num_tokens // page


def _pages(tokens: list[int], page: int) -> list[list[int]]:
    return [tokens[start : start + page] for start in range(0, len(tokens) - page + 1, page)]


def _num_leading(one: list[Any], two: list[Any]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def test_trace_is_replayed_in_its_own_time_and_lengths(tmp_path: Path) -> None:
    path = trace_file(tmp_path, request(0, 512, 1), request(3, 700, 1, 2), request(9, 5, 3), block_size=512)
    asked = {"path": str(path), "speed": 1.5, "shrink": 32, "limit": 2}
    workload = build_workload(make_spec({"name": "replay", "trace": asked}, duration_s=None))
    first, second = sessions(workload, "replay")
    assert workload.duration_s == 2.0
    assert (first.start_s, second.start_s) == (0, 2)
    assert [segment.num_tokens for segment in first.turns[0].segments] == [16]
    assert [segment.num_tokens for segment in second.turns[0].segments] == [16, 5]
    assert second.turns[0].num_output_tokens == 1


def test_block_ids_of_any_size_become_different_contents(tmp_path: Path) -> None:
    ids = (2**64, 2**65, 2**64 + 2**65, 0)
    path = trace_file(tmp_path, request(0, 64, *ids), request(1, 32, *ids[:2]))
    first, second = sessions(build_workload(make_spec({"name": "replay", "trace": {"path": str(path)}})), "replay")
    contents = [segment.content for segment in first.turns[0].segments]
    assert len({content % 2**62 for content in contents}) == 4
    assert [segment.content for segment in second.turns[0].segments] == contents[:2]


def test_duration_cuts_a_trace(tmp_path: Path) -> None:
    path = trace_file(tmp_path, request(0, 5, 1), request(3, 5, 2), request(9, 5, 3))
    workload = build_workload(make_spec({"name": "replay", "trace": {"path": str(path)}}, duration_s=3))
    assert len(sessions(workload, "replay")) == 2


# Rates.


def is_mean_rate(spec: WorkloadSpec, rate: float) -> bool:
    """Whether scaling to a load of `rate` changes nothing."""
    plain, scaled = build_workload(spec), build_workload(spec, load=rate)
    kind = plain.streams[0].kind
    return sessions(scaled, kind)[0].start_s == pytest.approx(sessions(plain, kind)[0].start_s)


@pytest.mark.parametrize(
    ("arrivals", "duration_s", "rate"),
    [
        ({"rate": 2.0}, 600, 2.0),
        ({"rate": [[0, 0], [10, 10]]}, 10, 5.0),
        ({"rate": [[0, 0], [10, 10]]}, 20, 7.5),
        ({"rate": [[0, 0], [10, 10]]}, None, 5.0),
        ({"steps": [[0, 4], [30, 1]]}, 60, 2.5),
    ],
)
def test_mean_rate_counts_every_turn(arrivals: dict[str, Any], duration_s: float | None, rate: float) -> None:
    stream = SINGLE | {"arrivals": arrivals, "turns": 3, "turn_tokens": 1}
    spec = make_spec(stream, BUSY, duration_s=duration_s, max_requests=10)
    assert is_mean_rate(spec, 3 * rate)


def test_load_scales_streams_and_traces_together(tmp_path: Path) -> None:
    path = trace_file(tmp_path, *(request(index / 5, 5, index) for index in range(1001)))
    spec = make_spec(CHATS, SINGLE, {"name": "replay", "trace": {"path": str(path)}}, duration_s=1000)
    assert is_mean_rate(spec, 2 * 3 + 1 + 1001 / 200)
    workload = build_workload(spec, load=6.0)
    counts = {stream.kind: sum(len(session.turns) for session in stream.sessions) / 1000 for stream in workload.streams}
    assert counts["replay"] == 1.001
    assert sum(counts.values()) + 1001 / sessions(workload, "replay")[-1].start_s - 1.001 == pytest.approx(6, rel=0.05)


@pytest.mark.parametrize("load", [0.0, -1.0, math.inf, math.nan])
def test_load_that_is_no_rate_is_refused(load: float) -> None:
    with pytest.raises(WorkloadError, match="a load must be a positive number"):
        build_workload(make_spec(CHATS), load=load)


def test_load_is_refused_where_nothing_can_be_scaled(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="it has no open-loop arrivals"):
        build_workload(make_spec(BUSY), load=1)
    path = trace_file(tmp_path, request(0, 5, 1))
    with pytest.raises(WorkloadError, match="all requests of its trace come at once"):
        build_workload(make_spec({"name": "replay", "trace": {"path": str(path)}}), load=1)


def test_trace_with_another_block_size_is_read_without_options(tmp_path: Path) -> None:
    requests = (request(0, 20, 1, 2), request(0.5, 3, 4))
    path = trace_file(tmp_path, *requests)
    assert read_trace(path) == Trace(name="trace", block_size=16, requests=requests)
