"""Sections of serving.yaml that routers read: the doors, the tenants, and the objectives."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from common.config.keys import DnsName, Need, Port, Section

ROUTER_PORTS = ("port", "http_port", "metrics_port", "admin_port")
Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$", max_length=300)]
ENV_PREFIX = "env:"
"""Prefix of an environment variable's name where a secret is expected."""


MIN_KEY_CHARS = 16


def checked_key(key: str) -> str:
    """Return a secret, or the name of the environment variable that holds it. Raises ValueError for a short secret."""
    if not key.startswith(ENV_PREFIX) and len(key) < MIN_KEY_CHARS:
        raise ValueError(f"has {len(key)} characters; at least {MIN_KEY_CHARS}")
    return key


class RouterConfig(Section):
    """The front door."""

    count: Annotated[int, Field(ge=1, le=64), Need.RESTART] = 1
    """Routers: each serves all workers, the *i*-th on the ports below plus *i*. A client that knows
    [all of them](client.md#several-routers) survives the death of one. Each applies tenants' limits by itself."""
    host: Annotated[str, Need.RESTART] = "127.0.0.1"
    """Address of IPv4 or IPv6 that it listens on, or a name: its first address, IPv4 before IPv6. `0.0.0.0` opens it to
    the network, `::` to both families: then set `router.auth`."""
    port: Annotated[Port, Need.RESTART] = 50051
    """Port that it listens on. `0`: a free one, chosen once per `kvrelay up`."""
    http_port: Annotated[Port | None, Need.RESTART] = 0
    """Port of the [OpenAI-compatible HTTP door](openai.md), on the same address. `0`: a free one, chosen once per
    `kvrelay up`, which prints it; `null`: none."""
    max_http_connections: Annotated[int | None, Field(ge=16), Need.ROUTERS] = None
    """[Most connections](openai.md#connections) of the HTTP door, at least 16. `null`: as many as
    [open files](hosts.md#open-files) allow; a larger number stops the start."""
    live_page: Annotated[bool, Need.ROUTERS] = True
    """The HTTP door serves a [page of the running cluster](diagnosis.md#live-page) at `/`. What it shows is for
    operators; with `auth: none` every client may see it."""
    metrics_port: Annotated[Port | None, Need.RESTART] = 0
    """Prometheus port. `0`: a free one; `null`: none."""
    admin_port: Annotated[Port, Need.RESTART] = 0
    """Port on which the controller, and no other process, calls the router. `0`: a free one; name it for
    [a firewall](hosts.md#ports)."""
    policy: Annotated[
        Literal[
            "predictive",
            "random",
            "round_robin",
            "power_of_two",
            "least_load",
            "longest_prefix",
        ],
        Need.ROUTERS,
    ] = "predictive"
    """Rule that chooses workers: [see below](#policies)."""
    retention: Annotated[Literal["sessions", "age"], Need.ROUTERS] = "age"
    """Order in which workers evict what turns of [sessions](#sessions) leave behind. `sessions`: by when they may come
    back, as routers learn; `age`: as anything else."""
    local_prefill_max_tokens: Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], Need.ROUTERS] = "auto"
    """A prompt with at most this many uncached tokens on the decode worker may be prefilled there. `auto`: any prompt
    for which that costs less (`predictive`), at most 32 tokens under the other policies."""
    max_prefill_wait_s: Annotated[float, Field(gt=0), Need.ROUTERS] = 0.1
    """With `predictive`, a prompt that would wait longer than this many seconds at every worker waits in the router's
    line instead, which keeps it in order. While half of the workers are free it waits at the worker."""
    max_queued: Annotated[int | None, Field(ge=1), Need.ROUTERS] = None
    """Requests that wait for a plan; more are refused. Each tenant can always hold its share of them, by `weight`.
    `null`: 512, or 4 for each worker if that is more."""
    auth: Annotated[Literal["none", "api_key"], Need.ROUTERS] = "none"
    """`none`: every request belongs to the tenant `default`. `api_key`: the metadata, or HTTP header,
    `authorization: Bearer <key>` names its [tenant](#tenants)."""
    allowed_hosts: Annotated[tuple[DnsName, ...], Field(max_length=32), Need.ROUTERS] = ()
    """With `auth: none`, further DNS names under which HTTP clients know the router, such as a load balancer's;
    `*.example.com` stands for all names there. [Addresses, names without a dot and the names that the router knows
    itself](security.md#web-pages) need not be listed."""
    allowed_origins: Annotated[tuple[Origin, ...], Field(max_length=32), Need.ROUTERS] = ()
    """Origins of [web pages](security.md#web-pages), such as `https://chat.example.com`, that may call the HTTP door
    from a browser. `*`: all of them."""
    salt_secret: Annotated[Annotated[str, AfterValidator(checked_key)] | None, Need.ROUTERS] = None
    """Secret from which tenants' cache salts and the key of all block hashes are derived, at least 16 characters; equal
    on all routers of a cluster. `null`: the controller draws the key of block hashes once and keeps it in the run
    folder (`tls/block.key`). `env:NAME` reads an environment variable."""
    shed: Annotated[Literal["none", "deadline", "slo"], Need.ROUTERS] = "deadline"
    """Requests that are refused at once because no worker can serve them in time. `deadline`: those whose first token
    would come after the client's own deadline, the wait for a place on a decode worker included; `slo`: also those that
    would miss their objective for the time to first token; `none`. Predictions without measurements refuse nothing."""
    late_share: Annotated[float, Field(ge=0, le=1), Need.ROUTERS] = 0.016
    """Largest share of a tenant's work, in tokens, that goes to requests which have missed their objective for the
    first token while others of it could still meet theirs; [see below](#overload)."""
    queue_timeout_s: Annotated[float, Field(gt=0), Need.ROUTERS] = 60.0
    """Longest wait for a plan, in seconds."""
    recovery_timeout_s: Annotated[float, Field(gt=0), Need.ROUTERS] = 60.0
    """Seconds that a request which lost its worker waits for one to come back before it fails."""
    silence_s: Annotated[float | None, Field(ge=0.5), Need.ROUTERS] = 1.0
    """Seconds without a sign of life after which a worker's answers continue elsewhere. One whose reports were late
    recently is given more time, at most five times as much. `null`: only a broken connection ends the wait."""
    max_attempts: Annotated[int, Field(ge=1), Need.ROUTERS] = 6
    """Plans per request, the first one included."""
    max_lost_workers: Annotated[int, Field(ge=2), Need.ROUTERS] = 3
    """Workers that may be lost, one after the other, while they compute a request with fewer than 32 new tokens in
    between, before [it is refused](reliability.md#requests-that-end-their-workers). One more is granted when the last
    has never answered: it may have been dead before."""
    default_max_tokens: Annotated[int | None, Field(ge=1), Need.ROUTERS] = None
    """Longest answer, in tokens, to a request that sets no limit; `null`: as long as the context allows. A completion
    over HTTP has 16."""
    max_message_mib: Annotated[int, Field(ge=1, le=64), Need.ROUTERS] = 4
    """Largest request, in MiB."""
    token_cache_mib: Annotated[int, Field(ge=0), Need.ROUTERS] = 64
    """Most memory for the tokens of chats' earlier turns, so that a turn tokenizes only new text; `0` keeps none."""
    index_memory_mib: Annotated[int, Field(ge=1), Need.ROUTERS] = 1024
    """Most memory for the prefix index, 230 bytes a block. Beyond it, the blocks used longest ago are forgotten."""

    def replica(self, index: int) -> "RouterConfig":
        """Return the configuration of the router with that index: named ports plus the index; free ones stay free."""
        ports = {name: port + index for name in ROUTER_PORTS if (port := getattr(self, name))}
        return self.model_copy(update=ports)


