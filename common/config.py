"""serving.yaml: the one configuration file, typed and checked at start.

Every problem is reported as `file:key: reason`. Nothing changes after loading.
"""

from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from common.ports import MAX_PORT, is_loopback
from common.trust.identity import INTERNAL_SUFFIX
from common.wire_names import TRANSPORT_NUMBERS

Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
ROUTER_PORTS = ("port", "http_port", "metrics_port", "admin_port")
DnsName = Annotated[str, Field(pattern=r"^(\*\.)?[A-Za-z0-9_:.-]{1,253}$")]
"""Or an address."""
_MAX_TLS_NAME_CHARS = 1400
"""With those of a host itself they have to fit into a certificate (`authority.MAX_NAME_BYTES`)."""


def _on_or_off(value: object) -> object:
    """Return the words that YAML takes for booleans as words."""
    return ("on" if value else "off") if isinstance(value, bool) else value


def _known_transport(name: str) -> str:
    if name not in TRANSPORT_NUMBERS:
        raise ValueError(f"{name!r} is no transport; known are {', '.join(TRANSPORT_NUMBERS)}")
    return name


class ConfigError(Exception):
    """The configuration cannot be used; the message names file, key and reason."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Section):
    """What is served."""

    id: str = "default"
    """A Hugging Face folder, a hub id, "default" (SmolLM2-135M-Instruct from the package registry), or "random:" and a
    name of `common.random_models`."""
    engine: Literal["torch", "fake"] = "torch"
    """"fake" computes a hash instead of a model: for tests of everything around it."""
    fake_step_ms: Annotated[float, Field(ge=0)] = 0.0
    """How long a step of the fake engine takes."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    quantization: Literal["fp8", "int8"] | None = None
    """8-bit weights: fp8 on Hopper GPUs, int8 anywhere. They change the answers a little; benchmarks/README.md."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """fp8: half the KV memory and traffic, on Hopper GPUs."""
    kernels: Literal["auto", "torch"] = "auto"
    """torch: plain torch on the CPU, also where kernels could be compiled."""
    local_files_only: bool = False
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt plus answer; default: the checkpoint's own."""


class PoolConfig(_Section):
    """One pool of equal workers."""

    count: Annotated[int, Field(ge=0, le=1024)] = 1
    block_size: Annotated[int, Field(ge=1, le=512)] = 16
    kv_memory_gib: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Memory for KV pages of one worker; the number of pages follows and is logged. auto: from the free memory."""
    num_blocks: Annotated[int, Field(ge=2)] | None = None
    """Number of pages, instead of `kv_memory_gib`."""
    max_step_tokens: Annotated[int, Field(ge=1)] = 512
    """Token budget of one engine step: decode tokens first, prefill chunks with the rest."""
    max_running: Annotated[int, Field(ge=1)] = 64
    """Sequences in one step."""
    max_waiting: Annotated[int, Field(ge=1)] = 256
    """Sequences accepted beyond that; more are refused."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """CPU threads per worker; auto: the machine's cores shared among the workers on it."""
    drain_grace_s: Annotated[float, Field(ge=0)] = 30.0
    """A worker that is told to end (SIGTERM) may take this long to give away what runs on it."""
    metrics: bool = True
    """Serve Prometheus metrics on a free port of each worker."""
    ports: Annotated[str, Field(pattern=r"^\d{1,5}-\d{1,5}$")] | None = None
    """`first-last`: where its workers and their metrics listen, each on the first that is free on its host."""
    num_cpus: Annotated[float, Field(ge=0)] = 1
    """Ray CPUs to reserve per worker."""
    num_gpus: Annotated[float, Field(ge=0)] = 0
    """Ray GPUs to reserve per worker."""
    placement: Literal["spread", "pack"] = "pack"
    """In a Ray cluster: one worker a host as far as hosts go, or hosts filled one after the other."""

    @property
    def port_range(self) -> range:
        """Ports to try, in order; only 0, which picks any free one, where none are named."""
        if self.ports is None:
            return range(1)
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)

    @model_validator(mode="after")
    def _ports_exist(self) -> "PoolConfig":
        if self.ports is not None and not 1024 <= self.port_range.start < self.port_range.stop <= 65536:
            raise ValueError(f"ports: {self.ports} is no range of ports from 1024 to 65535")
        return self


