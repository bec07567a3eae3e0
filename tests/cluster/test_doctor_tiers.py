"""What the doctor says of the folder of the disk tier."""

from pathlib import Path
from typing import Any

import pytest

from cluster.doctor.tiers import check_tiers, measure_folder
from common.config import ServingConfig, parse_config


def config(path: Path, **tiers: Any) -> ServingConfig:
    return parse_config({"tiers": {"disk_gib": 0.1, "path": str(path)} | tiers}, source="test")


def test_a_folder_is_measured_and_left_empty(tmp_path: Path) -> None:
    (finding,) = check_tiers(config(tmp_path / "new"))
    assert "reads" in finding.detail
    assert list((tmp_path / "new").iterdir()) == []


def test_a_cluster_without_tiers_has_nothing_to_check() -> None:
    assert list(check_tiers(parse_config({"tiers": {"host_gib": 1}}, source="test"))) == []


def test_a_folder_without_a_size_is_told_to_be_no_tier(tmp_path: Path) -> None:
    (finding,) = check_tiers(config(tmp_path / "new", disk_gib=0))
    assert "tiers.disk_gib is 0" in finding.detail and not (tmp_path / "new").exists()


def test_too_little_space_is_told_before_the_disk_is_full(tmp_path: Path) -> None:
    (finding,) = check_tiers(config(tmp_path, disk_gib=1e6))
    assert "lower tiers.disk_gib" in finding.advice


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (finding,) = check_tiers(config(tmp_path))
    assert "chmod" in finding.advice


def test_a_path_that_is_a_file_is_told_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding,) = check_tiers(config(tmp_path / "file"))
    assert "tiers.path" in finding.advice


def test_rates_are_of_all_bytes(tmp_path: Path) -> None:
    speed = measure_folder(tmp_path, num_bytes=2 << 20)
    assert 0 < speed.read < 1e12
    assert 0 < speed.write < 1e12


def test_tiers_with_an_engine_that_has_its_own_are_refused() -> None:
    with pytest.raises(Exception, match="vllm cannot do that"):
        parse_config({"tiers": {"host_gib": 1}, "model": {"engine": "vllm"}}, source="test")
