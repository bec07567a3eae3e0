"""Order of cells, kept results, failures, and continuation after an interrupt."""

from pathlib import Path

import pytest

from measure.experiment.analysis import analyze
from measure.experiment.points import Cell, Point, Source, slug
from measure.experiment.runner import CellFailed, Countdown, ResultKeeper, cell_order, run_cells, span
from measure.experiment.search import find_capacity
from measure.experiment.spec import CapacitySpec, CellOrder, ExperimentError
from measure.experiment.store import OtherSettings, Store
from tests.measure.experiment.builders import FakeBench, make_plan, make_point

ARMS = ("one", "two")
PLANS = tuple(map(make_plan, ARMS))


def run(
    tmp_path: Path,
    bench: FakeBench,
    *,
    loads: tuple[float, ...] = (1.0, 3.0),
    repeats: int = 2,
    notes: ResultKeeper | None = None,
) -> tuple[Point, ...]:
    """Run a grid of two arms."""
    cells = cell_order(ARMS, loads, repeats=repeats, order=CellOrder.ALTERNATING)
    return run_cells(cells, PLANS, notes or keeper(tmp_path), bench)


def keeper(tmp_path: Path, lines: list[str] | None = None) -> ResultKeeper:
    """Return a keeper of results in a folder that reports to a list."""
    return ResultKeeper(Store(tmp_path), Source.REAL, (lines if lines is not None else []).append)


def files(tmp_path: Path) -> set[str]:
    """Return the files below a folder."""
    return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}


def test_alternating_order_turns_around_in_every_other_repeat() -> None:
    order = cell_order(ARMS, (1.0, 2.0), repeats=3, order=CellOrder.ALTERNATING)
    assert [(cell.arm, cell.load, cell.repeat) for cell in order] == [
        *[("one", 1.0, 0), ("one", 2.0, 0), ("two", 1.0, 0), ("two", 2.0, 0)],
        *[("two", 2.0, 1), ("two", 1.0, 1), ("one", 2.0, 1), ("one", 1.0, 1)],
        *[("one", 1.0, 2), ("one", 2.0, 2), ("two", 1.0, 2), ("two", 2.0, 2)],
    ]


def test_order_by_arm_starts_each_arm_once(tmp_path: Path) -> None:
    bench = FakeBench()
    cells = cell_order(ARMS, (1.0,), repeats=2, order=CellOrder.BY_ARM)
    run_cells(cells, PLANS, keeper(tmp_path), bench)
    assert bench.log == ["up one", "one@1-r0", "one@1-r1", "down one", "up two", "two@1-r0", "two@1-r1", "down two"]


def test_run_starts_an_arm_for_each_group_and_keeps_points_and_raw_data(tmp_path: Path) -> None:
    bench = FakeBench()
    points = run(tmp_path, bench, repeats=2, loads=(1.0,))
    # The second repeat begins with the arm that the first one ended with: it keeps running.
    assert bench.log == [
        *["up one", "one@1-r0", "down one"],
        *["up two", "two@1-r0", "two@1-r1", "down two"],
        *["up one", "one@1-r1", "down one"],
    ]
    assert [(point.arm.name, point.repeat) for point in points] == [
        ("one", 0),
        ("two", 0),
        ("two", 1),
        ("one", 1),
    ]
    by_arm = sorted(points, key=lambda point: (point.arm.name, point.repeat))
    assert list(Store(tmp_path).points()) == by_arm
    assert "real/one@1-r0/requests.jsonl" in files(tmp_path)


def test_interrupted_run_drops_its_cell_stops_the_arm_and_goes_on_where_it_was(tmp_path: Path) -> None:
    def interrupt(cell: Cell) -> None:
        if cell.name == "two@1-r0":
            raise KeyboardInterrupt

    bench = FakeBench(before=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, bench)
    assert bench.log[-3:] == ["up two", "two@1-r0", "down two"]
    assert {name.split("/")[1] for name in files(tmp_path)} == {"one@1-r0", "one@3-r0"}

    again = FakeBench()
    points = run(tmp_path, again)
    assert len(points) == 8
    assert again.log[:3] == ["up two", "two@1-r0", "two@3-r0"]
    assert not [line for line in again.log if line.endswith("-r0") and line.startswith("one")]

    idle = FakeBench()
    assert run(tmp_path, idle) == points
    assert idle.log == []


def test_failed_cell_is_noted_and_tried_again_next_time_while_the_others_go_on(tmp_path: Path) -> None:
    def fail(cell: Cell) -> None:
        if cell.name == "one@3-r0":
            raise CellFailed("the router is gone")

    notes = keeper(tmp_path)
    points = run(tmp_path, FakeBench(before=fail), notes=notes)
    assert len(points) == 7
    assert [cell.name for cell in notes.failures] == ["one@3-r0"]
    assert list(Store(tmp_path).failures()) == ["one@3-r0: the router is gone"]

    again = FakeBench()
    assert len(run(tmp_path, again)) == 8
    assert again.log == ["up one", "one@3-r0", "down one"]
    assert list(Store(tmp_path).failures()) == []