class PoolsConfig(_Section):
    """The two pools."""

    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()

    @property
    def flip_obstacle(self) -> str | None:
        """Why no worker can change its pool: the keys in which a worker of one is another thing than one of the other.

        Pages are not among them: a worker keeps those that it was born with.
        """
        for key in ("num_gpus", "num_cpus", "threads"):
            mine, theirs = getattr(self.prefill, key), getattr(self.decode, key)
            if mine != theirs:
                return f"pools.prefill.{key} is {mine}, pools.decode.{key} is {theirs}"
        return None


class TlsConfig(_Section):
    """Encryption of the cluster's connections; docs/security.md."""

    mode: Annotated[Literal["auto", "on", "off", "files"], BeforeValidator(_on_or_off)] = "auto"
    """auto: TLS, with certificates that the cluster issues, as soon as any address is reachable from another host; on:
    always; off: never, which needs `insecure` where other hosts reach an address; files: like on, but doors show the
    certificate of `certificate` and `key`."""
    insecure: bool = False
    """With off: serve other hosts without TLS all the same; prompts, answers and API keys can be read on the way."""
    certificate: Path | None = None
    """With files: certificate chain of the doors in PEM, on every host; read again when it changes."""
    key: Path | None = None
    """With files: its private key."""
    names: Annotated[tuple[DnsName, ...], Field(max_length=32)] = ()
    """Further DNS names and addresses of the routers' doors for the certificates that the cluster issues, such as that
    of a load balancer."""
    lifetime_s: Annotated[float, Field(ge=5, le=30 * 86_400)] = 86_400.0
    """How long a process's certificate lasts; it is renewed at two thirds of it."""

    @model_validator(mode="after")
    def _files(self) -> "TlsConfig":
        is_named = self.certificate is not None and self.key is not None
        if (self.mode == "files") is not is_named or (self.certificate is None) is not (self.key is None):
            raise ValueError("certificate and key go with mode: files, and both are needed then")
        if self.insecure and self.mode != "off":
            raise ValueError("insecure goes with mode: off")
        for name in self.names:
            if name.lower().rstrip(".").endswith(INTERNAL_SUFFIX):
                raise ValueError(f"names: {name} is a name of processes inside the cluster; leave it out")
        if (num_chars := sum(map(len, self.names))) > _MAX_TLS_NAME_CHARS:
            raise ValueError(f"names: {num_chars} characters together; at most {_MAX_TLS_NAME_CHARS} fit a certificate")
        return self


class TransferConfig(_Section):
    """How KV moves."""

    transports: tuple[Annotated[str, AfterValidator(_known_transport)], ...] = ("cuda_ipc", "shm", "grpc")
    """Tried in this order; cuda_ipc only between processes on one card, shm only between those of one host."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=1 << 20)] = 1 << 20
    lease_ttl_s: Annotated[float, Field(gt=0)] = 10.0
    """A handoff without a puller is dropped after this long; the net under crashes."""


ENV_PREFIX = "env:"
"""Before the name of an environment variable, in the place of a secret."""


class RouterConfig(_Section):
    """The front door."""

    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Routers, each a front door of its own to the same workers: the i-th on the named ports plus i."""
    host: str = "127.0.0.1"
    port: Port = 50051
    http_port: Port | None = 0
    """Port of the OpenAI-compatible HTTP door; 0 picks a free one, null turns it off."""
    max_http_connections: Annotated[int, Field(ge=16)] | None = None
    """Connections of the HTTP door; null: as many as open files allow. Beyond it those go that are silent longest."""
    metrics_port: Port | None = 0
    """Prometheus port; 0 picks a free one, null turns it off."""
    admin_port: Port = 0
    """Where the controller calls this router, and nobody else may; 0 picks a free one."""
    policy: Literal[
        "predictive",
        "random",
        "round_robin",
        "power_of_two",
        "least_load",
        "longest_prefix",
        "sglang_cache_aware",
        "sglang_cache_aware_events",
        "dynamo",
        "dynamo_lmetric",
        "llm_d",
        "ray_prefix",
        "aibrix",
        "mooncake",
        "oracle",
    ] = "predictive"
    local_prefill_max_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """A prompt with at most this many uncached tokens on the decode worker may be prefilled there. auto: any prompt for
    which that costs less (policy predictive), at most 32 tokens under the other policies."""
    max_prefill_wait_s: Annotated[float, Field(gt=0)] = 0.1
    """A prompt that would wait longer than this at every worker waits in the router's line instead, where the most
    urgent goes first (policy predictive). Short enough to choose late, long enough that no worker runs dry."""
    max_queued: Annotated[int, Field(ge=1)] = 512
    """Requests that wait for a plan; more are refused."""
    auth: Literal["none", "api_key"] = "none"
    """api_key: requests carry `authorization: Bearer <key>`, which tells the tenant; none: everybody is `default`."""
    salt_secret: Annotated[str, Field(min_length=16)] | None = None
    """What cache salts and the block key are derived from; equal on all routers. `env:NAME` reads the environment."""
    shed: Literal["none", "deadline", "slo"] = "deadline"
    """deadline: refuse at once what cannot bring its first token before the caller's deadline on any worker; slo: also
    what cannot meet its objective for the time to first token."""
    queue_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for a plan."""
    recovery_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest wait for a worker to come back before a request that lost its own is failed."""
    max_attempts: Annotated[int, Field(ge=1)] = 6
    """Plans per request, the first one included."""
    default_max_tokens: Annotated[int, Field(ge=1)] = 256
    max_message_mib: Annotated[int, Field(ge=1, le=64)] = 4
    token_cache_mib: Annotated[int, Field(ge=0)] = 64
    """Most memory for the tokens of conversations' earlier turns; 0 keeps none."""
    index_memory_mib: Annotated[int, Field(ge=1)] = 1024
    """Most memory for the prefix index: 4.5 million different blocks in 1024 MiB. Beyond it the blocks are forgotten
    that were used longest ago."""

    def replica(self, index: int) -> "RouterConfig":
        """Return what the router of that number runs with: named ports plus its number; free ones stay free ones."""
        ports = {name: port + index for name in ROUTER_PORTS if (port := getattr(self, name))}
        return self.model_copy(update=ports)


