import random
from pathlib import Path

import pytest

from benchmarks.planner.__main__ import SLO, main, read_outcomes
from benchmarks.planner.arms import ArmError, parse_arm
from cluster.planner.plan import PoolSizes
from measure.workload.traces import TraceRequest, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests in two minutes, of one to four blocks each."""
    draw = random.Random(1)
    path = tmp_path / "small.jsonl"
    requests = []
    for number in range(40):
        num_blocks = draw.randrange(1, 5)
        requests.append(
            TraceRequest(
                arrival_s=3.0 * number,
                num_prompt_tokens=512 * num_blocks,
                num_output_tokens=draw.randrange(2, 50),
                block_ids=(0, *(10 * number + i for i in range(1, num_blocks))),
            )
        )
    write_trace(path, requests)
    return path


def test_planner_benchmark_writes_each_arm_once_and_a_table(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["--trace", str(trace), "--out", str(out), "--hours", "0.1", "--arms", "2P1D,ray:1:1,dynamo:0.5"]

    assert main(command) == 0
    first = {path.name: path.read_text() for path in (out / "arms").iterdir()}
    assert main([*command, "--goal", "0.5"]) == 0

    assert {path.name: path.read_text() for path in (out / "arms").iterdir()} == first
    outcomes = {outcome.name: outcome for outcome in read_outcomes(out)}
    assert outcomes["2P1D"].gpu_hours == pytest.approx(3 * 4 * 0.1)
    for outcome in outcomes.values():
        assert outcome.num_requests == 40
        assert outcome.num_refused == 0
    # Nearly nothing to do: Dynamo's rule gives up prefill workers one by one, and is not paid for them.
    assert outcomes["dynamo:0.5"].num_leaves == 2
    assert outcomes["dynamo:0.5"].gpu_hours < 4 * 4 * 0.1
    table = (out / "table.md").read_text().splitlines()
    assert [row.split(" | ")[0] for row in table[2:]] == ["| 2P1D", "| ray:1:1", "| dynamo:0.5"]
    assert capsys.readouterr().out.count(" GPU-hours, ") == 3


def test_planner_benchmark_when_the_folder_holds_other_settings_says_so(trace: Path, tmp_path: Path) -> None:
    command = ["--trace", str(trace), "--out", str(tmp_path / "out")]
    main([*command, "--hours", "0.1"])

    with pytest.raises(SystemExit, match="holds results of other settings"):
        main([*command, "--hours", "0.2"])


def test_parse_arm_reads_what_stands_behind_a_plus() -> None:
    arm = parse_arm("ours:0.99+noflip+startup=240", slo=SLO, interval_s=15.0)

    assert (arm.kind, arm.flip_s, arm.startup_s) == ("ours", None, 240.0)
    assert parse_arm("ours", slo=SLO, interval_s=15.0).flip_s is not None
    assert parse_arm("12P3D", slo=SLO, interval_s=15.0).first == PoolSizes(prefill=12, decode=3)
    assert parse_arm("12P3D", slo=SLO, interval_s=15.0).make_planner is None


@pytest.mark.parametrize("text", ["", "5P", "ray:2", "ray:a:b", "dynamo", "ours:x", "ours+flip", "theirs"])
def test_parse_arm_of_nonsense_says_what_it_may_be(text: str) -> None:
    with pytest.raises(ArmError, match="say "):
        parse_arm(text, slo=SLO, interval_s=15.0)
