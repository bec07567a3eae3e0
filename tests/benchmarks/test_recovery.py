"""The table of recovery times says what was measured, what failed, and what was not measured."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import Figures
from benchmarks.recovery.__main__ import write_page
from benchmarks.recovery.targets import PLANS


def measured(case: str, *, num_failed: int = 0) -> dict[str, Any]:
    figures = Figures()
    for gap_s, back_s in ((1.0, 8.0), (1.5, 12.0), (1.1, 9.0)):
        figures.add("streams", case, "clients of router-0", largest_gap_s=gap_s, largest_TTFT_s=0.2)
        figures.add("streams", case, "undisturbed", largest_gap_s=0.05, largest_TTFT_s=0.1)
        figures.add("texts", case, "decode", failed=num_failed, differ=0)
        figures.add("back", case, "decode", back_after_s=back_s)
    return {"figures": figures.rows(), "missing": {"decode cut off": "no network of its own"}}


def test_page_has_median_and_largest_and_what_was_left_out_and_keeps_its_other_text(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- recovery -->\nold\n<!-- end of recovery -->\nafter\n")
    write_page(page, measured("decode stopped"))
    text = page.read_text()
    row = "| decode stopped | 3 | 1.10 s, 1.50 s | 0.20 s, 0.20 s | 0.05 s, 0.05 s, 0.10 s, 0.10 s | 9.00 s, 12.00 s |"
    assert row in text
    assert "Not measured: decode cut off: no network of its own" in text
    assert "failed" not in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")


def test_page_says_that_requests_failed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- recovery --><!-- end of recovery -->")
    write_page(page, measured("decode stopped", num_failed=1))
    assert "**3 failed or different**" in page.read_text()


def test_page_without_a_place_for_the_table_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("prose")
    with pytest.raises(ValueError, match="add both comments"):
        write_page(page, measured("decode stopped"))
    assert page.read_text() == "prose"


def test_table_has_a_row_for_every_fault_of_every_process() -> None:
    cases = [plan.case for plan in PLANS]
    past = ("killed", "stopped", "hung", "slow", "cut off")
    workers = {f"{pool} {how}" for pool in ("decode", "prefill") for how in past}
    others = {"router killed", "router stopped", "controller killed", "controller stopped", "head killed"}
    assert {*cases} == workers | others
    assert len(cases) == len({*cases})
