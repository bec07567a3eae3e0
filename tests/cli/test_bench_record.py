import json
from pathlib import Path

import pytest

from cli import bench
from kvrelay.v1 import inference_pb2
from tests.cli.conftest import Run
from tests.client.fake_server import FakeInference
from tests.client.test_traffic import told


def test_record_writes_a_trace_that_trace_stats_reads(
    run: Run, fake: FakeInference, address: str, tmp_path: Path
) -> None:
    fake.traffic = [told(20), told(30)]
    path = tmp_path / "out.jsonl"
    result = run("bench", "record", str(path), "-a", address, "--duration", "3")
    assert result.exit_code == 0
    assert f"2 requests are in {path}" in result.stderr
    assert [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()] == [[0, 1], [0, 1]]
    assert [request.duration_s for request in fake.record_requests] == [3.0]
    assert run("trace", "stats", str(path)).exit_code == 0


def test_record_stops_at_the_limit(run: Run, fake: FakeInference, address: str, tmp_path: Path) -> None:
    fake.traffic = [told(20), told(30), told(25)]
    path = tmp_path / "out.jsonl"
    assert run("bench", "record", str(path), "-a", address, "--limit", "2").exit_code == 0
    assert [json.loads(line)["input_length"] for line in path.read_text().splitlines()] == [20, 30]


def test_record_when_interrupted_writes_what_came(
    run: Run, fake: FakeInference, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(stream: object, trace: object, limit: int | None) -> None:
        real(stream, trace, 1)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    real = bench._read  # noqa: SLF001 - where Ctrl-C comes
    monkeypatch.setattr(bench, "_read", read)
    fake.traffic = [told(20), told(30)]
    path = tmp_path / "out.jsonl"
    result = run("bench", "record", str(path), "-a", address)
    assert result.exit_code == 0
    assert len(path.read_text().splitlines()) == 1


def test_record_tells_what_is_missing(run: Run, fake: FakeInference, address: str, tmp_path: Path) -> None:
    fake.traffic = [told(20), inference_pb2.RecordTrafficResponse(num_dropped=7)]
    result = run("bench", "record", str(tmp_path / "out.jsonl"), "-a", address)
    assert "7 requests are missing" in result.stderr


@pytest.mark.parametrize(
    ("name", "complaint"), [("out.csv", "a recording must end in .jsonl"), ("out.jsonl", "no request ended")]
)
def test_record_writes_nothing_when_it_cannot(
    run: Run, address: str, tmp_path: Path, name: str, complaint: str
) -> None:
    result = run("bench", "record", str(tmp_path / name), "-a", address)
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert list(tmp_path.iterdir()) == []