def test_arm_that_does_not_start_is_tried_once_and_all_its_cells_fail(tmp_path: Path) -> None:
    bench, notes = FakeBench(broken=("one",)), keeper(tmp_path)
    points = run(tmp_path, bench, notes=notes)
    assert {point.arm.name for point in points} == {"two"}
    assert [cell.arm for cell in notes.failures] == ["one"] * 4
    assert bench.log[0] == "up two"
    assert bench.log.count("up two") == 1


def test_more_loads_add_to_what_is_there(tmp_path: Path) -> None:
    run(tmp_path, FakeBench(), loads=(1.0,), repeats=1)
    bench = FakeBench()
    assert len(run(tmp_path, bench, loads=(1.0, 2.0), repeats=1)) == 4
    assert bench.log == ["up one", "one@2-r0", "down one", "up two", "two@2-r0", "down two"]


def test_run_says_beforehand_how_long_it_takes(tmp_path: Path) -> None:
    lines: list[str] = []
    cells = cell_order(ARMS, (1.0,), repeats=1, order=CellOrder.ALTERNATING)
    run_cells(cells[:1], PLANS, keeper(tmp_path), FakeBench())
    run_cells(cells, PLANS, keeper(tmp_path, lines), FakeBench())
    assert lines[0] == "1 runs, about 2 s; 1 are kept from earlier"
    assert lines[1].startswith("[1/1] two at 1 requests/s: 1.00 good requests/s (100.0% of 100), p99 TTFT 0.50 s")


def test_search_uses_what_was_measured_before_and_starts_the_arm_only_for_the_rest(tmp_path: Path) -> None:
    bench, idle = FakeBench(), FakeBench()
    run_cells([Cell(arm="one", load=1.0, repeat=0)], PLANS, keeper(tmp_path), FakeBench())
    for each in (bench, idle):
        find_capacity(PLANS[0], CapacitySpec(precision=0.5, repeats=1, share=0.9), keeper(tmp_path), each, start=1.0)
    assert bench.log == ["up one", "one@2-r0", "one@4-r0", "one@2.828-r0", "down one"]
    assert idle.log == []
    ((arm,),) = (found.arms for found in analyze(Store(tmp_path).points(), share=0.9))
    assert 2 < arm.capacity.load < 3


def test_search_ends_at_a_run_or_an_arm_that_fails_and_notes_it(tmp_path: Path) -> None:
    def fail(cell: Cell) -> None:
        if cell.load == 2:
            raise CellFailed("too much for it")

    for bench, failed in ((FakeBench(before=fail), "one@2-r0"), (FakeBench(broken=("one",)), "one@1-r0")):
        notes = keeper(tmp_path / failed)
        find_capacity(PLANS[0], CapacitySpec(share=0.9, repeats=1), notes, bench, start=1.0)
        assert [cell.name for cell in notes.failures] == [failed]
        assert bench.log == (["up one", "one@1-r0", "one@2-r0", "down one"] if bench.log else [])


def test_point_of_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    store, cell = Store(tmp_path), Cell(arm="1P1D", load=0.1, repeat=0)
    store.keep(Source.REAL, cell, make_point(load=0.1))
    path = store.folder(Source.REAL, cell) / "point.json"
    path.write_text(path.read_text().replace('"load"', '"speed"'))
    with pytest.raises(ExperimentError, match=r"point.json: it was written by another version .*--again"):
        list(store.points())


def test_folder_with_results_of_other_settings_is_not_touched(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.claim({"seed": 1, "arm one": {"threads": 1}})
    store.claim({"seed": 1, "arm two": {"threads": 2}})
    with pytest.raises(OtherSettings, match=r"\(arm two, seed differ\)"):
        store.claim({"seed": 2, "arm one": {"threads": 1}, "arm two": {"threads": 1}})
    store.claim({"seed": 1, "arm two": {"threads": 2}})


def test_forget_removes_results_and_nothing_else(tmp_path: Path) -> None:
    run(tmp_path, FakeBench())
    (tmp_path / "mine.txt").write_text("notes", encoding="utf-8")
    store = Store(tmp_path)
    store.claim({"seed": 1})
    store.forget()
    assert files(tmp_path) == {"mine.txt"}


@pytest.mark.parametrize(
    ("one", "other"), [("a b", "a/b"), ("a b", "a-b"), ("a/b", "a:b"), ("a=1", "a 1"), ("../up", "up"), ("ü", "ö")]
)
def test_different_names_have_different_folders_of_plain_characters(one: str, other: str) -> None:
    assert slug(one) != slug(other)
    assert all("/" not in slug(each) and slug(each)[0] not in ".-" and " " not in slug(each) for each in (one, other))


def test_countdown_tells_what_is_left_by_the_mean_so_far() -> None:
    now = iter([0.0, 100.0, 160.0])
    countdown = Countdown(num_cells=2, now=lambda: next(now))
    assert countdown.step() == "[1/2, about 2 min left]"
    assert countdown.step() == "[2/2]"
    assert [span(each) for each in (10, 89, 600, 7200)] == ["10 s", "89 s", "10 min", "2.0 h"]
