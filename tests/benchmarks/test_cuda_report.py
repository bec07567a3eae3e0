"""Reports of the GPU measurements, and the bounds beside them."""

from pathlib import Path

import pytest
import torch

from benchmarks.cuda import summary
from benchmarks.cuda.arms import Arm, Format
from benchmarks.cuda.part import Part, part_parser, run_part
from benchmarks.cuda.report import Failure, Reading, Report
from common.random_models import CONFIGS
from engine.weights.config import parse_config
from engine.weights.layout import allocate_weights, checkpoint_views


def make_report(*, ratio: float | None = None, goal: float | None = None, failure: str | None = None) -> Report:
    failures = [Failure(case="decode", reason=failure)] if failure else []
    reading = Reading(case="decode", value=4.9, unit="ms", bound=4.0, ratio=ratio, goal=goal)
    return Report(part="speed", title="Speed", machine="a card", readings=[reading], failures=failures)


# A step reads only some of the experts of a mixture, whose speed is not measured so far.
@pytest.mark.parametrize("model", [name for name, raw in CONFIGS.items() if parse_config(raw).experts is None])
def test_weight_bytes_when_bf16_are_those_of_the_matrices_that_a_step_reads(model: str) -> None:
    arm = Arm(model=model, format=Format.BF16)
    views = checkpoint_views(
        allocate_weights(arm.decoder, dtype=torch.bfloat16, device=torch.device("meta")), arm.decoder
    )
    matrices = {name: view for name, view in views.items() if view.ndim == 2}
    if not arm.decoder.has_tied_embeddings:
        del matrices["model.embed_tokens.weight"]
    assert arm.weight_bytes == sum(2 * view.numel() for view in matrices.values())


def test_weight_bytes_when_fp8_halve_the_layers_and_keep_the_head() -> None:
    wide, narrow = (Arm(model="qwen3-8b", format=format_) for format_ in (Format.BF16, Format.FP8))
    assert wide.weight_bytes - narrow.weight_bytes == wide.num_layer_weights
    assert narrow.kv_bytes_per_token * 2 == wide.kv_bytes_per_token == 147_456


def test_report_when_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    report = make_report(ratio=0.8, goal=0.75, failure="out of memory")
    report.save(tmp_path)
    assert Report.load(tmp_path / "speed.json") == report


@pytest.mark.parametrize(
    ("ratio", "goal", "verdict"), [(0.75, 0.75, "0.75 met"), (0.7499, 0.75, "0.75 MISSED"), (None, 0.75, "0.75 MISSED")]
)
def test_table_when_goal_is_set_gives_the_verdict(ratio: float | None, goal: float, verdict: str) -> None:
    table = make_report(ratio=ratio, goal=goal).table()
    assert f"| {verdict} |" in table
    assert "4.90 ms" in table


def test_table_when_case_failed_names_it() -> None:
    assert "FAILED decode: out of memory" in make_report(failure="out of memory").table()


@pytest.mark.parametrize(
    ("report", "missing", "status"),
    [
        (make_report(ratio=0.8, goal=0.75), [], 0),
        (make_report(ratio=0.8), [], 0),
        (make_report(ratio=0.7, goal=0.75), [], 2),
        (make_report(ratio=0.8, goal=0.75, failure="out of memory"), [], 1),
        (make_report(ratio=0.7, goal=0.75), ["handoff"], 1),
    ],
    ids=["met", "no-goal", "missed", "failed", "no-result"],
)
def test_summary_when_read_has_the_status_of_its_worst_part(report: Report, missing: list[str], status: int) -> None:
    page, found = summary.summarize([report], missing)
    assert found == status
    assert all(f"FAILED {part}" in page for part in missing)


def test_summary_when_part_left_no_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_report(ratio=0.8, goal=0.75).save(tmp_path)
    assert summary.main(["--out", str(tmp_path), "--expect", "speed", "handoff"]) == 1
    assert "1 of 1 goals met, 1 failures" in capsys.readouterr().out
    assert "FAILED handoff, all of it" in (tmp_path / "summary.md").read_text()


def test_part_when_case_raises_goes_on_and_fails(tmp_path: Path) -> None:
    def measure(part: Part) -> None:
        with part.case("first"):
            raise ValueError("no such kernel")
        with part.case("second"):
            part.add(Reading(case="second", value=1.0, unit="ms"))

    args = part_parser("example", None).parse_args(["--device", "cpu", "--out", str(tmp_path)])
    assert run_part("example", "Example", args, measure) == 1
    report = Report.load(tmp_path / "example.json")
    assert [reading.case for reading in report.readings] == ["second"]
    assert report.failures == [Failure(case="first", reason="ValueError: no such kernel")]


def test_part_when_budget_is_used_up_names_what_was_left_out(tmp_path: Path) -> None:
    def measure(part: Part) -> None:
        assert not part.has_time("late")

    args = part_parser("example", None).parse_args(["--device", "cpu", "--out", str(tmp_path), "--budget-s", "0"])
    assert run_part("example", "Example", args, measure) == 1
    assert Report.load(tmp_path / "example.json").failures == [Failure(case="late", reason="no time left for it")]


def test_part_when_it_is_a_smoke_run_sets_no_goal(tmp_path: Path) -> None:
    args = part_parser("example", None).parse_args(["--device", "cpu", "--out", str(tmp_path), "--smoke"])
    reading = Reading(case="decode", value=1.0, unit="ms", ratio=0.1, goal=0.75)
    assert run_part("example", "Example", args, lambda part: part.add(reading)) == 0
    assert Report.load(tmp_path / "example.json").readings[0].goal is None
