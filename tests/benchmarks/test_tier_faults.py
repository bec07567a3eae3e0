"""Some faults of each kind that befall the disk tier: no wrong bytes, nothing lost beside what they concern."""

from pathlib import Path

import pytest

from benchmarks.tier_faults import KINDS, Kind, run

FOUND = {
    "flip_in_record": {"corrupt"},
    "flip_in_block": {"flipped"},
    "swap_records": {"swapped"},
    "swap_blocks": {"flipped"},
    "stale_index": {"flipped"},
    "stale_model": {"stale"},
    "torn_write": {"torn", "corrupt"},
    "io_errors": {"io_error", "full"},
    "slow_disk": {"slow"},
    "vanished_folder": {"vanished"},
    "two_writers": set(),
}
"""Faults that are counted, and no others. Cut files and killed processes may leave any of several."""


NUM_FAULTS = {"kill_writers": 4, "two_writers": 8, "vanished_folder": 8}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.inject.__name__)
def test_no_fault_of_the_disk_returns_wrong_bytes_or_loses_others(kind: Kind, tmp_path: Path) -> None:
    name = kind.inject.__name__
    outcome = run(kind, NUM_FAULTS.get(name, 100), seed=2, folder=tmp_path)
    assert outcome.reads > 0 and (outcome.wrong, outcome.lost, outcome.hangs) == (0, 0, 0)
    if name in FOUND:
        assert set(outcome.found) == FOUND[name]
