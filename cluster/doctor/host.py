"""Checks whether this host can run the configuration."""

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from itertools import product
from pathlib import Path

from packaging.requirements import Requirement

from cluster.doctor.finding import DoctorFinding, failure, ok, warning
from cluster.doctor.model import check_model
from common.cgroups import usable_cores
from common.config import ConfigError, PoolConfig, ServingConfig
from common.engines import NIXL_VERSION, VLLM_VERSION, installed_package, vllm_version
from common.model_files import CACHE_ENV, cache_dir
from common.ports import dial_address, is_loopback, is_port_free
from common.process import count_gpus
from engine.memory import measure_host
from router.doorkeeper import make_block_key, make_doorkeeper

_GIB = 1 << 30
_LITTLE_DISK_GIB, _NO_DISK_GIB = 5.0, 0.5
_MIN_OPEN_FILES = 4096
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
    shared_memory_bytes: int | None
    """Free bytes in /dev/shm; None if it does not exist."""
    num_gpus: int
    """GPUs that the driver lists."""
    compiler: str | None
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
        shared_memory_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
        num_gpus=count_gpus(),
        compiler=find_compiler(),
        installed=installed_package,
    )


def find_compiler() -> str | None:
    """Return the C++ compiler that a worker on this host would use."""
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def check_host(config: ServingConfig, host: HostFacts, *, is_up: bool) -> Iterator[DoctorFinding]:
    """Yield findings. `is_up`: the cluster of this configuration runs and holds its own ports."""
    yield ok("python", f"{sys.version.split()[0]} at {sys.executable}")
    yield _packages(config, host)
    if config.model.engine == "vllm":
        yield _vllm(host)
    if "nixl" in config.transfer.transports:
        yield _nixl(host)
    yield from check_model(config)
    yield _memory(config, host)
    yield _cores(config, host)
    yield from _disks(host)
    yield from _limits(config, host)
    yield _gpus(config, host)
    yield check_kernels(config, host)
    yield check_doors(config)
    if not is_up:
        yield _secrets(config)
        yield from _ports(config)
    if config.launcher == "ray":
        yield _ray(host, is_up=is_up)


def _packages(config: ServingConfig, host: HostFacts) -> DoctorFinding:
    try:
        wanted = [Requirement(text) for text in requires("kvrelay") or ()]
    except PackageNotFoundError:  # a checkout that nothing installed, as beside vLLM
        return ok("packages", "kvrelay runs from its folder, and names no packages to look for")
    extras = {"extra": "ray"} if config.launcher == "ray" else {"extra": ""}
    needed = [each for each in wanted if each.marker is None or each.marker.evaluate(extras)]
    if config.model.engine == "fake":
        needed = [each for each in needed if each.name not in ("torch", "transformers")]
    wrong = []
    for each in needed:
        found = host.installed(each.name)
        if found is None:
            wrong.append(f"{each.name} is not installed")
        elif not each.specifier.contains(found, prereleases=True):
            wrong.append(f"{each.name} is {found}, needed is {each.specifier}")
    if wrong:
        return failure("packages", "; ".join(wrong), "run `make install` in kvrelay's folder on this host")
    return ok("packages", f"kvrelay {host.installed('kvrelay')}, {len(needed)} packages as required")


def _vllm(host: HostFacts) -> DoctorFinding:
    found = vllm_version(host.installed)
    if found != VLLM_VERSION:
        detail = f"vLLM {VLLM_VERSION} is needed, " + (
            "none is installed" if found is None else f"{found} is installed"
        )
        return failure("vLLM", detail, "make an environment as docs/engines.md says, and run kvrelay in it")
    return ok("vLLM", found)


def _nixl(host: HostFacts) -> DoctorFinding:
    found = host.installed("nixl")
    if found is None:
        advice = f"`pip install nixl=={NIXL_VERSION}`, or remove nixl from transfer.transports"
        return failure("NIXL", "transfer.transports names nixl, which is not installed", advice)
    if found != NIXL_VERSION:
        return warning("NIXL", f"{found}; tests run with {NIXL_VERSION}", f"`pip install nixl=={NIXL_VERSION}`")
    return ok("NIXL", found)


def _memory(config: ServingConfig, host: HostFacts) -> DoctorFinding:
    pages = sum(_page_gib(pool) for pool in (config.pools.prefill, config.pools.decode))
    free = host.available_bytes / _GIB
    if config.launcher == "local" and config.model.device == "cpu" and pages > free:
        return failure(
            "memory",
            f"{free:.1f} GiB are free, the pools' KV pages alone take {pages:.1f} GiB",
            "lower pools.*.kv_memory_gib or pools.*.count, or leave kv_memory_gib: auto",
        )
    if free < 1.0:
        return warning("memory", f"only {free:.1f} GiB are free", "stop other programs, or use a smaller model")
    return ok("memory", f"{free:.1f} GiB free")


def _page_gib(pool: PoolConfig) -> float:
    return 0.0 if pool.kv_memory_gib == "auto" or pool.num_blocks is not None else pool.count * pool.kv_memory_gib


def _cores(config: ServingConfig, host: HostFacts) -> DoctorFinding:
    pools = (config.pools.prefill, config.pools.decode)
    threads = sum(pool.count * (1 if pool.threads == "auto" else pool.threads) for pool in pools)
    if config.launcher == "local" and config.model.engine != "fake" and threads > host.num_cores:
        advice = "lower pools.*.count or pools.*.threads, or raise the container's limit"
        return warning("cores", f"{host.num_cores} here, the workers compute with {threads} threads", advice)
    return ok("cores", f"{host.num_cores}")


