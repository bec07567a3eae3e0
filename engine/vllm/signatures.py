"""Checks at start that the installed vLLM has the insides that this package uses.

They are not a public interface, so one version is pinned exactly; a vLLM of that version with other insides, a fork or
a build from source, is refused as well, in a sentence, before a model is loaded.
"""

import importlib
import inspect
from typing import Any

from common.engines import VLLM_VERSION, installed_package, vllm_version
from engine.model.config import UnsupportedModel

_USED: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:EngineArgs": ("model", "kv_cache_memory_bytes", "worker_extension_cls", "async_scheduling"),
    "vllm.v1.executor.abstract:Executor.get_class": ("vllm_config",),
    "vllm.v1.executor.abstract:Executor.collective_rpc": ("method", "args"),
    "vllm.v1.executor.abstract:Executor.register_failure_callback": ("callback",),
    "vllm.v1.core.kv_cache_utils:get_kv_cache_configs": ("vllm_config", "kv_cache_specs", "available_memory"),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "prompt_token_ids", "block_ids", "num_computed_tokens"),
    "vllm.v1.core.sched.output:CachedRequestData": (
        *("req_ids", "resumed_req_ids", "new_token_ids", "all_token_ids"),
        *("new_block_ids", "num_computed_tokens", "num_output_tokens"),
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        *("total_num_scheduled_tokens", "finished_req_ids"),
    ),
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": ("logits", "hidden_states"),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": (
        *("layer", "key", "value", "kv_cache", "slot_mapping"),
    ),
    "vllm.model_executor.layers.layernorm:RMSNorm": ("hidden_size", "eps", "var_hidden_size", "has_weight"),
    "vllm.model_executor.models.utils:extract_layer_index": ("layer_name",),
}
"""Callables by module and name, and those of their parameters that are used."""


def check_vllm() -> None:
    """Raise UnsupportedModel when vLLM is missing, another version, or not as this package knows it. Takes seconds."""
    found = vllm_version(installed_package)
    if found is None:
        raise UnsupportedModel(
            f"model.engine: vllm needs vLLM {VLLM_VERSION}, which is not installed here; docs/engines.md says how to"
            " make a virtual environment with it"
        )
    if found != VLLM_VERSION:
        raise UnsupportedModel(f"model.engine: vllm needs vLLM {VLLM_VERSION}; {found} is installed")
    for name, parameters in _USED.items():
        missing = _missing(name, parameters)
        if missing:
            raise UnsupportedModel(
                f"model.engine: vllm: the installed vLLM calls itself {found}, but {name} has no {', '.join(missing)};"
                f" install the published {VLLM_VERSION}"
            )


def _missing(name: str, parameters: tuple[str, ...]) -> list[str]:
    """Return the parameters that a callable does not have; its own name when it does not exist."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return [path]
    fields = getattr(found, "_fields", None)  # of a named tuple
    known = fields if fields is not None else inspect.signature(found).parameters
    return [each for each in parameters if each not in known]
