"""Imports what the parts need, and the processes that they start, and says what the machine brings; measures nothing.

python -m benchmarks.cuda.preflight [--device cuda] [--out DIR] [--smoke]
"""

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version

from benchmarks.cuda import checks
from benchmarks.cuda.part import Part, part_parser, run_part
from benchmarks.cuda.report import Reading

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
    *checks.PLUGINS,
)
_PACKAGES = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "safetensors", "pydantic")


def measure(part: Part) -> None:
    """Import all of it, each as a case."""
    print(f"  {', '.join(f'{name} {_version(name)}' for name in _PACKAGES)}", flush=True)
    num_imported = 0
    for module in _MODULES:
        with part.case(f"import {module}: carry matching packages (deploy/bundle --dev)"):
            importlib.import_module(module)
            num_imported += 1
    part.add(Reading(case="imports", value=num_imported, unit=f"of {len(_MODULES)} modules"))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def main(argv: list[str] | None = None) -> int:
    """Import; returns the exit status."""
    return run_part("preflight", "Packages", part_parser("preflight", __doc__).parse_args(argv), measure)


if __name__ == "__main__":
    sys.exit(main())
