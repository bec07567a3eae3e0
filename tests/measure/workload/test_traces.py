import json
from pathlib import Path

import pytest

from measure.workload.sessions import Segment
from measure.workload.traces import Trace, TraceError, TraceRequest, read_trace, write_trace

GOOD = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def make_request(num_prompt_tokens: int = 1030, *, ids: tuple[int, ...] = (4, 5, 6), at_s: float = 0) -> TraceRequest:
    return TraceRequest(arrival_s=at_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=7, block_ids=ids)


def make_trace(*requests: TraceRequest) -> Trace:
    return Trace(name="made", block_size=512, requests=requests)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_mooncake_rows_become_requests_that_start_at_zero(tmp_path: Path) -> None:
    later = GOOD | {"timestamp": 2750, "input_length": 1024, "hash_ids": [4, 9]}
    path = write(tmp_path, "a.jsonl", f"{json.dumps(later)}\n\n{json.dumps(GOOD)}\n")
    trace = read_trace(path)
    assert trace.name == "a"
    assert trace.requests == (make_request(), make_request(1024, ids=(4, 9), at_s=1.25))


def test_written_trace_reads_back_as_it_was(tmp_path: Path) -> None:
    requests = (make_request(), make_request(1, ids=(7,), at_s=0.002))
    write_trace(tmp_path / "a.jsonl", requests)
    assert read_trace(tmp_path / "a.jsonl").requests == requests


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "Input should be an object"),
        (json.dumps(GOOD | {"timestamp": "soon"}), "timestamp: Input should be a valid number"),
        (json.dumps(GOOD | {"timestamp": float("nan")}), "timestamp: Input should be a finite number"),
        (json.dumps(GOOD | {"input_length": 0}), "input_length: Input should be greater than 0"),
        (json.dumps(GOOD | {"output_length": True}), "output_length: Input should be a valid integer"),
        ('{"timestamp": 0, "input_length": 3}', "output_length: Field required"),
        (json.dumps(GOOD | {"hash_ids": [1, -2, 3]}), "hash_ids.1: Input should be greater than or equal to 0"),
        (json.dumps(GOOD | {"hash_ids": [1]}), "hash_ids: 1 ids, but 1030 tokens are 3 blocks of 512"),
    ],
)
def test_bad_mooncake_row_is_refused_with_file_line_and_field(tmp_path: Path, row: str, complaint: str) -> None:
    path = write(tmp_path, "a.jsonl", f"{json.dumps(GOOD)}\n{row}\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: {complaint}")


def test_azure_rows_become_requests_that_share_nothing(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,513,10\n2023-11-16 18:17:05.2299600,512,8\n"
    trace = read_trace(write(tmp_path, "a.csv", AZURE + rows))
    first, second = trace.requests
    assert first.arrival_s == 0
    assert second.arrival_s == pytest.approx(1.25, abs=1e-5)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.block_ids) == (513, 10, (0, 1))
    assert second.block_ids == (2,)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("TIMESTAMP,ContextTokens\n", "1: GeneratedTokens: no such column"),
        (AZURE + "yesterday,1,1\n", "2: TIMESTAMP: Input should be a valid datetime"),
        (AZURE + "2023-11-16 18:17:03,many,1\n", "2: ContextTokens: Input should be a valid integer"),
        (AZURE + "2023-11-16 18:17:03,1\n", "2: GeneratedTokens: Input should be a valid integer"),
    ],
)
def test_bad_azure_row_is_refused_with_file_line_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path, "a.csv", text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{complaint}")


@pytest.mark.parametrize(("name", "complaint"), [("a.txt", "ends in .jsonl"), ("a.jsonl", "has no requests")])
def test_file_in_another_format_is_refused(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        read_trace(write(tmp_path, name, ""))


def test_speed_divides_arrivals_and_limit_cuts() -> None:
    trace = make_trace(make_request(), make_request(at_s=3.0), make_request(at_s=6.0))
    assert [request.arrival_s for request in trace.faster(1.5).requests] == [0, 2, 4]
    assert trace.first(2).duration_s == 3.0
    with pytest.raises(TraceError, match="speed must be positive, not 0"):
        trace.faster(0)


def test_shrunk_trace_keeps_shared_blocks_and_drops_a_tail_that_vanishes() -> None:
    trace = make_trace(make_request(), make_request(1100, ids=(4, 5, 9))).shrunk(32)
    short, long = trace.requests
    assert trace.block_size == 16
    assert (short.num_prompt_tokens, short.num_output_tokens, short.block_ids) == (32, 1, (4, 5))
    assert (long.num_prompt_tokens, long.block_ids) == (34, (4, 5, 9))
    with pytest.raises(TraceError, match="the factor 3 does not divide its blocks of 512 tokens"):
        make_trace().shrunk(3)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "lengths"),
    [(1, [1]), (511, [511]), (512, [512]), (513, [512, 1]), (1024, [512, 512]), (1025, [512, 512, 1])],
)
def test_segments_are_the_blocks_and_the_rest(num_prompt_tokens: int, lengths: list[int]) -> None:
    ids = tuple(range(7, 7 + len(lengths)))
    segments = make_trace().segments(make_request(num_prompt_tokens, ids=ids))
    assert segments == tuple(Segment(block_id, length) for block_id, length in zip(ids, lengths, strict=True))
