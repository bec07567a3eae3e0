"""The tables of routing.md, and how they get between its lines of prose."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple

from benchmarks.routing.cells import CAPACITY_SPEED, OURS
from benchmarks.routing.rows import Results, Row
from benchmarks.routing.tenants import Arm
from measure.figures import Percentiles
from measure.simulate.policies.registry import GREEDY_PERFECT_SIGNALS

BOUND_GOAL = 0.9
"""Share of the bound that ours reaches at every speed of `base`."""
OVERLOAD_GOAL = 0.9
"""Share of the largest goodput up to capacity that ours keeps at twice and four times the capacity."""
TENANT_GOAL = 0.03
"""Share of all its requests that the quiet tenant may lose to the loud one."""
_NOT_RUN = "–"
_END = "<!-- end -->"
_FLEET_NAMES = {"4P4D": "4P4D", "8": "8 aggregated"}


class PageError(Exception):
    """A page has no place for a table; the message says what to add."""


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, which ends with a line break."""
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    lines.insert(1, "|---" * len(columns) + "|")
    return "\n".join(lines) + "\n"


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return a page with these tables in place of those of the same names; everything else stays. Raises PageError."""
    for name, table in tables.items():
        begin = f"<!-- table {name} -->"
        place = re.compile(rf"{re.escape(begin)}\n.*?^{re.escape(_END)}$", re.DOTALL | re.MULTILINE)
        if len(place.findall(page)) != 1:
            raise PageError(f"cannot write table {name!r}: the page needs one line {begin!r} and {_END!r} after it")
        page = place.sub(lambda _found, text=f"{begin}\n{table}{_END}": text, page)  # type: ignore[misc]
    return page


def tables(results: Results) -> dict[str, str]:
    """Return the tables of the parts that have run, by name."""
    found: dict[str, str] = {}
    for part, make in (("base", _base_tables), ("overload", _overload_tables)):
        found.update(make(results.rows(part)))
    if results.rows("base") or results.rows("overload"):
        found["bound"] = _bound_table(results)
    if rows := results.rows("waves"):
        found["waves"] = _wave_table(rows)
    if rows := results.rows("tenants"):
        found["tenants"] = _tenant_table(rows)
    found["goals"] = goal_table(results)
    return found


def _base_tables(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    for fleet, cells in _by_fleet(rows):
        speeds = sorted({row.speed for row in cells})
        at_one = sorted((row for row in cells if row.speed == 1), key=lambda row: -row.num_good)
        lines = [
            [
                row.policy,
                *(_percent(_share(_cell(cells, policy=row.policy, speed=speed))) for speed in speeds),
                _percent(row.token_hit),
                _percent(row.pulled_share),
                _NOT_RUN if row.hot_spot is None else f"{row.hot_spot:.2f}",
                _times(row.ttft, "{:.2f} / {:.1f} / {:.1f}"),
                _times(row.tpot, "{0:.0f} / {2:.0f}", factor=1000),
            ]
            for row in at_one
        ]
        columns = ["policy", *(f"good {speed:g}×" for speed in speeds), "hit %", "pulled %", "hot spot"]
        yield f"base {fleet}", markdown([*columns, "TTFT p50/p90/p99 s", "TPOT p50/p99 ms"], lines)


def _bound_table(results: Results) -> str:
    lines: list[list[str]] = []
    for part, shed in (("base", "deadline"), ("overload", "slo")):
        for fleet, cells in _by_fleet(results.rows(part)):
            for speed in sorted({row.speed for row in cells}):
                at_speed = [row for row in cells if row.speed == speed]
                baselines = [row for row in at_speed if row.policy not in (OURS, GREEDY_PERFECT_SIGNALS)]
                best = max(baselines, key=lambda row: row.num_good, default=None)
                ours = _cell(at_speed, policy=OURS, speed=speed)
                assert ours is not None, f"{OURS} is replayed at every speed"
                lines.append(
                    [
                        _FLEET_NAMES[fleet],
                        f"{speed:g}×",
                        shed,
                        _percent(ours.bound_share),
                        _percent(ours.good_share),
                        _percent(ours.ratio),
                        _NOT_RUN if best is None else f"{_percent(best.good_share)} ({best.policy})",
                        _percent(None if best is None else best.ratio),
                    ]
                )
    columns = ["fleet", "speed", "shed", "bound %", "predictive %", "of the bound %", "best published %"]
    return markdown([*columns, "of the bound %"], lines)


def _overload_tables(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    for fleet, cells in _by_fleet(rows):
        speeds = sorted({row.speed for row in cells})
        above = [speed for speed in speeds if speed > CAPACITY_SPEED]
        lines: list[list[str]] = []
        for policy in dict.fromkeys(row.policy for row in cells):
            own = [row for row in cells if row.policy == policy]
            lines.append(
                [
                    policy,
                    *(f"{row.goodput_per_s:.2f} ({100 * row.good_share:.0f} %)" for row in own),
                    *(_percent(_kept(own, speed), digits=0) for speed in above),
                ]
            )
        head = [f"good requests/s (of all) at {speed:g}×" for speed in speeds[:1]]
        kept = [f"kept at {speed:g}× %" for speed in above]
        yield (
            f"overload {fleet}",
            markdown(["policy", *head, *(f"{speed:g}×" for speed in speeds[1:]), *kept], lines),
        )


def _kept(rows: Sequence[Row], speed: float) -> float:
    """Return a policy's goodput at a speed, as a share of its largest one up to capacity."""
    most = max(row.goodput_per_s for row in rows if row.speed <= CAPACITY_SPEED)
    found = next(row.goodput_per_s for row in rows if row.speed == speed)
    return found / most if most else 0.0


