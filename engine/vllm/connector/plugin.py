"""vLLM's interface of KV connectors (`KVConnectorBase_V1`): passes its calls on to our two halves.

vLLM makes one instance in its scheduler's process and one on each rank. What connects to other servers is an
`Endpoint`, which a subclass opens: `worker/kv_connector.py`.
"""

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.version import __version__ as vllm_version

from engine.kv_store import KvShape
from engine.model.loader import content_digest, weight_files
from engine.vllm.connector.endpoint import Endpoint
from engine.vllm.connector.orders import RankAddress, RankResults, StepOrders
from engine.vllm.connector.pages import page_tensors, shape_of
from engine.vllm.connector.routes import RankPlace
from engine.vllm.connector.scheduling import OrderBook, ScheduledStep
from engine.vllm.connector.stats import TransferMetrics, TransferStats
from engine.vllm.pages import learn_head_order
from engine.vllm.processes import forget_shared_names
from engine.weights.config import UnsupportedModel

logger = logging.getLogger(__name__)

_WIRE_VERSION = 2
_IDLE_STEP_S = 0.005
_PLAIN_DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]  # there are no types without vLLM
    orders: StepOrders


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    address: RankAddress


class ConnectorPlugin(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module. An instance has either a book or, once pages are registered, an endpoint."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        self._block_size: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._endpoint: Endpoint | None = None
        self._device = torch.device("cpu")
        self._results = RankResults.none()
        if role is KVConnectorRole.SCHEDULER:
            transfer = self._kv_transfer_config
            self._book = OrderBook(
                fingerprint=_model_digest(vllm_config.model_config),
                block_size=self._block_size,
                kv_role=transfer.kv_role,
            )
            if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
                logger.warning("a transfer that breaks fails its request: kv_load_failure_policy is not recompute")

    @abstractmethod
    def open_endpoint(self, layers: Sequence[Tensor], shape: KvShape, place: RankPlace) -> Endpoint:
        """Return the transfers of a rank. Raises ValueError for a bad kv_connector_extra_config."""

    # In the scheduler.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """See `KVConnectorBase_V1`."""
        forget_shared_names()
        self._book.set_ranks([metadata[rank].address for rank in sorted(metadata)])

    def on_new_request(self, request: Any) -> None:
        """See `KVConnectorBase_V1`."""
        self._book.expect(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `KVConnectorBase_V1`."""
        num_matched = self._book.num_matched(request, num_computed_tokens)
        return num_matched, num_matched > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `KVConnectorBase_V1`."""
        self._book.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `KVConnectorBase_V1`."""
        blocks = scheduler_output.kv_connector_block_state
        step = ScheduledStep(
            num_tokens=scheduler_output.num_scheduled_tokens,
            block_ids_of=lambda request_id: blocks.get_block_ids(request_id)[0],
            preempted=scheduler_output.preempted_req_ids or (),
        )
        return _Metadata(orders=self._book.take_orders(step))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `KVConnectorBase_V1`."""
        return self._book.finished(request)

    # On a rank.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """See `KVConnectorBase_V1`. Raises UnsupportedModel for pages that cannot be handed over."""
        layers = page_tensors(kv_caches, self._kv_cache_config.num_blocks)
        self._device = layers[0].device
        place = self._place()
        if layers[0].shape[1] != len(place.heads):
            raise UnsupportedModel(
                f"cannot hand over pages of {layers[0].shape[1]} heads: this rank should have {len(place.heads)}"
            )
        fingerprint = self._page_digest(layers, list(kv_caches), place.num_heads)
        shape = shape_of(layers, block_size=self._block_size, fingerprint=fingerprint)
        self._endpoint = self.open_endpoint(layers, shape, place)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """See `KVConnectorBase_V1`. All processes of the engine have begun to talk: killed ones then leave no names."""
        forget_shared_names()
        return _Handshake(address=self._rank.address)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """See `KVConnectorBase_V1`: this step may write into pages that are being copied."""
        assert isinstance(kv_connector_metadata, _Metadata)
        if preempted := kv_connector_metadata.orders.preempted:
            self._rank.settle(preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See `KVConnectorBase_V1`. Offers begin before the step that computes their first chunk."""
        super().bind_connector_metadata(connector_metadata)
        for offer in self._orders.offers:
            self._rank.begin(offer)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `KVConnectorBase_V1`. What is queued so far may zero the pages."""
        if pulls := self._orders.pulls:
            ready = self._ready()
            for pull in pulls:
                self._rank.pull(pull, ready)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `KVConnectorBase_V1`: requests wait for their pulls in the scheduler."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """See `KVConnectorBase_V1`: pages leave when all layers of a chunk are computed."""

    def wait_for_save(self) -> None:
        """See `KVConnectorBase_V1`. Pages are copied while the next step runs."""
        if chunks := self._orders.chunks:
            ready = self._ready()
            for chunk in chunks:
                self._rank.add(chunk, ready)
        if ended := self._orders.ended:
            self._rank.end(ended)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See `KVConnectorBase_V1`; `get_block_ids_with_load_errors` follows in the same step."""
        self._rank.cancel(finished_req_ids)
        # vLLM repeats steps that compute nothing until a transfer ends, on a core that the other server may need.
        self._results = self._rank.take_results(_IDLE_STEP_S if self._orders.is_idle else 0.0)
        return self._results.offered, self._results.pulled

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `KVConnectorBase_V1`."""
        return self._results.invalid_blocks

    def get_kv_connector_stats(self) -> TransferStats | None:
        """See `KVConnectorBase_V1`."""
        return TransferStats(data=dict(self._results.counts)) if self._results.counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """See `KVConnectorBase_V1`."""
        return TransferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> TransferMetrics:
        """See `KVConnectorBase_V1`."""
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """See `KVConnectorBase_V1`."""
        if self._endpoint is not None:
            self._endpoint.close()

    def _ready(self) -> "torch.Event | None":
        """Return an event that comes when a device has done what is queued so far; None without a device."""
        if self._device.type == "cpu":
            return None
        ready = torch.Event(self._device)
        ready.record()
        return ready

    @property
    def _rank(self) -> Endpoint:
        assert self._endpoint is not None, "`register_kv_caches` comes first"
        return self._endpoint

    @property
    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        return metadata.orders

    def _place(self) -> RankPlace:
        is_latent = isinstance(self._kv_cache_config.kv_cache_groups[0].kv_cache_spec, MLAAttentionSpec)
        return RankPlace(
            rank=get_tensor_model_parallel_rank(),
            num_ranks=self._vllm_config.parallel_config.tensor_parallel_size,
            num_heads=1 if is_latent else self._vllm_config.model_config.get_total_num_kv_heads(),
        )

    def _page_digest(self, layers: Sequence[Tensor], names: Sequence[str], num_heads: int) -> str:
        """Return a hash of everything that the bytes of pieces depend on."""
        config = self._vllm_config
        context = config.compilation_config.static_forward_context
        backends = sorted({context[name].get_attn_backend().get_name() for name in names})
        page_order = ""  # follows from the backend, except where it follows from the processor's instructions
        if backends == ["CPU_ATTN"]:
            head_dim = layers[0].shape[-1] // 2
            page_order = learn_head_order(context[names[0]], block_size=self._block_size, head_dim=head_dim).digest()
        essentials = (
            *(_WIRE_VERSION, vllm_version, _model_digest(config.model_config)),
            *(backends, page_order, layers[0].shape[-1], str(layers[0].dtype)),
            *(len(layers), self._block_size, num_heads),
        )
        return hashlib.blake2b(repr(essentials).encode(), digest_size=16).hexdigest()


def check_supported(config: Any, kv_cache_config: Any) -> None:
    """Raise UnsupportedModel, naming what cannot be handed over."""
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or type(groups[0].kv_cache_spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise UnsupportedModel(
            f"cannot hand over {config.model_config.model}: its layers keep {', '.join(kinds) or 'nothing'} in"
            f" {len(groups)} groups; only pages of full attention or MLA, in one group, are handed over"
        )
    refused: Mapping[str, bool] = {
        "--pipeline-parallel-size": config.parallel_config.pipeline_parallel_size > 1,
        "--decode-context-parallel-size": config.parallel_config.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size": config.parallel_config.prefill_context_parallel_size > 1,
        "--speculative-config": config.speculative_config is not None,
        "--kv-cache-dtype": config.cache_config.cache_dtype not in _PLAIN_DTYPES,
    }
    found = [option for option, is_set in refused.items() if is_set]
    if found:
        raise UnsupportedModel(f"cannot hand over pages with {', '.join(found)}; leave it out")


def _model_digest(model: Any) -> str:
    """Return a hash of what a model computes. Raises UnsupportedModel without its safetensors files."""
    folder = Path(model.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    essentials = (
        *(content_digest(weight_files(folder)), (folder / "config.json").read_bytes()),
        *(str(model.dtype), model.quantization, model.hf_overrides),
    )
    return hashlib.blake2b(repr(essentials).encode(), digest_size=16).hexdigest()
