"""A short walk of the faults of `benchmarks/tier_faults_worker.py`."""

from pathlib import Path

import pytest

from benchmarks.tier_faults_worker import LIMIT_S, attack


async def test_no_fault_of_tiers_gives_a_wrong_token_or_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.prefix_pull.MIN_PULL_S", LIMIT_S)
    tally = await attack(tmp_path, num_faults=150, seed=3)
    assert not tally.wrong
    assert len(tally.faults) > 8
