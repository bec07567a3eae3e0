"""A configuration as the processes of a cluster read it: a file in the run folder, for its owner's eyes only."""

import hashlib
import os
from pathlib import Path

import yaml

from common.config import ServingConfig

FILE_NAME = "serving.yaml"


def config_text(config: ServingConfig) -> str:
    """Return a configuration as YAML, every key in it."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def write_config(path: Path, config: ServingConfig) -> None:
    """Replace a file, atomically: whoever starts meanwhile reads the one or the other. It may hold API keys."""
    scratch = path.with_suffix(".tmp")
    scratch.unlink(missing_ok=True)
    scratch.touch(mode=0o600)
    scratch.write_text(config_text(config), encoding="utf-8")
    os.replace(scratch, path)  # noqa: PTH105 - the atomic one, by its usual name


def write_own_config(folder: Path, config: ServingConfig) -> Path:
    """Write the configuration of some processes beside everybody's, unless it is there; returns where."""
    digest = hashlib.blake2b(config_text(config).encode(), digest_size=4).hexdigest()
    path = folder / f"serving-{digest}.yaml"
    if not path.exists():
        write_config(path, config)
    return path