class TenantConfig(_Section):
    """Whose requests get which share; what is left out is not limited."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    api_keys: tuple[str, ...] = ()
    """`env:NAME` reads an environment variable of the router, so that the file holds no secret."""
    api_key_sha256: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = ()
    """The same as hexadecimal SHA-256 digests."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Share of the cluster's work, in tokens, relative to the other tenants that wait."""
    max_queued: Annotated[int, Field(ge=1)] | None = None
    """Requests that wait for a plan; more are refused."""
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Requests with a plan; more wait."""
    requests_per_min: Annotated[float, Field(gt=0)] | None = None
    tokens_per_min: Annotated[float, Field(gt=0)] | None = None
    """Prompt and output, cached tokens included."""
    max_priority: Annotated[int, Field(ge=0, le=1000)] = 0
    """Largest priority that its requests may claim; larger claims get this."""
    operator: bool = False
    """Its keys may ask for the status of the whole cluster."""
    share_cache: bool = False
    """Share cached prefixes with the other tenants that say so; otherwise with nobody."""


class SloConfig(_Section):
    """What users were promised; reported beside what was measured."""

    ttft_s: Annotated[float, Field(gt=0)] = 2.0
    ttft_tokens: Annotated[int, Field(ge=1)] = 8192
    """Prompts of more tokens than this may take proportionally longer to the first token."""
    itl_s: Annotated[float, Field(gt=0)] = 0.2


class PlannerConfig(_Section):
    """Pools that follow their load."""

    mode: Annotated[Literal["off", "advise", "act"], BeforeValidator(_on_or_off)] = "off"
    """advise: plans are made and told (`kvrelay plan`), nothing is changed; act: they are carried out."""
    interval_s: Annotated[float, Field(ge=0.1, le=3600)] = 10.0
    """From plan to plan."""
    window_s: Annotated[float, Field(ge=1, le=120)] = 10.0
    """How far back each plan looks for what came; trends are seen over many of them."""
    attainment: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of the requests that are to meet both objectives of `slo`, of those that could on an idle cluster."""
    min_prefill: Annotated[int, Field(ge=1, le=1024)] = 1
    max_prefill: Annotated[int, Field(ge=1, le=1024)] = 16
    min_decode: Annotated[int, Field(ge=1, le=1024)] = 1
    max_decode: Annotated[int, Field(ge=1, le=1024)] = 16
    max_workers: Annotated[int, Field(ge=2, le=2048)] = 32
    """In both pools together; when that is too few, they are split so that the most requests are carried."""
    max_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.85
    """Of a prefill worker's time."""
    stable_s: Annotated[float, Field(ge=0)] = 60.0
    """For how long fewer workers must have been enough before a pool shrinks; at least what start and drain take."""
    cooldown_s: Annotated[float, Field(ge=0)] = 30.0
    """Without any change before a pool shrinks."""
    grace_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """How long a worker that goes may take to give its requests away."""
    metrics_port: Port | None = None
    """Prometheus port of present and wanted sizes, on `router.host`; 0 picks a free one, null turns it off."""

    @model_validator(mode="after")
    def _limits(self) -> "PlannerConfig":
        for pool in ("prefill", "decode"):
            least, most = getattr(self, f"min_{pool}"), getattr(self, f"max_{pool}")
            if least > most:
                raise ValueError(f"min_{pool}: {least} is more than max_{pool}: {most}")
        if self.min_prefill + self.min_decode > self.max_workers:
            raise ValueError(f"max_workers: {self.max_workers} is less than min_prefill and min_decode together")
        return self


