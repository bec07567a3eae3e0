"""Compiles the kernels once per processor, compiler and source, into the cache folder.

A compiler is optional. A failure costs speed, never a start: the caller gets a reason instead of a path. A library is
code, so one that another user may have changed is not loaded, nor one that a crash has cut; both are compiled again.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.model_files import cache_dir
from common.own_files import is_own, own_folder, publish

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
# Hidden: libraries of several processors in one process, as in tests, would share the buffers of their threads.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-fvisibility=hidden")
_COMPILE_TIMEOUT_S = 180
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBuilt:
    """Reason why there are no compiled kernels."""

    reason: str


def build_kernels(folder: Path | None = None) -> Path | NotBuilt:
    """Return the shared library, compiling it into `folder` (default: the cache folder) if it is missing.

    Takes some seconds the first time. When several processes call it at once, one compiles and the others wait.
    """
    try:
        compiler = find_compiler()
        if isinstance(compiler, NotBuilt):
            return compiler
        folder = own_folder(folder or cache_dir() / "kernels")
        name = f"kvrelay-{_key(compiler)}"
        # It appears whole: a reader needs neither the lock nor a writable folder.
        return _find(folder, name) or _compile_once(compiler, folder, name)
    except subprocess.CalledProcessError as error:
        return NotBuilt(reason=f"{error.cmd[0]} failed: {_complaint(error)}")
    # ValueError: $CXXFLAGS has an open quote; RuntimeError: this user has no home.
    except (OSError, subprocess.TimeoutExpired, ValueError, RuntimeError) as error:
        return NotBuilt(reason=f"cannot compile the kernels: {error}")


def find_compiler() -> list[str] | NotBuilt:
    """Return the command of the C++ compiler: $CXX, else the first that is installed."""
    chosen = os.environ.get("CXX")
    if chosen is None:
        found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
        return [found] if found else NotBuilt(reason="no C++ compiler (c++, g++ or clang++, or $CXX) is installed")
    try:
        command = shlex.split(chosen)
    except ValueError as error:
        return NotBuilt(reason=f"$CXX cannot be read: {error}")
    if not command:
        return NotBuilt(reason="no C++ compiler is used: $CXX is empty")
    return command if shutil.which(command[0]) else NotBuilt(reason=f"$CXX names {command[0]}, which is not installed")


def _flags() -> tuple[str, ...]:
    """Return our flags, then those of $CXXFLAGS, which may overrule them."""
    return (*_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")))


def _key(compiler: list[str]) -> str:
    """Return a key for all that the compiled code depends on."""
    digest = hashlib.sha256(_run([*compiler, "--version"]).encode())
    digest.update(" ".join((*compiler, *_flags(), platform.machine(), _cpu_flags())).encode())
    for source in sorted(_SOURCES.glob("*.h")) + sorted(_SOURCES.glob("*.cpp")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _find(folder: Path, name: str) -> Path | None:
    """Return the library of a name: NAME-DIGEST.so, whose content has this digest and no other user could write."""
    for library in folder.glob(f"{name}-*.so"):
        if is_own(library) and library.stem == f"{name}-{_digest(library)}":
            return library
    return None


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:24]


def _compile_once(compiler: list[str], folder: Path, name: str) -> Path:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := _find(folder, name):
            return found  # another process was first
        logger.info("compiling the CPU kernels for this processor, once; it takes some seconds")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / name
            _run([*compiler, *_flags(), str(_SOURCES / "kernels.cpp"), "-o", str(built)])
            built.chmod(0o755)
            library = folder / f"{name}-{_digest(built)}.so"
            publish(built, library)
        return library


def _run(command: list[str]) -> str:
    """Return the standard output of a command."""
    return subprocess.run(
        command, capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S, encoding="utf-8", errors="replace"
    ).stdout


def _complaint(error: subprocess.CalledProcessError) -> str:
    """Return the line with the error: before an error in a header, compilers list the files that include it."""
    lines: list[str] = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
    return next((line for line in lines if "error:" in line), lines[0])
