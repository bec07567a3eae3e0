"""Limits of control groups, from files as the kernel writes them."""

import os
from pathlib import Path

import pytest

from common.cgroups import CgroupFiles, cpu_quota, memory_headroom_bytes, usable_cores

Groups = dict[str, dict[str, object]]


def write_group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n", encoding="ascii")


def written(folder: Path, lines: list[str], groups: Groups) -> CgroupFiles:
    write_group(folder / "proc", {"cgroup": "\n".join(lines)})
    for name, files in groups.items():
        write_group(folder / "fs" / name, files)
    return CgroupFiles(proc=folder / "proc", mount=folder / "fs")


V2, V1 = ["0::/pod/container"], ["5:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc"]
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("lines", "groups", "expected"),
    [
        pytest.param(
            V2,
            {
                "pod/container": {
                    "memory.max": 1000,
                    "memory.current": 500,
                    "memory.stat": "anon 100\ninactive_file 300\nactive_file 50",
                }
            },
            1000 - (500 - 300),
            id="v2: the limit less what is in use",
        ),
        pytest.param(
            V2,
            {
                "pod/container": {"memory.max": 1000, "memory.current": 100},
                "pod": {"memory.max": 1200, "memory.current": 900},
            },
            300,
            id="v2: an outer group is tighter",
        ),
        pytest.param(V2, {"pod/container": {"memory.max": "max", "memory.current": 100}}, None, id="v2: unlimited"),
        pytest.param(["0::/"], {"": {"memory.max": 700, "memory.current": 200}}, 500, id="v2: the mount is our own"),
        pytest.param(["0::/"], {"": {"memory.max": 700, "memory.current": 900}}, 0, id="v2: over the limit"),
        pytest.param(
            V1,
            {
                "memory": {
                    "memory.limit_in_bytes": 800,
                    "memory.usage_in_bytes": 240,
                    "memory.stat": "inactive_file 1\ntotal_inactive_file 40",
                }
            },
            600,
            id="v1: the path is the host's, the mount ours",
        ),
        pytest.param(
            ["4:memory:/"],
            {"memory": {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 240}},
            None,
            id="v1: unlimited",
        ),
    ],
)
def test_cgroup_headroom_is_what_the_tightest_group_still_grants(
    tmp_path: Path, lines: list[str], groups: Groups, expected: int | None
) -> None:
    assert memory_headroom_bytes(written(tmp_path, lines, groups)) == expected


@pytest.mark.parametrize(
    ("lines", "groups", "expected"),
    [
        pytest.param(V2, {"pod/container": {"cpu.max": "150000 100000"}}, 1, id="v2: rounded down"),
        pytest.param(V2, {"pod/container": {"cpu.max": "50000 100000"}}, 1, id="v2: at least one"),
        pytest.param(V2, {"pod/container": {"cpu.max": "max 100000"}}, 6, id="v2: no quota, so the cores of the mask"),
        pytest.param(V2, {"pod/container": {"cpu.max": "6400000 100000"}}, 6, id="v2: more than the mask"),
        pytest.param(
            V2, {"pod/container": {"cpu.max": "400000 100000"}, "pod": {"cpu.max": "40000 20000"}}, 2, id="v2: outer"
        ),
        pytest.param(V1, {"cpu/docker/abc": {QUOTA: 300000, PERIOD: 100000}}, 3, id="v1"),
        pytest.param(V1, {"cpu,cpuacct": {QUOTA: 300000, PERIOD: 100000}}, 3, id="v1: no link of the controller"),
        pytest.param(V1, {"cpu": {QUOTA: -1, PERIOD: 100000}}, 6, id="v1: no quota"),
        pytest.param([], {}, 6, id="no groups"),
    ],
)
def test_cores_beyond_a_containers_quota_get_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], groups: Groups, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(6)), raising=False)
    assert usable_cores(written(tmp_path, lines, groups)) == expected


def test_limits_where_the_system_has_no_groups_are_none(tmp_path: Path) -> None:
    nothing = CgroupFiles(proc=tmp_path / "proc", mount=tmp_path / "fs")
    assert memory_headroom_bytes(nothing) is None
    assert cpu_quota(nothing) is None
