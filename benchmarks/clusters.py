"""Starts the cluster that a benchmark measures."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from cluster import lifecycle
from cluster.lifecycle import ClusterInfo
from common.config import ServingConfig, load_config
from common.signals import sigterm_interrupts

ONE_THREAD_EACH: dict[str, dict[str, Any]] = {name: {"threads": 1} for name in ("prefill", "decode")}
"""Pools whose workers have one CPU thread each."""


@contextmanager
def running_doors(
    *,
    launcher: str,
    console: Console,
    model: dict[str, Any] | None = None,
    pools: dict[str, dict[str, Any]] | None = None,
    router: dict[str, Any] | None = None,
    tenants: list[dict[str, Any]] | None = None,
    **sections: dict[str, Any],
) -> Iterator[tuple[ClusterInfo, ServingConfig]]:
    """Run a cluster on free ports until the block ends or SIGTERM comes; yields its doors and its configuration.

    1P+1D of the default model; `pools` (by name), `router`, `tenants` and further `sections` add to serving.yaml.
    """
    with tempfile.TemporaryDirectory() as folder:
        config_path = Path(folder) / "serving.yaml"
        pool = {"kv_memory_gib": 0.5}
        named = pools or {}
        raw: dict[str, Any] = {
            "name": "benchmark",
            "launcher": launcher,
            "model": model or {},
            "pools": {name: pool | named.get(name, {}) for name in ("prefill", "decode")},
            "router": {"port": 0, **(router or {})},
            "tenants": tenants or [],
            **sections,
        }
        config_path.write_text(yaml.safe_dump(raw), encoding="utf-8")
        config = load_config(config_path)
        running = lifecycle.running_cluster(
            config, config_path=config_path, run_dir=Path(folder) / "run", report=console.print
        )
        with sigterm_interrupts(), running as info:
            yield info, config
