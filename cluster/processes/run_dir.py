"""The run folder of a cluster, which only its owner may read: lock, configuration files and logs."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from cluster.processes.plan import ProcessRole, ProcessSpec
from common.config import ServingConfig, load_config

FILE_NAME = "serving.yaml"
"""The resolved configuration."""


class RunDirTaken(Exception):
    """Another supervisor runs in this folder."""


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel ends with its holder. Raises RunDirTaken if another process holds it."""
    # Python opens it close-on-exec: no child keeps the lock after its holder has died.
    fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirTaken(f"another cluster runs in {run_dir}; stop it first, or use another name") from None
        yield
    finally:
        os.close(fd)


def make_run_dir(run_dir: Path) -> None:
    """Create a run folder that only its owner can read, or restrict an existing one to its owner."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    run_dir.chmod(0o700)


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically; only its owner may read it. Raises OSError."""
    scratch = path.with_suffix(".tmp")
    scratch.unlink(missing_ok=True)
    scratch.touch(mode=0o600)
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)  # noqa: PTH105 - the atomic one, by its usual name


def config_text(config: ServingConfig) -> str:
    """Return a configuration as YAML with every key."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def write_config(path: Path, config: ServingConfig) -> None:
    """Replace a configuration file atomically: processes that start meanwhile read the old or the new one."""
    write_private(path, config_text(config))


def config_file_of(spec: ProcessSpec, config_path: Path) -> Path:
    """Return the file that a process reads: the common one, or its own beside it. A worker's file holds no secrets."""
    if spec.role is ProcessRole.ROUTER:
        return config_path if spec.config is None else _write_own_config(config_path.parent, spec.config)
    config = load_config(config_path) if spec.config is None else spec.config
    return _write_own_config(config_path.parent, config.for_worker())


def _write_own_config(folder: Path, config: ServingConfig) -> Path:
    digest = hashlib.blake2b(config_text(config).encode(), digest_size=4).hexdigest()
    path = folder / f"serving-{digest}.yaml"
    if not path.exists():
        write_config(path, config)
    return path


def log_path(run_dir: Path, process_name: str) -> Path:
    """Return the log file of a process; all its lives append to it."""
    return run_dir / "logs" / f"{process_name}.log"


def log_tail(path: Path, *, offset: int = 0, num_lines: int = 15) -> str:
    """Return the last lines that were written to a log after byte `offset`; empty if there is no log."""
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            begin = offset if offset <= num_bytes else 0  # the log was rotated
            file.seek(max(begin, num_bytes - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])
