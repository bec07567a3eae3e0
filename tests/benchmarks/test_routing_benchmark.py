import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import benchmarks.routing
from benchmarks.routing.__main__ import main
from benchmarks.routing.cells import (
    BURST,
    FLEETS,
    OURS,
    OVERLOAD_POLICIES,
    POLICIES,
    SHEDDING_POLICIES,
    SQUARE_WAVE,
    TENANT_SPEEDS,
    Bench,
    holding,
)
from benchmarks.routing.rows import PartResults, Results, Row, read_results, write_results
from benchmarks.routing.tables import PageError, markdown, tables, with_tables
from benchmarks.routing.tenants import Arm, TenantCell, shared_out, tenant_arrivals, tenant_cells
from measure.figures import Percentiles
from measure.simulate.comparison import load_trace, policy_names

SMALL = Path(__file__).parents[1] / "data" / "small.jsonl"
PAGE = Path(benchmarks.routing.__file__).parents[1] / "results" / "routing.md"
TIMES = Percentiles(p50=0.5, p90=1.25, p99=3.0)


def make_row(policy: str = OURS, speed: float = 1.0, num_good: int = 90, **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "fleet": "4P4D",
        "num_requests": 100,
        "num_bound": 100,
        "num_refused": 0,
        "num_ttft_misses": 0,
        "num_tpot_misses": 0,
        "goodput_per_s": num_good * speed / 100,
        "token_hit": 0.25,
        "pulled_share": 0.125,
        "hot_spot": 1.02,
        "ttft": TIMES,
        "tpot": TIMES,
    }
    return Row(policy=policy, speed=speed, num_good=num_good, **(fields | changes))


def make_results(**rows: list[Row]) -> Results:
    parts = {name: PartResults(settings={"4P4D": {"seed": 0}}, rows=tuple(own)) for name, own in rows.items()}
    return Results(parts=parts)


def make_bench(out: Path, num_requests: int) -> Bench:
    return Bench(trace=SMALL, num_requests=num_requests, num_jobs=1, out=out, report=lambda _line: None)


def write_short_trace(path: Path, num_requests: int) -> Path:
    """Write the first requests of the small trace, cut to a few blocks and tokens: they take few steps to serve."""
    with SMALL.open(encoding="utf-8") as lines:
        requests = [json.loads(line) for line in islice(lines, num_requests)]
    for request in requests:
        request |= {"input_length": 1000, "output_length": 8, "hash_ids": request["hash_ids"][:2]}
    path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    return path


