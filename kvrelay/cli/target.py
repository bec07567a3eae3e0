"""Which cluster a command means: the file names it, its run folder tells where it is."""

from pathlib import Path

from kvrelay.cli.options import DEFAULT_CONFIG

_DEFAULT_NAME = "kvrelay"


def run_dir_of(config_path: Path) -> Path:
    """Return the run folder of the cluster that `config_path` describes. Raises ConfigError.

    Without a file at the default place it is the folder of the default name: `status` works from any directory.
    """
    from cluster.lifecycle import default_run_dir

    if config_path == DEFAULT_CONFIG and not config_path.exists():
        return default_run_dir(_DEFAULT_NAME)
    from common.config import load_config

    return default_run_dir(load_config(config_path).name)


def find_address(address: str | None, config_path: Path) -> str:
    """Return the address given, else that of the running cluster, else the default. Raises ConfigError."""
    from kvrelay.client import DEFAULT_ADDRESS

    if address is not None:
        return address
    from cluster.lifecycle import read_info

    info = read_info(run_dir_of(config_path))
    return info.address if info is not None else DEFAULT_ADDRESS
