import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.routing.__main__ import main
from benchmarks.routing.cells import (
    FLEETS,
    OURS,
    OVERLOAD_POLICIES,
    POLICIES,
    SHEDDING_POLICIES,
    TENANT_SPEEDS,
    Bench,
)
from benchmarks.routing.tenants import Arm, TenantCell, shared_out, tenant_arrivals, tenant_cells
from measure.simulate.comparison import load_trace, policy_names

SMALL = Path(__file__).parents[1] / "data" / "small.jsonl"


def make_bench(out: Path, num_requests: int) -> Bench:
    return Bench(trace=SMALL, num_requests=num_requests, num_jobs=1, out=out)


def write_short_trace(path: Path, num_requests: int) -> Path:
    """Write the first requests of the small trace, cut to a few blocks and tokens: they take few steps to serve."""
    with SMALL.open(encoding="utf-8") as lines:
        requests = [json.loads(line) for line in islice(lines, num_requests)]
    for request in requests:
        request |= {"input_length": 1000, "output_length": 8, "hash_ids": request["hash_ids"][:2]}
    path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    return path


def test_every_policy_of_the_benchmark_is_one_of_the_simulator() -> None:
    assert {*POLICIES, *OVERLOAD_POLICIES} <= set(policy_names())


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


def test_command_writes_what_it_found_and_runs_no_cell_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = replace(FLEETS[0], base_speeds=(1.0, 1.5))
    for name, few in (
        ("FLEETS", (fleet,)),
        ("POLICIES", (OURS, "random")),
        ("SHEDDING_POLICIES", SHEDDING_POLICIES[:2]),
        ("TENANT_SPEEDS", (4.0,)),
        ("MIN_GOOD_SHARE", 1.01),
    ):
        monkeypatch.setattr(f"benchmarks.routing.cells.{name}", few)
    trace = write_short_trace(tmp_path / "trace.jsonl", 44)
    out = tmp_path / "out"
    command = ["--trace", str(trace), "--requests", "33", "--out", str(out)]

    assert main([*command, "--parts", "base,waves,tenants"]) == 0
    first = {path: path.read_text() for path in (*out.glob("*/table.txt"), out / "tenants.json")}
    assert "@4-one-account" in capsys.readouterr().out
    assert main([*command, "--parts", "tenants"]) == 0

    assert "@4-one-account" not in capsys.readouterr().out
    assert {path: path.read_text() for path in first} == first
    assert {path.parent.name for path in first} == {"base-4P4D", "waves-square-wave-4P4D", "waves-burst-4P4D", "out"}
    # At the first speed nobody is good enough here, and ours alone is replayed at the next.
    assert {path.name for path in (out / "base-4P4D" / "cells").iterdir()} == {
        f"{OURS}@1",
        "random@1",
        f"{OURS}@1.5",
    }
    figures = json.loads((out / "tenants.json").read_text())["figures"]
    quiet = [each["rounds"] for each in figures if each["arm"] == "quiet" and each["unit"] == "requests"]
    assert quiet == [[3]] * (2 * 2 + 2)
    with pytest.raises(SystemExit, match="holds results of other settings"):
        main(["--requests", "44", *command[:2], *command[4:], "--parts", "waves"])
