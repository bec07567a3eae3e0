"""Finding a model's files."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from common.model_files import ModelNotFound, cache_dir, default_model_dir, resolve_model


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
    with pytest.raises(ModelNotFound, match="neither a folder nor a hub id"):
        resolve_model("a/b/c/d", local_files_only=True)
