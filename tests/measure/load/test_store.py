"""Results read back as they were written; errors name the place in a broken file."""

import json
from pathlib import Path

import pytest

from measure.load.records import Outcome, PoolSample, ServerReport
from measure.load.store import RunWriter, StoreError, read_run
from tests.measure.load.made_runs import make_failure, make_info, make_request, make_run, make_worker, write_run

RUN = make_run(
    [
        make_request(0, gaps_s=[0.01], server=ServerReport(request_id="req-1", queue_s=0.25, transport="shm")),
        make_failure(1, Outcome.FAILED, due_s=2.0, error="Overloaded: full"),
    ],
    samples=[PoolSample(at_s=0.5, num_queued=3, workers=(make_worker("p0", "prefill", num_running=1),))],
    labels={"shape": "1P1D"},
    notes=("short",),
)


def test_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    write_run(RUN, tmp_path / "run")
    assert read_run(tmp_path / "run") == RUN


def test_requests_are_written_as_they_end_and_read_as_they_were_due(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.record(make_request(1, due_s=2.0))
        writer.record(make_request(0, due_s=1.0))
        writer.finish(make_info())
    assert [(request.index, request.session) for request in read_run(tmp_path).requests] == [(0, 0), (1, 1)]


def test_line_is_compact_and_rounded_to_microseconds(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.record(make_request(sent_s=1.00000049))
    line = (tmp_path / "requests.jsonl").read_text()
    assert '"sent_s":1.0,' in line
    assert "server" not in line and "index" not in line and "error" not in line


def test_run_without_its_end_is_refused(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.record(make_request())
    with pytest.raises(StoreError, match=r"has no run\.json: the run was not finished"):
        read_run(tmp_path)


def test_run_without_a_request_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "bench-results" / "run") as writer:
        writer.discard_if_empty()
    assert list(tmp_path.iterdir()) == []


def test_folder_with_results_is_not_overwritten(tmp_path: Path) -> None:
    write_run(RUN, tmp_path)
    with pytest.raises(StoreError, match="holds the results of another run"):
        RunWriter(tmp_path)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere.*No such file"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", r"requests\.jsonl:2: is not JSON"),
        ("[]", r"requests\.jsonl:2: RequestRecord: Input should be a dictionary"),
        ('{"session": 1}', r"requests\.jsonl:2: turn: .*[Ff]ield required|requests\.jsonl:2: turn: Missing"),
    ],
)
def test_broken_line_is_named_with_its_field(tmp_path: Path, line: str, reason: str) -> None:
    write_run(RUN, tmp_path)
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join([path.read_text().splitlines()[0], line]))
    with pytest.raises(StoreError, match=reason):
        read_run(tmp_path)


def test_wrong_value_is_named_with_its_field(tmp_path: Path) -> None:
    write_run(RUN, tmp_path)
    path = tmp_path / "requests.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(first | {"outcome": "great"}))
    with pytest.raises(StoreError, match=r"requests\.jsonl:1: outcome: "):
        read_run(tmp_path)
