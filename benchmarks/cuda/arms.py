"""The engine as a worker runs it: core, scheduler, executor and sampler, without the network around them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from common.block_hash import hash_blocks, hash_root
from common.clock import SystemClock
from common.config import ServingConfig
from common.config import parse_config as parse_serving
from common.errors import Refused
from common.ids import mint_request_id
from common.model_files import resolve_model
from common.random_models import CONFIGS
from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.core import EngineCore
from engine.events import Failed, Tokens
from engine.executor import Executor
from engine.pages.kv_cache import TorchKvStore
from engine.request import EngineRequest
from engine.steps.group import Group
from engine.weights.config import DecoderConfig
from engine.weights.config import parse_config as parse_model
from engine.weights.random_weights import fill_random, initializer_range
from worker.factory import limits_for, load_executor_for

BLOCK_SIZE = 16
_BIG_CARD_BYTES = 100 << 30
_GREEDY = SamplingParams(temperature=0.0)


class Format(StrEnum):
    """How weights and KV are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"

    @property
    def bytes_per_element(self) -> int:
        """Format of the layers' matrices, and of keys and values; the head is never in less than bf16."""
        return {Format.FP32: 4, Format.BF16: 2, Format.FP8: 1}[self]


_FORMAT_KEYS: dict[Format, dict[str, str]] = {
    Format.FP32: {"dtype": "float32"},
    Format.BF16: {"dtype": "bfloat16"},
    Format.FP8: {"dtype": "bfloat16", "quantization": "fp8", "kv_dtype": "fp8"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A random model in a format, and what its bounds are computed from."""

    model: str
    """A name of `common.random_models`."""
    format: Format

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.model} {self.format}"

    @property
    def decoder(self) -> DecoderConfig:
        """The model's shape."""
        return parse_model(CONFIGS[self.model])

    @property
    def num_layer_weights(self) -> int:
        """Elements of all layers' matrices."""
        shape = self.decoder
        heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        return shape.num_layers * shape.hidden_size * (heads + 3 * shape.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Elements of the matrix that makes logits."""
        return self.decoder.vocab_size * self.decoder.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes that every decode step reads; it reads only a few rows of the embedding."""
        per_element = self.format.bytes_per_element
        return per_element * self.num_layer_weights + max(per_element, 2) * self.num_head_weights

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token, all layers."""
        shape = self.decoder
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * self.format.bytes_per_element

    def attention_flops(self, num_tokens: int) -> float:
        """Operations of causal attention over one prompt: two products with half of num_tokens² scores."""
        shape = self.decoder
        return 2.0 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2

    def serving_config(self, device: torch.device, **pool: int) -> ServingConfig:
        """Return the serving.yaml that a worker with this model would have."""
        pools = {"block_size": BLOCK_SIZE, "threads": torch.get_num_threads(), **pool}
        model = {"id": f"random:{self.model}", "device": device.type, **_FORMAT_KEYS[self.format]}
        return parse_serving({"model": model, "pools": {"prefill": pools, "decode": pools}}, source=self.name)


def transformers_model(model: str, *, dtype: torch.dtype, **options: Any) -> Any:
    """Return transformers' own model of a name, with the same random weights as ours."""
    import transformers

    hugging_face: Any = transformers  # half of it has no types
    config = hugging_face.AutoConfig.from_pretrained(resolve_model(f"random:{model}", local_files_only=True))
    made = hugging_face.AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()
    fill_random(dict(made.named_parameters()), seed=0, std=initializer_range(CONFIGS[model]))
    return made


def largest_model(device: torch.device) -> str:
    """Return the largest of the random models that fits twice, with pages, into the device's memory."""
    if device.type != "cuda":
        return "tiny"
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return "qwen3-8b" if total_bytes > _BIG_CARD_BYTES else "qwen3-0.6b"


class EngineArm:
    """A loaded engine that is stepped by hand. One thread."""

    def __init__(self, config: ServingConfig) -> None:
        """Load the model that the configuration's decode pool serves. Takes seconds."""
        self.executor: Executor = load_executor_for(config, config.pools.decode)[0]
        self.core = EngineCore(self.executor, limits_for(config.pools.decode), SystemClock())
        self._root = hash_root(model_fingerprint=self.executor.kv.shape.fingerprint)
        self._rng = random.Random(1)
        self.num_tokens = 0
        """Generated so far, by all requests."""

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Return random token ids, so that no prompt is in the prefix cache."""
        return tuple(self._rng.choices(range(self.executor.vocab_size), k=num_tokens))

    def add(self, prompt: Sequence[int], *, max_tokens: int) -> Group:
        """Put a greedy request in line that no end-of-sequence token ends."""
        return _accepted(self.core.add(self._request(prompt, max_tokens), _ignore))

    def add_decoding(self, num_context_tokens: int, *, max_tokens: int, sampling: SamplingParams = _GREEDY) -> Group:
        """Enter a request whose prompt's KV is in its pages already, as after a handoff: it decodes from here."""
        request = self._request(self.prompt(num_context_tokens), max_tokens, sampling)
        group = _accepted(self.core.reserve(request, _ignore))
        self.core.commit(group, num_context_tokens)
        self.core.start(group, [(0, False)])
        return group

    def step(self) -> None:
        """Run one step of the engine loop. Raises what a step raised."""
        for _group, event in self.core.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Tokens):
                self.num_tokens += len(event.tokens)

    def drain(self) -> None:
        """Step until every request is over."""
        while self.core.has_work:
            self.step()

    def cancel(self, groups: Sequence[Group]) -> None:
        """End requests and take what is still in flight."""
        for group in groups:
            self.core.cancel(group)
        self.core.wake()
        self.core.step()
        self.num_tokens = 0

    def fill_pages(self) -> None:
        """Write noise into all pages: zeros would need less power, and the card would clock higher."""
        store = self.executor.kv
        assert isinstance(store, TorchKvStore), store
        for pages in (pages for layer in store.layers for pages in layer):
            noise: Tensor = torch.randn(pages.shape, dtype=torch.bfloat16, device=pages.device)
            pages.copy_(noise)

    def _request(self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams = _GREEDY) -> EngineRequest:
        return EngineRequest(
            request_id=mint_request_id(),
            prompt_token_ids=as_tokens(prompt),
            sampling=replace(sampling, max_tokens=max_tokens, ignore_eos=True),
            hash_root=self._root,
            block_hashes=hash_blocks(prompt, root=self._root, block_size=BLOCK_SIZE),
        )


def _accepted(group: Group | Refused) -> Group:
    if isinstance(group, Refused):
        raise RuntimeError(f"the engine refused a request: {group.reason}")
    return group


def _ignore(_event: Any) -> None:
    """Drop an event: `step` returns all of them."""
