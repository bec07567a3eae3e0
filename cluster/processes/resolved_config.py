"""A configuration as the processes of a cluster read it: a file in the run folder, for its owner's eyes only."""

import hashlib
import os
from pathlib import Path

import yaml

from cluster.processes.plan import ProcessRole, ProcessSpec
from common.config import ServingConfig, load_config

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


def make_run_dir(run_dir: Path) -> None:
    """Make a run folder that its owner alone can look into, or close one that is there."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    run_dir.chmod(0o700)


def config_file_of(spec: ProcessSpec, config_path: Path) -> Path:
    """Return the file that a process is to read: everybody's or, beside it, its own. A worker's holds no secrets."""
    if spec.role is not ProcessRole.ROUTER:
        config = load_config(config_path) if spec.config is None else spec.config
        return write_own_config(config_path.parent, config.for_worker())
    return config_path if spec.config is None else write_own_config(config_path.parent, spec.config)


def write_own_config(folder: Path, config: ServingConfig) -> Path:
    """Write the configuration of some processes beside everybody's, unless it is there; returns where."""
    digest = hashlib.blake2b(config_text(config).encode(), digest_size=4).hexdigest()
    path = folder / f"serving-{digest}.yaml"
    if not path.exists():
        write_config(path, config)
    return path