def _disks(host: HostFacts) -> Iterator[DoctorFinding]:
    for what, folder, variable in (
        ("disk of the cache", cache_dir(), CACHE_ENV),
        ("disk of temporary files", Path(tempfile.gettempdir()), "TMPDIR"),
    ):
        if not host.can_write(folder):
            yield failure(what, f"{folder} cannot be written", f"set {variable} to a folder that this user can write")
            continue
        free = host.free_disk(folder) / _GIB
        advice = f"make room: {folder} takes models, compiled kernels, logs and Ray's sessions"
        if free < _NO_DISK_GIB:
            yield failure(what, f"{free:.1f} GiB free", advice)
        elif free < _LITTLE_DISK_GIB:
            yield warning(what, f"{free:.1f} GiB free", advice)
        else:
            yield ok(what, f"{free:.0f} GiB free")


def _limits(config: ServingConfig, host: HostFacts) -> Iterator[DoctorFinding]:
    if host.max_open_files < _MIN_OPEN_FILES:
        yield warning(
            "open files",
            f"at most {host.max_open_files} in one process",
            f"each client holds one open: raise it, `ulimit -Hn {_MIN_OPEN_FILES}` or LimitNOFILE= in the unit",
        )
    else:
        yield ok("open files", f"at most {host.max_open_files} in one process")
    if config.launcher == "ray" and (host.shared_memory_bytes or 0) < _MIN_SHARED_MEMORY:
        yield failure(
            "shared memory",
            f"{(host.shared_memory_bytes or 0) >> 20} MiB free in /dev/shm",
            "Ray's object store needs 200 MiB there: start the container with --shm-size=1g, or set launcher: local",
        )


def _gpus(config: ServingConfig, host: HostFacts) -> DoctorFinding:
    pools = config.pools
    wanted = pools.prefill.count * pools.prefill.num_gpus + pools.decode.count * pools.decode.num_gpus
    if config.model.device == "cuda" and not host.num_gpus:
        return failure("GPUs", "the driver lists none", "install the driver, or set model.device: cpu")
    if config.launcher == "local" and wanted > host.num_gpus:
        return failure(
            "GPUs", f"{host.num_gpus} here, the pools want {wanted:g}", "lower pools.*.count or pools.*.num_gpus"
        )
    return ok("GPUs", f"{host.num_gpus}")


def check_kernels(config: ServingConfig, host: HostFacts) -> DoctorFinding:
    """Return whether workers on this host would have the kernels that are compiled there."""
    model = config.model
    is_cpu = model.device == "cpu" or (model.device == "auto" and not host.num_gpus)
    is_compiled_by_torch = model.kernels == "compile"
    if not is_compiled_by_torch and (not is_cpu or model.engine != "torch" or model.kernels == "torch"):
        return ok("compiled kernels", "not needed")
    if host.compiler is None and is_compiled_by_torch:
        return failure("compiled kernels", "no C++ compiler", "install g++, or leave out model.kernels: compile")
    if host.compiler is None:
        return warning("compiled kernels", "no C++ compiler", "install g++: torch alone is several times slower")
    return ok("compiled kernels", f"compiler {host.compiler}")


def _secrets(config: ServingConfig) -> DoctorFinding:
    """Return whether routers that start with this environment would have their keys."""
    try:
        make_doorkeeper(config)
        make_block_key(config, b"")
    except ConfigError as error:
        advice = "export the variable where `kvrelay up` runs, or correct the key"
        return failure("secrets", f"{error.key}: {error}", advice)
    return ok("secrets", f"{len(config.secret_variables)} of serving.yaml in environment variables")


def _ports(config: ServingConfig) -> Iterator[DoctorFinding]:
    router = config.router
    for index, name in product(range(router.count), ("port", "http_port")):
        key, port = f"router.{name}", getattr(router.replica(index), name)
        if not port:
            continue
        at = dial_address(router.host, port)
        try:
            is_free = is_port_free(router.host, port)
        except OSError as error:
            yield failure(key, f"{router.host} is not an address of this host: {error.strerror}", "correct router.host")
            return
        if is_free:
            yield ok(key, f"{at} is free")
        else:
            yield failure(key, f"{at} is taken by another program", f"stop it, or set {key}: 0 for a free port")


def check_doors(config: ServingConfig) -> DoctorFinding:
    """Return whether other hosts reach the doors of a router without a key."""
    host = config.router.host
    if is_loopback(host):
        return ok("doors", f"{host} is for this host alone")
    if config.router.auth == "api_key":
        return ok("doors", f"clients of other hosts reach {host} with the key of a tenant")
    detail = f"router.host: {host} opens the doors to every client that reaches this host, since router.auth is none"
    return warning("doors", detail, "set router.auth: api_key and tenants, or router.host: 127.0.0.1")


def _ray(host: HostFacts, *, is_up: bool) -> DoctorFinding:
    mode = os.environ.get("RAY_AUTH_MODE")
    address = os.environ.get("RAY_ADDRESS")
    if is_up:
        return ok("Ray", f"{host.installed('ray')}, in use")
    if address is None:
        return ok("Ray", f"{host.installed('ray')}; no RAY_ADDRESS, so `kvrelay up` starts a private one")
    if mode != "token":
        return warning(
            "Ray",
            f"{host.installed('ray')}, joins {address} with RAY_AUTH_MODE={mode}",
            "any program that reaches Ray's ports can run code: set RAY_AUTH_MODE=token on every host",
        )
    return ok("Ray", f"{host.installed('ray')}, joins {address} with a token")


def _nearest(folder: Path) -> Path:
    """Return the folder, or the innermost one around it that exists."""
    while not os.access(folder, os.F_OK):
        folder = folder.parent
    return folder