def _wave_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            row.load,
            _FLEET_NAMES[row.fleet],
            row.policy,
            f"{row.goodput_per_s:.2f}",
            _percent(row.good_share),
            _percent(row.ratio),
            _percent(row.num_refused / row.num_requests),
            _times(row.ttft, "{:.2f} / {:.1f} / {:.1f}"),
        ]
        for row in rows
    ]
    columns = ["load", "fleet", "policy", "good requests/s", "good %", "of the bound %", "refused %"]
    return markdown([*columns, "TTFT p50/p90/p99 s"], lines)


def _tenant_table(rows: Sequence[Row]) -> str:
    lines: list[list[str]] = []
    for row in rows:
        if row.tenant != "quiet" or row.arm != Arm.TWO.value:
            continue
        found = {
            (other.arm, other.tenant): other
            for other in rows
            if (other.fleet, other.policy, other.speed) == (row.fleet, row.policy, row.speed)
        }
        alone = found[Arm.ALONE.value, "quiet"]
        lines.append(
            [
                _FLEET_NAMES[row.fleet],
                f"{row.speed:g}×",
                row.policy,
                _percent(alone.good_share),
                _percent(_share(found.get((Arm.HALF.value, "quiet")))),
                _percent(row.good_share),
                _percent(_share(found.get((Arm.ONE.value, "quiet")))),
                _percent(found[Arm.TWO.value, "loud"].good_share),
                _times(alone.ttft, "{0:.2f} / {2:.1f}"),
                _times(row.ttft, "{0:.2f} / {2:.1f}"),
            ]
        )
    columns = ["fleet", "speed", "policy", "quiet alone: good %", "on half the workers"]
    columns += ["beside the loud one", "in one account"]
    times = ["quiet alone: TTFT p50/p99 s", "beside the loud one"]
    return markdown([*columns, "loud: good %", *times], lines)


def goal_table(results: Results) -> str:
    """Return what was asked for, what was measured, and whether that is enough."""
    return markdown(["goal", "fleet", "measured", "met"], [*_bound_goals(results), *_other_goals(results)])


def _bound_goals(results: Results) -> Iterator[list[str]]:
    for fleet, cells in _by_fleet(results.rows("base")):
        ratios = {row.speed: row.ratio for row in cells if row.policy == OURS and row.ratio is not None}
        goal = f"at least {100 * BOUND_GOAL:.0f} % of the bound at every speed of the table"
        yield _goal(
            goal, fleet, [(f"{100 * ratio:.1f} % at {s:g}×", ratio >= BOUND_GOAL) for s, ratio in ratios.items()]
        )


def _other_goals(results: Results) -> Iterator[list[str]]:
    for fleet, cells in _by_fleet(results.rows("overload")):
        own = [row for row in cells if row.policy == OURS]
        kept = {row.speed: _kept(own, row.speed) for row in own if row.speed > CAPACITY_SPEED}
        goal = f"at least {100 * OVERLOAD_GOAL:.0f} % of the largest goodput up to capacity at twice and four times it"
        yield _goal(
            goal, fleet, [(f"{100 * share:.0f} % at {s:g}×", share >= OVERLOAD_GOAL) for s, share in kept.items()]
        )
    for fleet, cells in _by_fleet(results.rows("tenants")):
        quiet = {(row.speed, row.arm): row for row in cells if row.policy == OURS and row.tenant == "quiet"}
        lost: list[tuple[str, bool]] = []
        kept_share: list[tuple[str, bool]] = []
        for speed in sorted({speed for speed, _ in quiet}):
            alone, half, two = (quiet[speed, arm.value].good_share for arm in (Arm.ALONE, Arm.HALF, Arm.TWO))
            kept_share.append((f"{100 * two:.1f} and {100 * half:.1f} % at {speed:g}×", two >= half))
            lost.append((f"{100 * (alone - two):.1f} points at {speed:g}×", alone - two <= TENANT_GOAL))
        yield _goal("the quiet tenant is as good beside the loud one as on half the workers", fleet, kept_share)
        yield _goal(f"the quiet tenant loses at most {100 * TENANT_GOAL:.0f} points to the loud one", fleet, lost)


def _goal(goal: str, fleet: str, found: Sequence[tuple[str, bool]]) -> list[str]:
    verdict = "yes" if all(is_met for _, is_met in found) else "**no**"
    return [goal, _FLEET_NAMES[fleet], ", ".join(text for text, _ in found), verdict]


def _by_fleet(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    fleets: dict[str, list[Row]] = {}
    for row in rows:
        fleets.setdefault(row.fleet, []).append(row)
    return list(fleets.items())


def _cell(rows: Iterable[Row], *, policy: str, speed: float) -> Row | None:
    return next((row for row in rows if row.policy == policy and row.speed == speed), None)


def _share(row: Row | None) -> float | None:
    return None if row is None else row.good_share


def _percent(share: float | None, *, digits: int = 1) -> str:
    return _NOT_RUN if share is None else f"{100 * share:.{digits}f}"


def _times(times: Percentiles | None, form: str, *, factor: float = 1) -> str:
    return _NOT_RUN if times is None else form.format(*(factor * value for value in astuple(times)))
