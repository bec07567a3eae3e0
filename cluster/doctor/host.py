"""Checks whether this host can run the configuration."""

import os
import platform
import resource
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

from cluster.doctor.finding import DoctorFinding, failure, ok, warning
from cluster.doctor.model import check_model
from cluster.doctor.tiers import check_tiers
from common.cgroups import usable_cores
from common.config import ServingConfig
from common.engines import NIXL_VERSION, VLLM_VERSION, installed_package, vllm_version
from common.model_files import CACHE_ENV, cache_dir
from common.ports import is_loopback
from common.process import list_gpus
from engine.device.memory import measure_host

_GIB = 1 << 30
_LITTLE_DISK_GIB, _NO_DISK_GIB = 5.0, 0.5
_MIN_OPEN_FILES = 4096
VERSIONS = "versions"
"""Subject of the finding that the doctor compares between hosts."""
_INSTALL = (
    f"run `make install` in kvrelay's folder on this host; vLLM: as docs/engines.md says; NIXL: `pip install"
    f" nixl=={NIXL_VERSION}`, or remove nixl from transfer.transports"
)
_MIN_SHARED_MEMORY = 200 << 20
"""Space in /dev/shm for Ray's object store, which kvrelay keeps at its minimum, plus a margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts about a host, which tests can replace."""

    available_bytes: int
    num_cores: int
    """Cores that processes of this user may keep busy, within a container's limit."""
    free_disk: Callable[[Path], int]
    """Returns the free bytes of the file system of a folder, which need not exist."""
    can_write: Callable[[Path], bool]
    """Returns whether this user can make or write a folder."""
    max_open_files: int
    shared_memory_bytes: int
    """Free bytes in /dev/shm; 0 if it does not exist."""
    num_gpus: int
    """GPUs, or slices of these, that the driver lists."""
    compiler: str | None
    c_compiler: str | None
    """C compiler with which Triton builds its launchers."""
    has_python_headers: bool
    """Whether there is a Python.h, which these include."""
    installed: Callable[[str], str | None]
    """Returns the version of a package, None if it is not installed."""


def this_host() -> HostFacts:
    """Return the facts about this host. Runs the GPU driver's tool, which may take seconds."""
    shared = Path("/dev/shm")
    return HostFacts(
        available_bytes=measure_host().available_bytes,
        num_cores=usable_cores(),
        free_disk=lambda folder: shutil.disk_usage(_nearest(folder)).free,
        can_write=lambda folder: os.access(_nearest(folder), os.W_OK | os.X_OK),
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # every process raises its own to this
        shared_memory_bytes=shutil.disk_usage(shared).free if shared.is_dir() else 0,
        num_gpus=len(list_gpus()),
        compiler=find_compiler(),
        c_compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        has_python_headers=has_python_headers(),
        installed=installed_package,
    )


