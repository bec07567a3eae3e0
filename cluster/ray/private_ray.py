"""A Ray of this machine alone, for as long as the supervisor runs. Only holders of its random token may talk to it."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import ray

from cluster.processes.plan import ProcessSpec
from common.signals import handlers_kept

NAMESPACE = "kvrelay"
_OBJECT_STORE_BYTES = 80_000_000  # Ray's minimum is 75 MiB; nothing of ours goes through it
_PRIVATE_CPUS = 1 << 16
"""It need not ration them: what a worker may use is its thread count, and pools can grow."""


class PrivateRay:
    """A RayHome whose actors end with the driver, which is the supervisor. `ray_settings` comes before its import."""

    def __init__(self) -> None:
        self._session_dir: Path | None = None

    @property
    def description(self) -> str:
        """Where it is, for messages."""
        return "on this machine"

    def open(self) -> None:
        """Start Ray: blocks for about 3 s. Main thread only. Raises what ray.init raises."""
        with handlers_kept():
            context: Any = ray.init(
                address="local",
                namespace=NAMESPACE,
                num_cpus=_PRIVATE_CPUS,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        self._session_dir = Path(context.address_info["session_dir"])

    def found(self) -> frozenset[str]:
        """Return nothing: a Ray that was just started has no actors."""
        return frozenset()

    def options(self, spec: ProcessSpec) -> dict[str, Any]:
        """Return no more than every actor has."""
        return {}

    def served(self, name: str) -> None:
        """Nothing was asked for it."""

    def forget(self, name: str) -> None:
        """Nothing is kept for a process."""

    async def close(self) -> None:
        """Stop Ray and delete its session folder."""
        if not ray.is_initialized():
            return
        await asyncio.to_thread(ray.shutdown)
        if self._session_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self._session_dir, ignore_errors=True)
