"""Locates a model's files: the default model's cache folder, a local folder, or a hub snapshot. No torch."""

import errno
import os
from pathlib import Path

from common.process import CannotStart
from common.random_models import RANDOM_PREFIX, ensure_random_checkpoint

DEFAULT_MODEL_ID = "default"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
CACHE_ENV = "KVRELAY_CACHE"

# What a checkpoint folder needs: config and tokenizer, weights, chat template, sentencepiece leftovers.
_SNAPSHOT_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")


class ModelNotFound(CannotStart):
    """A model id has no usable files; the message says what to do."""

    key = "model.id"


class NoHome(OSError):
    """A path begins in a home folder, and there is none; the message says what to set."""


def cache_dir() -> Path:
    """Return the folder of downloads and runs: `$KVRELAY_CACHE`, else `~/.cache/kvrelay`. It may not exist yet.

    Raises NoHome.
    """
    return expanded(os.environ.get(CACHE_ENV) or "~/.cache/kvrelay")


def expanded(path: str) -> Path:
    """Return a path with `~` resolved. Raises NoHome."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise NoHome(f"cannot find {path}: this user has no home folder; set HOME or {CACHE_ENV}") from error


def unusable(folder: Path, error: OSError, *, variable: str = CACHE_ENV) -> str:
    """Return the message for a folder that this user cannot read or write, with the variable that names another one."""
    return f"cannot use {folder}: {error.strerror or error}; set {variable} to a folder that this user can write"


def default_model_dir() -> Path:
    """Return the default model's folder, fetched or not."""
    return cache_dir() / "models" / DEFAULT_MODEL_NAME


def is_checkpoint(folder: Path) -> bool:
    """Return whether `folder` looks like a Hugging Face checkpoint, or holds a GGUF file."""
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def resolve_model(model_id: str, *, local_files_only: bool) -> Path:
    """Return the folder with the files of "default", of "random:<name>", of a local folder, or of a hub id.

    A hub id is downloaded into the hub's own cache on first use, unless `local_files_only`; blocks meanwhile.
    Raises ModelNotFound, NoHome.
    """
    if model_id == DEFAULT_MODEL_ID:
        folder = default_model_dir()
        if not is_checkpoint(folder):
            raise ModelNotFound(f"the default model is not in {folder}: run `kvrelay fetch-model` once")
        return folder
    if model_id.startswith(RANDOM_PREFIX):
        return _random_checkpoint(model_id)
    folder = expanded(model_id)
    if folder.is_dir():
        if not is_checkpoint(folder):
            raise ModelNotFound(f"{folder} holds no config.json and no GGUF file: not a checkpoint")
        return folder.resolve()
    if folder.is_absolute() or model_id.startswith((".", "~")):
        raise ModelNotFound(f"there is no folder {folder}")
    return _snapshot(model_id, local_files_only=local_files_only)


def _random_checkpoint(model_id: str) -> Path:
    parent = cache_dir() / "models"
    try:
        return ensure_random_checkpoint(model_id, parent)
    except ValueError as error:
        raise ModelNotFound(str(error)) from error
    except OSError as error:
        raise ModelNotFound(f"cannot make {model_id}: {unusable(parent, error)}") from error


def _snapshot(repo_id: str, *, local_files_only: bool) -> Path:
    # Imported here: a local folder need not pay for its start-up time.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RevisionResolutionError

    try:
        path = snapshot_download(repo_id, allow_patterns=list(_SNAPSHOT_PATTERNS), local_files_only=local_files_only)
    except HFValidationError as error:
        raise ModelNotFound(f"there is no folder {Path(repo_id).absolute()}, and {repo_id!r} is no hub id") from error
    except (OSError, EntryNotFoundError, RevisionResolutionError) as error:
        where = "in the local hub cache (local_files_only is set)" if local_files_only else "on the hub"
        is_unwritable = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS)
        advice = "; set HF_HOME to a folder that this user can write" if is_unwritable else ""
        raise ModelNotFound(
            f"there is no folder {Path(repo_id).absolute()}, and no {repo_id!r} {where}: {error}{advice}"
        ) from error
    folder = Path(path)
    if not is_checkpoint(folder):
        raise ModelNotFound(f"hub model {repo_id!r} holds no config.json")
    return folder