class ServingConfig(_Section):
    """All of serving.yaml."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = "kvrelay"
    launcher: Literal["ray", "local"] = "ray"
    model: ModelConfig = ModelConfig()
    pools: PoolsConfig = PoolsConfig()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    tls: TlsConfig = TlsConfig()
    slo: SloConfig = SloConfig()
    planner: PlannerConfig = PlannerConfig()
    tenants: Annotated[tuple[TenantConfig, ...], Field(max_length=1024)] = ()

    def for_router(self, index: int) -> "ServingConfig":
        """Return what the router of that number runs with."""
        return self.model_copy(update={"router": self.router.replica(index)})

    def for_worker(self) -> "ServingConfig":
        """Return what workers run with: without tenants, their keys, and what salts are made of."""
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
                raise ValueError(f"tenants: {name} comes twice")
        if self.router.auth == "none":
            if names and (names != ["default"] or self.tenants[0].api_keys or self.tenants[0].api_key_sha256):
                raise ValueError("tenants: without router.auth: api_key there is only `default`, and it has no keys")
        elif not names:
            raise ValueError("router.auth: api_key, but no tenants have keys")
        for tenant in self.tenants:
            if self.router.auth == "api_key" and not (tenant.api_keys or tenant.api_key_sha256):
                raise ValueError(f"tenants: {tenant.name} has neither api_keys nor api_key_sha256")
        return self

    @model_validator(mode="after")
    def _plain_text(self) -> "ServingConfig":
        if self.tls.mode == "off" and not self.tls.insecure and not is_loopback(self.router.host):
            raise ValueError(
                f"tls.mode: off, but other hosts reach router.host: {self.router.host}; take it out for TLS,"
                " or set tls.insecure: true if everybody on the network may read along"
            )
        return self

    @model_validator(mode="after")
    def _ports(self) -> "ServingConfig":
        named: dict[int, str] = {}
        for index, name in product(range(self.router.count), ROUTER_PORTS):
            port = getattr(self.router.replica(index), name)
            owner = f"router.{name}" if self.router.count == 1 else f"router.{name} of router-{index}"
            if port and port in named:
                raise ValueError(f"{owner}: {port} is {named[port]} already")
            if port and port > MAX_PORT:
                raise ValueError(f"{owner}: {port} is no port")
            named[port] = owner
        return self

    @model_validator(mode="after")
    def _pairs(self) -> "ServingConfig":
        prefill, decode = self.pools.prefill, self.pools.decode
        if decode.block_size != prefill.block_size:
            raise ValueError(
                f"pools.decode.block_size: {decode.block_size} does not match"
                f" pools.prefill.block_size: {prefill.block_size}; blocks could not be handed over"
            )
        if decode.count == 0:
            raise ValueError("pools.decode.count: 0; somebody has to write the answers")
        if not self.transfer.transports:
            raise ValueError(f"transfer.transports: empty; name at least one of {', '.join(TRANSPORT_NUMBERS)}")
        if self.model.device == "cpu" and (prefill.num_gpus or decode.num_gpus):
            raise ValueError("pools.*.num_gpus: GPUs are reserved, but model.device: cpu")
        for name, pool in (("prefill", prefill), ("decode", decode)):
            if pool.max_running > pool.max_step_tokens:
                raise ValueError(
                    f"pools.{name}.max_running: {pool.max_running} sequences cannot each get a token"
                    f" of pools.{name}.max_step_tokens: {pool.max_step_tokens}"
                )
        return self


# What pydantic adds to the location of a key that takes one of several types.
_ALTERNATIVES = ("constrained-int", "constrained-float", "literal['auto']")


def load_config(path: Path) -> ServingConfig:
    """Read and check a serving.yaml. Raises ConfigError with one `file:key: reason` line per problem."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    return parse_config(raw if raw is not None else {}, source=str(path))


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
    reason = "unknown key" if item["type"] == "extra_forbidden" else str(item["msg"]).removeprefix("Value error, ")
    return f"{source}:{key}: {reason}" if key else f"{source}:{reason}"
