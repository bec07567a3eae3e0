"""serving.yaml as a whole: constraints between its sections, reading and checking.

Every problem is reported as `file:key: reason`. Nothing changes after loading.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, TypeGuard, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from common.config.cluster import PlannerConfig, TlsConfig, TracingConfig
from common.config.keys import Need, Section, needs_of
from common.config.router import ENV_PREFIX, ROUTER_PORTS, RouterConfig, SloConfig, TenantConfig
from common.config.workers import ModelConfig, PoolsConfig, TiersConfig, TransferConfig
from common.engines import engines_with, lacks
from common.ports import MAX_PORT, is_loopback
from common.process import CannotStart
from common.wire_names import TRANSPORT_NUMBERS


class ConfigError(CannotStart):
    """The configuration cannot be used; the message names file, key and reason."""


VLLM_BLOCK_SIZE = 32
"""vLLM's attention on CPUs has pages of a multiple of so many tokens."""


class ServingConfig(Section):
    """All of serving.yaml."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$"), Need.RESTART] = "kvrelay"
    """Name of the cluster, its run folder and its Ray actors. Lower-case letters, digits and dashes."""
    launcher: Annotated[Literal["ray", "local"], Need.RESTART] = "ray"
    """`ray`: supervised actors, in the Ray cluster of `RAY_ADDRESS` or in a private Ray. `local`: plain subprocesses,
    without Ray."""
    host_wait_s: Annotated[float, Field(gt=0, le=86_400), Need.NOTHING] = 900.0
    """With Ray: seconds in which a host with room for a process has to be there, or to join; then its start fails."""
    model: ModelConfig = ModelConfig()
    pools: PoolsConfig = PoolsConfig()
    transfer: TransferConfig = TransferConfig()
    tiers: TiersConfig = TiersConfig()
    router: RouterConfig = RouterConfig()
    tls: TlsConfig = TlsConfig()
    slo: SloConfig = SloConfig()
    planner: PlannerConfig = PlannerConfig()
    tracing: TracingConfig = TracingConfig()
    tenants: Annotated[tuple[TenantConfig, ...], Field(max_length=1024), Need.ROUTERS] = ()
    """Shares and limits: a list of at most 1024 [tenants](#tenants)."""

    def for_router(self, index: int) -> "ServingConfig":
        """Return the configuration of the router with that index."""
        return self.model_copy(update={"router": self.router.replica(index)})

    def for_worker(self) -> "ServingConfig":
        """Return the configuration of workers: without tenants, their keys, and the secret of their salts."""
        router = self.router.model_copy(update={"auth": "none", "salt_secret": None})
        return self.model_copy(update={"router": router, "tenants": ()})

    @property
    def secret_variables(self) -> frozenset[str]:
        """Names of the environment variables that hold secrets of the routers."""
        values = (self.router.salt_secret or "", *(key for tenant in self.tenants for key in tenant.api_keys))
        return frozenset(value.removeprefix(ENV_PREFIX) for value in values if value.startswith(ENV_PREFIX))

    @model_validator(mode="after")
    def _identities(self) -> "ServingConfig":
        names = [tenant.name for tenant in self.tenants]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tenants: {name} is listed twice")
        self._check_keys()
        if self.router.auth == "none":
            if names and (names != ["default"] or self.tenants[0].api_keys or self.tenants[0].api_key_sha256):
                raise ValueError(
                    "tenants: without router.auth: api_key the only tenant is `default`, and it has no keys"
                )
        elif not names:
            raise ValueError("router.auth: api_key, but no tenants have keys")
        for tenant in self.tenants:
            if self.router.auth == "api_key" and not (tenant.api_keys or tenant.api_key_sha256):
                raise ValueError(f"tenants: {tenant.name} has neither api_keys nor api_key_sha256")
        return self

    def _check_keys(self) -> None:
        """Raise ValueError for a key of two tenants. Routers check keys of environment variables."""
        owners: dict[str, str] = {}
        for position, tenant in enumerate(self.tenants):
            digests = [sha256(key.encode()).hexdigest() for key in tenant.api_keys if not key.startswith(ENV_PREFIX)]
            for digest in {*digests, *tenant.api_key_sha256}:
                if (owner := owners.setdefault(digest, tenant.name)) != tenant.name:
                    raise ValueError(f"tenants.{position}: a key of {tenant.name} is also one of {owner}")

    @model_validator(mode="after")
    def _plain_text(self) -> "ServingConfig":
        if self.tls.mode == "off" and not self.tls.insecure and not is_loopback(self.router.host):
            raise ValueError(
                f"tls.mode: off, but other hosts reach router.host: {self.router.host}; remove it for TLS,"
                " or set tls.insecure: true if every host on the network may read along"
            )
        return self

    @model_validator(mode="after")
    def _ports(self) -> "ServingConfig":
        named: dict[int, str] = {}
        for index, name in product(range(self.router.count), ROUTER_PORTS):
            port = getattr(self.router.replica(index), name)
            owner = f"router.{name}" if self.router.count == 1 else f"router.{name} of router-{index}"
            if port and port in named:
                raise ValueError(f"{owner}: {port} is already {named[port]}")
            if port and port > MAX_PORT:
                raise ValueError(f"{owner}: {port} is not a port")
            named[port] = owner
        return self

    @model_validator(mode="before")
    @classmethod
    def _vllm_blocks(cls, raw: object) -> object:
        """Give the pools of vLLM's engine blocks that its attention takes, where the file names none."""
        if not isinstance(raw, dict):
            return raw
        model, pools = raw.get("model"), raw.get("pools", {})
        if not (isinstance(model, dict) and model.get("engine") == "vllm" and isinstance(pools, dict)):
            return raw
        named = {name: pools.get(name, {}) for name in PoolsConfig.model_fields}
        filled = {
            name: {"block_size": VLLM_BLOCK_SIZE} | pool for name, pool in named.items() if isinstance(pool, dict)
        }
        return raw | {"pools": pools | filled}

    @model_validator(mode="after")
    def _engine(self) -> "ServingConfig":
        model, pools = self.model, {"prefill": self.pools.prefill, "decode": self.pools.decode}
        if model.vllm and model.engine != "vllm":
            raise ValueError("model.vllm: only model.engine: vllm takes vLLM's arguments; leave them out")
        asked: list[tuple[str, str, object]] = []
        if model.quantization is not None:
            asked.append(("quantization", "model.quantization", model.quantization))
        if model.kv_dtype != "auto":
            asked.append(("kv_dtype", "model.kv_dtype", model.kv_dtype))
        if model.device == "cuda":
            asked.append(("gpu", "model.device", model.device))
        if model.kernels == "compile":
            asked.append(("torch_compile", "model.kernels", model.kernels))
        if self.tiers.is_on:
            asked.append(("tiers", "tiers", "host_gib or disk_gib"))
        asked += [
            ("tensor_parallel", f"pools.{name}.tensor_parallel", pool.tensor_parallel)
            for name, pool in pools.items()
            if pool.tensor_parallel > 1
        ]
        for feature, key, value in asked:
            if lacks(model.engine, feature):
                raise ValueError(
                    f"{key}: {value}: model.engine: {model.engine} cannot do that;"
                    f" model.engine: {', '.join(engines_with(feature))} can"
                )
        for name, pool in pools.items():
            if model.engine == "vllm" and pool.block_size % VLLM_BLOCK_SIZE:
                raise ValueError(
                    f"pools.{name}.block_size: {pool.block_size}: model.engine: vllm needs a multiple of"
                    f" {VLLM_BLOCK_SIZE}"
                )
        return self

    @property
    def deals_gpus(self) -> bool:
        """Whether workers that reserve no GPU compute on one where the host has any."""
        return self.model.device != "cpu" and self.model.engine != "fake"

    @model_validator(mode="after")
    def _pairs(self) -> "ServingConfig":
        prefill, decode = self.pools.prefill, self.pools.decode
        if decode.block_size != prefill.block_size:
            raise ValueError(
                f"pools.decode.block_size: {decode.block_size} does not match"
                f" pools.prefill.block_size: {prefill.block_size}; blocks could not be handed over"
            )
        if decode.count == 0:
            raise ValueError("pools.decode.count: 0; answers need at least one decode worker")
        if not self.transfer.transports:
            raise ValueError(f"transfer.transports: empty; name at least one of {', '.join(TRANSPORT_NUMBERS)}")
        if self.model.device == "cpu" and (prefill.num_gpus or decode.num_gpus):
            raise ValueError("pools.*.num_gpus: GPUs are reserved, but model.device: cpu")
        for name, pool in (("prefill", prefill), ("decode", decode)):
            if self.model.engine != "fake" and pool.num_gpus >= 2 and pool.num_gpus > pool.tensor_parallel:
                raise ValueError(
                    f"pools.{name}.num_gpus: {pool.num_gpus:g}: a worker computes on one GPU for each of its"
                    f" pools.{name}.tensor_parallel: {pool.tensor_parallel} ranks, and the others would be idle;"
                    f" set num_gpus: {pool.tensor_parallel}"
                )
            if pool.max_running > pool.max_step_tokens:
                raise ValueError(
                    f"pools.{name}.max_running: {pool.max_running} sequences cannot each get a token"
                    f" of pools.{name}.max_step_tokens: {pool.max_step_tokens}"
                )
        return self


NEEDS = needs_of(ServingConfig())
"""Need of each key, by dotted name."""

_NAME_LINE = re.compile(r"^(name):[ \t]*[\"']?([^\s\"'#]+)", re.MULTILINE)
"""The name, in a file that is not YAML."""

# Parts that pydantic adds to the location of a key that takes one of several types.
_ALTERNATIVES = ("constrained-int", "constrained-float", "literal['auto']")


def load_config(path: Path) -> ServingConfig:
    """Read and check a serving.yaml. Raises ConfigError with one `file:key: reason` line per problem."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, error) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    return parse_config(raw if raw is not None else {}, source=str(path))


def name_in(path: Path) -> str:
    """Return the cluster's name in a serving.yaml, whatever else is wrong with it. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        raw = yaml.safe_load(text)
    except OSError as error:
        raise _unreadable(path, error) from error
    except yaml.YAMLError:
        raw = dict(_NAME_LINE.findall(text))
    named = isinstance(raw, dict) and "name" in raw
    return parse_config({"name": raw["name"]} if named else {}, source=str(path)).name


def _unreadable(path: Path, error: OSError) -> ConfigError:
    hint = "; write one (`launcher: local` in it serves the default model on this host), or name another with --config"
    is_missing = isinstance(error, FileNotFoundError)
    return ConfigError(f"{path}: cannot be read: {error.strerror}{hint if is_missing else ''}")


def parse_config(raw: object, *, source: str) -> ServingConfig:
    """Check a parsed serving.yaml. Raises ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: must be a mapping of keys to values, not a {type(raw).__name__}")
    try:
        return ServingConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(source, dict(item)) for item in error.errors())) from error


def _line(source: str, item: dict[str, object]) -> str:
    location = item["loc"]
    assert isinstance(location, tuple)
    key = ".".join(str(part) for part in location if part not in _ALTERNATIVES)
    if item["type"] == "extra_forbidden":
        name = str(location[-1])
        near = get_close_matches(name, _section_at(location[:-1]).model_fields, n=1) or [*_keys_named(name)]
        reason = f"unknown key; did you mean {' or '.join(near[:3])}?" if near else "unknown key"
    else:
        reason = str(item["msg"]).removeprefix("Value error, ")
    return f"{source}:{key}: {reason}" if key else f"{source}:{reason}"


def _keys_named(name: str, section: type[Section] | None = None, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a section, by default of the whole file, that have this last part."""
    for key, field in (section or ServingConfig).model_fields.items():
        if key == name:
            yield prefix + key
        for inner in filter(_is_section, (field.annotation, *get_args(field.annotation))):
            yield from _keys_named(name, inner, f"{prefix}{key}.")


def _section_at(location: tuple[int | str, ...]) -> type[Section]:
    """Return the section of a location, in which numbers are places in a list."""
    section: type[Section] = ServingConfig
    for part in location:
        if isinstance(part, str):
            annotation = section.model_fields[part].annotation
            section = next(each for each in (annotation, *get_args(annotation)) if _is_section(each))
    return section


def _is_section(annotation: object) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)
