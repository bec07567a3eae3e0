"""Imports what the parts need, and the processes that they start, and says what the machine brings; measures nothing.

python -m benchmarks.cuda.preflight
"""

import importlib
import logging
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger(__name__)

_MODULES = (
    "grpc_health.v1.health",
    "grpc_reflection.v1alpha.reflection",
    "router.server",
    "prefill_worker.service",
    "decode_worker.service",
    "cluster.lifecycle",
    "cluster.worker_process.server",
    "engine.cuda.loading",
    "engine.ops.triton_kernels.ops",
    "benchmarks.cuda.arms",
    "pytest",
    "xdist",
)
_PACKAGES = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "safetensors", "pydantic")


def main() -> int:
    """Import all of it; returns 1 when something cannot be imported."""
    versions = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    print(f"Python {platform.python_version()}, {versions}", flush=True)
    failed = [module for module in _MODULES if not _can_import(module)]
    if failed:
        print(f"cannot import {', '.join(failed)}: carry matching packages (deploy/bundle --dev)", file=sys.stderr)
    return 1 if failed else 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # generated code of another version raises what it likes
        logger.exception("cannot import %s", module)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