def cells_of(table: str) -> list[list[str]]:
    """Return the cells of a table's rows, without head and rule."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_table_replaces_the_one_between_its_markers_and_nothing_else() -> None:
    page = "a\n<!-- table one -->\nold\n| x |\n<!-- end -->\nb\n<!-- table two -->\n<!-- end -->\nc\n"

    page = with_tables(page, {"one": markdown(["k"], [[r"\1"]]), "two": "2\n"})

    assert (
        page
        == "a\n<!-- table one -->\n| k |\n|---|\n| \\1 |\n<!-- end -->\nb\n<!-- table two -->\n2\n<!-- end -->\nc\n"
    )
    assert with_tables(page, {"two": "2\n"}) == page


@pytest.mark.parametrize("page", ["", "<!-- table one -->\n", "<!-- end -->\n<!-- table one -->\n"])
def test_page_without_a_place_for_a_table_is_refused(page: str) -> None:
    with pytest.raises(PageError, match="cannot write table 'one': the page needs one line"):
        with_tables(page, {"one": "1\n"})


def test_page_has_a_place_for_every_table() -> None:
    rows = [make_row(fleet=fleet, speed=speed, arm=arm.value, tenant="quiet", load="burst")
            for fleet in ("4P4D", "8") for speed in (1.0, 4.0) for arm in (Arm.ALONE, Arm.HALF, Arm.TWO)]  # fmt: skip
    rows += [row.model_copy(update={"tenant": "loud"}) for row in rows]
    rows += [row.model_copy(update={"policy": policy}) for row in rows for policy in SHEDDING_POLICIES[1:]]
    found = tables(make_results(base=rows, overload=rows, waves=rows, tenants=rows))

    with_tables(PAGE.read_text(encoding="utf-8"), found)
    assert set(re.findall("<!-- table (.*) -->", PAGE.read_text(encoding="utf-8"))) == set(found)


def test_base_table_has_the_best_policy_first_and_a_dash_where_one_was_not_replayed() -> None:
    rows = [make_row("random", 1.0, 2), make_row(OURS, 1.0, 99), make_row(OURS, 2.0, 90), make_row("mooncake", 1.0, 50)]
    found = cells_of(tables(make_results(base=rows))["base 4P4D"])
    assert [line[:3] for line in found] == [[OURS, "99.0", "90.0"], ["mooncake", "50.0", "–"], ["random", "2.0", "–"]]
    assert found[0][3:] == ["25.0", "12.5", "1.02", "0.50 / 1.2 / 3.0", "500 / 3000"]


def test_overload_table_compares_with_the_largest_goodput_up_to_capacity() -> None:
    rows = [make_row(policy, speed, good) for policy in SHEDDING_POLICIES for speed, good in
            ((1.0, 80), (2.0, 30), (4.0, 19), (8.0, 20))]  # fmt: skip
    results = make_results(overload=rows)
    ours, *_ = cells_of(tables(results)["overload 4P4D"])
    assert ours == [OURS, "0.80 (80 %)", "0.60 (30 %)", "0.76 (19 %)", "1.60 (20 %)", "95", "200"]
    (goal,) = cells_of(tables(results)["goals"])
    assert goal[1:] == ["4P4D", "95 % at 4×, 200 % at 8×", "yes"]


def test_goals_that_are_missed_at_one_speed_are_marked() -> None:
    base = [make_row(OURS, 1.0, 95), make_row(OURS, 1.5, 80, num_bound=90), make_row("random", 1.0, 1)]
    base.append(make_row("random", 1.5, 1))
    quiet = [
        make_row(OURS, 4.0, good, arm=arm.value, tenant=tenant)
        for arm, tenant, good in (
            (Arm.ALONE, "quiet", 99),
            (Arm.HALF, "quiet", 98),
            (Arm.TWO, "quiet", 97),
            (Arm.TWO, "loud", 50),
        )
    ]
    bound, share, lost = cells_of(tables(make_results(base=base, tenants=quiet))["goals"])
    assert bound[2:] == ["95.0 % at 1×, 88.9 % at 1.5×", "**no**"]
    assert share[2:] == ["97.0 and 98.0 % at 4×", "**no**"]
    assert lost[2:] == ["2.0 points at 4×", "yes"]


def test_tenant_table_puts_the_quiet_one_alone_and_beside_the_loud_one() -> None:
    rows = [
        make_row(OURS, 4.0, good, arm=arm.value, tenant=tenant)
        for arm, tenant, good in (
            (Arm.ALONE, "quiet", 99),
            (Arm.HALF, "quiet", 97),
            (Arm.TWO, "loud", 50),
            (Arm.TWO, "quiet", 98),
            (Arm.ONE, "loud", 55),
            (Arm.ONE, "quiet", 56),
        )
    ]
    (line,) = cells_of(tables(make_results(tenants=rows))["tenants"])
    assert line[:8] == ["4P4D", "4×", OURS, "99.0", "97.0", "98.0", "56.0", "50.0"]


def test_results_file_keeps_rows_and_the_parts_that_did_not_run(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    results = make_results(waves=[make_row(load="burst")], base=[make_row(), make_row(ttft=None)])
    write_results(path, results)
    assert read_results(path) == results
    assert sum('"policy"' in line for line in path.read_text().splitlines()) == 3  # a line each
    path.write_text('{"4P4D": {"aibrix@0.5": {}}}')  # the form before this one
    assert read_results(path).parts == {}


def test_every_policy_of_the_benchmark_is_one_of_the_simulator() -> None:
    assert {*POLICIES, *OVERLOAD_POLICIES} <= set(policy_names())


def test_policies_that_have_failed_are_not_replayed_faster_but_ours_always_is() -> None:
    rows = [make_row(OURS, num_good=0), make_row("mooncake", num_good=3), make_row("random", num_good=2)]
    assert holding(rows) == (OURS, "mooncake")


def test_waves_are_square_and_have_one_burst_in_the_first_1500_requests() -> None:
    assert [(stage.length_s, stage.speed) for stage in SQUARE_WAVE.stages] == [(60, 0.5), (60, 3)]
    played_s = [stage.length_s * stage.speed for stage in BURST.stages]
    assert sum(played_s) > 510  # time of these requests in the trace


def test_tenants_have_one_account_or_half_the_workers_under_our_policy_alone() -> None:
    cells = tenant_cells(SHEDDING_POLICIES, TENANT_SPEEDS, ours=OURS)
    assert len(cells) == len({cell.name for cell in cells}) == len(TENANT_SPEEDS) * (2 * len(SHEDDING_POLICIES) + 2)
    assert {cell.policy for cell in cells if cell.arm in (Arm.ONE, Arm.HALF)} == {OURS}


def test_loud_tenant_sends_ten_times_as_much_as_the_quiet_one_in_the_same_time(tmp_path: Path) -> None:
    settings = make_bench(tmp_path, 220).settings(FLEETS[0], shed="slo")
    trace = load_trace(settings)
    loud, quiet = shared_out(trace)
    assert (len(loud.requests), len(quiet.requests)) == (200, 20)
    assert quiet.requests[0].arrival_s == 0.0

    arrivals = list(tenant_arrivals(trace, settings, TenantCell(policy=OURS, speed=11.0, arm=Arm.TWO)))

    assert [arrival.at_s for arrival in arrivals] == sorted(arrival.at_s for arrival in arrivals)
    times = {name: [a.at_s for a in arrivals if a.tenant.name == name] for name in ("loud", "quiet")}
    assert times["loud"] == pytest.approx([request.arrival_s / 10 for request in loud.requests])
    assert times["quiet"] == pytest.approx([request.arrival_s for request in quiet.requests])


def test_one_account_changes_nothing_but_the_tenants_name(tmp_path: Path) -> None:
    settings = make_bench(tmp_path, 44).settings(FLEETS[0], shed="slo")
    two, one = (
        list(tenant_arrivals(load_trace(settings), settings, TenantCell(policy=OURS, speed=4.0, arm=arm)))
        for arm in (Arm.TWO, Arm.ONE)
    )
    assert {arrival.tenant.name for arrival in one} == {"both"}
    for a, b in zip(two, one, strict=True):
        assert (a.at_s, a.kind, a.prompt, a.tenant.cache_salt) == (b.at_s, b.kind, b.prompt, b.tenant.cache_salt)


def test_command_writes_tables_and_rows_and_runs_no_cell_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in (("FLEETS", FLEETS[:1]), ("SHEDDING_POLICIES", SHEDDING_POLICIES[:2]), ("TENANT_SPEEDS", (4.0,))):
        monkeypatch.setattr(f"benchmarks.routing.cells.{name}", few)
    (tmp_path / "routing.md").write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    out = tmp_path / "out"
    trace = write_short_trace(tmp_path / "trace.jsonl", 44)
    command = ["--trace", str(trace), "--requests", "33", "--out", str(out), "--results", str(tmp_path)]

    assert main([*command, "--parts", "waves,tenants"]) == 0
    first = (tmp_path / "routing.json").read_text(), (tmp_path / "routing.md").read_text()
    assert "@4-one-account" in capsys.readouterr().out
    assert main([*command, "--parts", "tenants"]) == 0

    assert "@4-one-account" not in capsys.readouterr().out
    assert ((tmp_path / "routing.json").read_text(), (tmp_path / "routing.md").read_text()) == first
    parts = json.loads(first[0])["parts"]
    assert len(parts["waves"]["rows"]) == 2 * 2
    quiet = [row["num_requests"] for row in parts["tenants"]["rows"] if row["tenant"] == "quiet"]
    assert quiet == [3] * (2 * 2 + 2)
    with pytest.raises(SystemExit, match="holds results of other settings"):
        main(["--requests", "44", *command[:2], *command[4:], "--parts", "waves"])