def find_compiler() -> str | None:
    """Return the C++ compiler that a worker on this host would use."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def has_python_headers() -> bool:
    """Return whether there is a Python.h where Triton looks: on Debian not beside packages installed by hand."""
    scheme = sysconfig.get_default_scheme()
    folder = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    return Path(folder, "Python.h").is_file()


def check_host(config: ServingConfig, host: HostFacts, *, is_up: bool) -> Iterator[DoctorFinding]:
    """Yield findings, without what `kvrelay up` says itself: taken ports, absent keys, pools that do not fit.

    `is_up`: the cluster of this configuration runs, and has joined its Ray.
    """
    names = {"kvrelay": host.installed("kvrelay"), "Python": platform.python_version(), "Ray": host.installed("ray")}
    yield ok(VERSIONS, ", ".join(f"{name} {version or 'none'}" for name, version in names.items()))
    yield _packages(config, host)
    yield from check_model(config)
    yield _memory(config, host, is_up=is_up)
    yield _cores(config, host)
    yield _disk("disk of the cache", cache_dir(), CACHE_ENV, host)
    yield _disk("disk of temporary files", Path(tempfile.gettempdir()), "TMPDIR", host)
    yield from check_tiers(config)
    yield _open_files(host)
    if config.model.device == "cuda" and not host.num_gpus:
        yield failure("GPUs", "the driver lists none", "install the driver, or set model.device: cpu")
    else:
        yield _gpus(config, host)
    yield check_kernels(config, host)
    yield check_doors(config)
    if config.launcher == "ray":
        yield _ray(host, is_up=is_up)


def _memory(config: ServingConfig, host: HostFacts, *, is_up: bool) -> DoctorFinding:
    free_gib = host.available_bytes / _GIB
    num_workers = config.pools.prefill.count + config.pools.decode.count
    if free_gib < 1.0:
        return warning("memory", f"only {free_gib:.1f} GiB are free", "stop other programs, or use a smaller model")
    if config.launcher == "local" and not is_up and config.tiers.host_gib * num_workers > free_gib:
        detail = f"{free_gib:.1f} GiB free for tiers of {config.tiers.host_gib:g} GiB in each of {num_workers} workers"
        return warning("memory", detail, "lower tiers.host_gib: a host without memory ends processes")
    return ok("memory", f"{free_gib:.1f} GiB free")


def _gpus(config: ServingConfig, host: HostFacts) -> DoctorFinding:
    pools = (config.pools.prefill, config.pools.decode)
    num_dealt = sum(pool.count * pool.tensor_parallel for pool in pools if not pool.num_gpus)
    if config.deals_gpus and config.launcher == "local" and 0 < host.num_gpus < num_dealt:
        detail = f"{num_dealt} workers or ranks share {host.num_gpus}, and the memory of each"
        return warning("GPUs", detail, "lower pools.*.count or pools.*.tensor_parallel to one for each GPU")
    return ok("GPUs", f"{host.num_gpus}")


def _packages(config: ServingConfig, host: HostFacts) -> DoctorFinding:
    try:
        wanted = [Requirement(text) for text in requires("kvrelay") or ()]
    except PackageNotFoundError:  # a checkout that nothing installed, as beside vLLM
        wanted = []
    extras = {"extra": "ray" if config.launcher == "ray" else ""}
    needed = [each for each in wanted if each.marker is None or each.marker.evaluate(extras)]
    if config.model.engine == "fake":
        needed = [each for each in needed if each.name not in ("torch", "transformers")]
    if "nixl" in config.transfer.transports:
        needed.append(Requirement("nixl"))
    found = {each.name: host.installed(each.name) for each in needed}
    if config.model.engine == "vllm":
        needed.append(Requirement(f"vllm=={VLLM_VERSION}"))
        found["vllm"] = vllm_version(host.installed)
    wrong = [
        f"{each.name}{each.specifier} is needed, {version or 'none'} is installed"
        for each in needed
        if (version := found[each.name]) is None or not each.specifier.contains(version, prereleases=True)
    ]
    if wrong:
        return failure("packages", "; ".join(wrong), _INSTALL)
    return ok("packages", f"{len(needed)} packages as required by {sys.executable}")


def _cores(config: ServingConfig, host: HostFacts) -> DoctorFinding:
    pools = (config.pools.prefill, config.pools.decode)
    threads = sum(pool.count * pool.num_threads(auto=1) for pool in pools)
    if config.launcher == "local" and config.model.engine != "fake" and threads > host.num_cores:
        lower = "pools.*.tensor_parallel" if any(pool.tensor_parallel > 1 for pool in pools) else "pools.*.threads"
        advice = f"lower pools.*.count or {lower}, or raise the container's limit"
        return warning("cores", f"{host.num_cores} here, the workers compute with {threads} threads", advice)
    return ok("cores", f"{host.num_cores}")


def _disk(what: str, folder: Path, variable: str, host: HostFacts) -> DoctorFinding:
    if not host.can_write(folder):
        return failure(what, f"{folder} cannot be written", f"set {variable} to a folder that this user can write")
    free_gib = host.free_disk(folder) / _GIB
    if free_gib >= _LITTLE_DISK_GIB:
        return ok(what, f"{free_gib:.0f} GiB free")
    judge = warning if free_gib >= _NO_DISK_GIB else failure
    advice = f"make room: {folder} takes models, compiled kernels, logs and Ray's sessions"
    return judge(what, f"{free_gib:.1f} GiB free", advice)


def _open_files(host: HostFacts) -> DoctorFinding:
    detail = f"at most {host.max_open_files} in one process"
    if host.max_open_files >= _MIN_OPEN_FILES:
        return ok("open files", detail)
    advice = f"each client holds one open: raise it, `ulimit -Hn {_MIN_OPEN_FILES}` or LimitNOFILE= in the unit"
    return warning("open files", detail, advice)


def _ray(host: HostFacts, *, is_up: bool) -> DoctorFinding:
    mode, address = os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_ADDRESS")
    if host.shared_memory_bytes < _MIN_SHARED_MEMORY:
        detail = f"{host.shared_memory_bytes >> 20} MiB free in /dev/shm; its object store needs 200 MiB"
        return failure("Ray", detail, "start the container with --shm-size=1g, or set launcher: local")
    if address is not None and mode != "token" and not is_up:
        advice = "any program that reaches Ray's ports can run code: set RAY_AUTH_MODE=token on every host"
        return warning("Ray", f"joins {address} with RAY_AUTH_MODE={mode}", advice)
    return ok("Ray", f"{host.installed('ray')}" + (f", at {address}" if address else ""))


def check_kernels(config: ServingConfig, host: HostFacts) -> DoctorFinding:
    """Return whether workers on this host would have the kernels that are compiled there."""
    model = config.model
    is_cpu = model.device == "cpu" or (model.device == "auto" and not host.num_gpus)
    is_compiled_by_torch = model.kernels == "compile"
    if host.num_gpus and config.deals_gpus:
        missing = ["no C compiler"] if host.c_compiler is None else []
        missing += [] if host.has_python_headers else ["no Python.h"]
        if missing:
            detail = f"{' and '.join(missing)}: Triton builds its launchers with both at a worker's start on a GPU"
            return failure("compiled kernels", detail, "install gcc and python3-dev, or set model.device: cpu")
        if not is_compiled_by_torch:
            return ok("compiled kernels", f"Triton's, compiler {host.c_compiler}")
    if not is_compiled_by_torch and (not is_cpu or model.engine != "torch" or model.kernels == "torch"):
        return ok("compiled kernels", "not needed")
    if host.compiler is None and is_compiled_by_torch:
        return failure("compiled kernels", "no C++ compiler", "install g++, or leave out model.kernels: compile")
    if host.compiler is None:
        return warning("compiled kernels", "no C++ compiler", "install g++: torch alone is several times slower")
    return ok("compiled kernels", f"compiler {host.compiler}")


def check_doors(config: ServingConfig) -> DoctorFinding:
    """Return whether other hosts reach the doors of a router without a key."""
    host = config.router.host
    if is_loopback(host):
        return ok("doors", f"{host} is for this host alone")
    if config.router.auth == "api_key":
        return ok("doors", f"clients of other hosts reach {host} with the key of a tenant")
    detail = f"router.host: {host} opens the doors to every client that reaches this host, since router.auth is none"
    return warning("doors", detail, "set router.auth: api_key and tenants, or router.host: 127.0.0.1")


def _nearest(folder: Path) -> Path:
    """Return the folder, or the innermost one around it that exists."""
    while not os.access(folder, os.F_OK):
        folder = folder.parent
    return folder
