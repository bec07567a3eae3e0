"""Starts the cluster that a benchmark measures."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from cluster import lifecycle
from common.config import ServingConfig, load_config


@contextmanager
def running_cluster(
    *, launcher: str, model: dict[str, Any] | None = None, console: Console
) -> Iterator[tuple[str, ServingConfig]]:
    """Run 1P+1D of the default model on a free port; yields address and configuration, stops everything at the end."""
    with tempfile.TemporaryDirectory() as folder:
        config_path = Path(folder) / "serving.yaml"
        pool = {"kv_memory_gib": 0.5}
        raw = {
            "name": "benchmark",
            "launcher": launcher,
            "model": model or {},
            "pools": {"prefill": pool, "decode": pool},
            "router": {"port": 0},
        }
        config_path.write_text(yaml.safe_dump(raw), encoding="utf-8")
        config = load_config(config_path)
        run_dir = Path(folder) / "run"
        info = lifecycle.up(config, config_path=config_path, run_dir=run_dir, report=console.print)
        try:
            yield info.address, config
        finally:
            lifecycle.down(run_dir, report=console.print)
