"""KV memory from measured figures; control groups from files as the kernel writes them."""

from pathlib import Path

import pytest

from engine.memory import (
    DeviceMemory,
    HostMemory,
    MemoryShare,
    cgroup_headroom_bytes,
    device_free_bytes,
    host_kv_bytes,
    measure_host,
)

GIB = 1 << 30


def make_host(*, available_gib: float = 12, process_gib: float = 1) -> HostMemory:
    return HostMemory(available_bytes=int(available_gib * GIB), process_bytes=int(process_gib * GIB))


def make_device(*, total_gib: int = 80, free_gib: int = 60, process_gib: int = 16) -> DeviceMemory:
    return DeviceMemory(total_bytes=total_gib * GIB, free_bytes=free_gib * GIB, process_bytes=process_gib * GIB)


def write_group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n", encoding="ascii")


def write_proc(folder: Path, *lines: str) -> Path:
    write_group(folder, {"cgroup": "\n".join(lines)})
    return folder


# ── pages from figures ──────────────────────────────────────────────────────────────────────────────────────────────


def test_host_when_dealt_takes_half_of_the_part_less_its_own_use() -> None:
    assert host_kv_bytes(make_host(), MemoryShare(host_bytes=5 * GIB)) == 2 * GIB


def test_host_when_not_dealt_takes_its_fraction_of_what_is_there_without_itself() -> None:
    assert host_kv_bytes(make_host(available_gib=15, process_gib=1), MemoryShare(host_fraction=0.25)) == 1.5 * GIB


def test_host_when_less_is_free_than_was_dealt_never_takes_more_than_is_free() -> None:
    assert host_kv_bytes(make_host(available_gib=2), MemoryShare(host_bytes=9 * GIB)) == 1 * GIB


def test_host_when_a_worker_restarts_beside_full_peers_finds_the_same_pages() -> None:
    share = MemoryShare(host_bytes=6 * GIB)

    at_first = host_kv_bytes(make_host(available_gib=11), share)
    after_a_restart = host_kv_bytes(make_host(available_gib=11 - 2.5), share)

    assert at_first == after_a_restart == 2.5 * GIB


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
def test_host_when_all_workers_fill_their_pages_the_sum_stays_below_what_was_there(num_workers: int) -> None:
    total, weights = 24 * GIB, 1 * GIB
    used = 0
    for _ in range(num_workers):
        used += weights
        memory = HostMemory(available_bytes=total - used, process_bytes=weights)
        used += host_kv_bytes(memory, MemoryShare(host_bytes=total // num_workers))

    assert used <= total


def test_host_when_the_process_outgrew_its_part_says_so() -> None:
    with pytest.raises(ValueError, match=r"part of the host is 1\.0 GiB, it uses 2\.0 GiB already"):
        host_kv_bytes(make_host(process_gib=2), MemoryShare(host_bytes=GIB))


def test_device_when_whole_is_what_is_free() -> None:
    assert device_free_bytes(make_device(), MemoryShare()) == 60 * GIB


def test_device_when_halved_is_the_half_less_its_own_use() -> None:
    assert device_free_bytes(make_device(), MemoryShare(device_fraction=0.5)) == (40 - 16) * GIB


def test_device_when_others_use_the_rest_is_never_more_than_is_free() -> None:
    assert device_free_bytes(make_device(free_gib=10), MemoryShare(device_fraction=0.5)) == 10 * GIB


# ── control groups ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_cgroup_v2_counts_the_limit_less_what_is_in_use(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", "0::/pod/container")
    stat = "anon 100\ninactive_file 300\nactive_file 50"
    write_group(tmp_path / "fs/pod/container", {"memory.max": 1000, "memory.current": 500, "memory.stat": stat})

    assert cgroup_headroom_bytes(proc, tmp_path / "fs") == 1000 - (500 - 300)


def test_cgroup_v2_when_an_outer_group_is_tighter_counts_that(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", "0::/pod/container")
    write_group(tmp_path / "fs/pod/container", {"memory.max": 1000, "memory.current": 100})
    write_group(tmp_path / "fs/pod", {"memory.max": 1200, "memory.current": 900})

    assert cgroup_headroom_bytes(proc, tmp_path / "fs") == 300


def test_cgroup_v2_when_unlimited_is_none(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", "0::/user.slice")
    write_group(tmp_path / "fs/user.slice", {"memory.max": "max", "memory.current": 100})

    assert cgroup_headroom_bytes(proc, tmp_path / "fs") is None


def test_cgroup_v2_when_the_mount_is_the_containers_own_reads_it_there(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", "0::/")
    write_group(tmp_path / "fs", {"memory.max": 700, "memory.current": 200})

    assert cgroup_headroom_bytes(proc, tmp_path / "fs") == 500


def test_cgroup_v1_when_the_path_is_the_hosts_reads_the_mount(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", "5:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc")
    stat = "inactive_file 1\ntotal_inactive_file 40"
    write_group(
        tmp_path / "fs/memory",
        {"memory.limit_in_bytes": 800, "memory.usage_in_bytes": 240, "memory.stat": stat},
    )

    assert cgroup_headroom_bytes(proc, tmp_path / "fs") == 600


def test_cgroup_v1_when_unlimited_is_none(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", "4:memory:/")
    write_group(tmp_path / "fs/memory", {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 240})

    assert cgroup_headroom_bytes(proc, tmp_path / "fs") is None


def test_cgroup_when_over_its_limit_is_zero(tmp_path: Path) -> None:
    proc = write_proc(tmp_path / "proc", "0::/")
    write_group(tmp_path / "fs", {"memory.max": 700, "memory.current": 900})

    assert cgroup_headroom_bytes(proc, tmp_path / "fs") == 0


def test_cgroup_when_the_system_has_none_is_none(tmp_path: Path) -> None:
    assert cgroup_headroom_bytes(tmp_path / "proc", tmp_path / "fs") is None


def test_measure_host_counts_this_process() -> None:
    before = measure_host()
    block = b"x" * (64 << 20)
    after = measure_host()

    assert after.process_bytes - before.process_bytes >= len(block) * 0.9