class TenantConfig(Section):
    """One tenant's share and limits; a limit that is left out does not apply."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Lower-case letters, digits, `.`, `_`, `-`; a label of metrics."""
    api_keys: tuple[Annotated[str, AfterValidator(checked_key)], ...] = ()
    """Keys of at least 16 characters. `env:NAME` reads an environment variable of the router, so that the file holds no
    secret."""
    api_key_sha256: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = ()
    """Keys as hexadecimal SHA-256 digests."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Share of the cluster's work in tokens, relative to the other tenants that wait."""
    max_queued: Annotated[int | None, Field(ge=1)] = None
    """Requests that wait for a plan; more are refused."""
    max_concurrent: Annotated[int | None, Field(ge=1)] = None
    """Requests with a plan; more wait. `null`: no limit."""
    requests_per_min: Annotated[float | None, Field(gt=0)] = None
    """Requests, including calls that only tokenize; up to one minute's worth at once."""
    tokens_per_min: Annotated[float | None, Field(gt=0)] = None
    """Prompt and output tokens, cached ones included; up to one minute's worth at once."""
    cache_gib: Annotated[float, Field(ge=0, le=1 << 20)] = 0.0
    """Most KV that [marks](openai.md#what-stays-cached) of its requests pin on each worker, GiB; 0 pins nothing."""
    max_priority: Annotated[int, Field(ge=0, le=1000)] = 0
    """Largest priority that its requests may claim; a larger claim gets this."""
    overload: Literal["refuse", "wait", "shorten", "yield"] | None = None
    """[Treatment](#overload) of its requests that miss, or are predicted to miss, their objective for the first token:
    `refuse`, `wait`, `shorten` or `yield`. `null`: as `router.shed` says."""
    shortened_max_tokens: Annotated[int, Field(ge=1)] = 128
    """With `overload: shorten`, longest answer in tokens to such a request."""
    operator: bool = False
    """Its keys may ask for the status of the whole cluster, and let it forget tenants' cached blocks. Commands on the
    host of the run folder need no key for that."""
    share_cache: bool = False
    """Share cached prefixes and compiled grammars with the other tenants that set this. Otherwise neither cached tokens
    nor times reveal to a tenant what another has sent."""


class SloConfig(Section):
    """Objectives of every request that names none; reported beside what was measured."""

    ttft_s: Annotated[float, Field(gt=0), Need.ROUTERS] = 2.0
    """Seconds to the first token."""
    ttft_tokens: Annotated[int, Field(ge=1), Need.ROUTERS] = 8192
    """Prompts of more tokens than this may take proportionally longer to the first token; an objective that a request
    names is taken as it is."""
    tpot_s: Annotated[float, Field(gt=0), Need.ROUTERS] = 0.2
    """Mean seconds between the tokens of an answer. A request waits while every decode worker would miss it; without a
    prefill pool, workers also compute prompts in chunks so small that running answers keep it. Where even a lone answer
    would miss it, as measured, three times its gap takes its place."""
