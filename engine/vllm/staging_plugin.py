"""vLLM's interface of KV connectors for our own workers: pages leave and enter vLLM by way of staged blocks.

vLLM makes one instance in its scheduler's process and one on each rank. Neither connects to another server: the worker
does, with the same transfers as for every engine. `connector/plugin.py` is the connector for servers without a worker.
"""

import os
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from engine.vllm.connector.pages import page_tensors
from engine.vllm.connector.plugin import check_supported
from engine.vllm.errands import Closed, PageReport, Refusal, Report, Staged, StepErrands, encode_report
from engine.vllm.pages import learn_head_order
from engine.vllm.processes import end_with, forget_shared_names
from engine.vllm.staging import RankStaging, page_part
from engine.vllm.step_book import StepBook
from engine.weights.config import UnsupportedModel

CONNECTOR = {"kv_connector": "WorkerStaging", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
"""Fields of vLLM's `KVTransferConfig` that name this connector."""


class _Metadata(KVConnectorMetadata):  # type: ignore[misc]  # there are no types without vLLM
    def __init__(self, errands: StepErrands) -> None:
        self.errands = errands


class WorkerStaging(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module. An instance has either a book or, once pages are registered, a rank's staging."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = self._kv_transfer_config.kv_connector_extra_config
        end_with(config["worker_pid"])
        is_scheduler = role is KVConnectorRole.SCHEDULER
        pipes = config["report_fds"]
        self._rank = 0 if is_scheduler else get_tensor_model_parallel_rank()
        fd = pipes[0] if is_scheduler else pipes[1 + self._rank]
        self._reports = os.open(f"/proc/{config['worker_pid']}/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            check_supported(vllm_config, kv_cache_config)
        except UnsupportedModel as error:
            self._report(Refusal(reason=str(error)))
            forget_shared_names()
            raise
        self._staging: RankStaging | None = None
        self._is_warm = False
        if is_scheduler:
            forget_shared_names()  # the ranks run
            self._requests: dict[str, Any] = {}
            self._book = StepBook(
                block_size=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
                pool=lambda: self._kv_cache_manager.block_pool,
                tables=lambda request_id: self._kv_cache_manager.get_block_ids(request_id)[0],
            )

    def _warmed_up(self) -> None:
        """Forget the names that this process's first step has made."""
        if not self._is_warm:
            self._is_warm = True
            forget_shared_names()

    def _report(self, report: Report) -> None:
        data = memoryview(encode_report(report))
        while data:
            data = data[os.write(self._reports, data) :]

    # In the scheduler.

    def on_new_request(self, request: Any) -> None:
        """See `KVConnectorBase_V1`."""
        self._requests[request.request_id] = request
        self._book.opened(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `KVConnectorBase_V1`: the KV is in host memory already, so that it is copied within the step.

        An export is put off for ever: vLLM then steps without it until the worker takes it back.
        """
        return self._book.num_matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `KVConnectorBase_V1`."""
        self._book.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `KVConnectorBase_V1`."""
        errands, begun = self._book.plan(scheduler_output, self._requests)
        self._report(begun)
        return _Metadata(errands)

    def get_kv_connector_stats(self) -> None:
        """See `KVConnectorBase_V1`. vLLM's scheduler asks for it once results have come, and then drops the events of
        its cache; where steps overlap, these name the blocks that the results have filled.
        """
        if self.role is KVConnectorRole.SCHEDULER:
            self._book.hear_cache()

    def take_events(self) -> tuple[Any, ...]:
        """See `KVConnectorBase_V1`; vLLM's scheduler calls this behind every step."""
        if (ended := self._book.ended()) is not None:
            self._report(ended)
        self._warmed_up()
        return ()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `KVConnectorBase_V1`: what is to leave has left, so the pages are free at once."""
        del self._requests[request.request_id]
        self._book.closed(request)
        return False, None

    # On a rank.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """See `KVConnectorBase_V1`. Raises UnsupportedModel for pages that cannot be handed over."""
        self._layers = layers = page_tensors(kv_caches, self._kv_cache_config.num_blocks)
        names = list(kv_caches)
        context = self._vllm_config.compilation_config.static_forward_context
        backend = "+".join(sorted({context[name].get_attn_backend().get_name() for name in names}))
        model, num_ranks = self._vllm_config.model_config, self._vllm_config.parallel_config.tensor_parallel_size
        page = layers[0][0]
        num_rows = page.shape[0]
        if backend == "CPU_ATTN":  # its pages begin with the heads
            num_rows = model.get_total_num_kv_heads()
            order = learn_head_order(context[names[0]], block_size=page.shape[1], head_dim=page.shape[2] // 2)
            backend = f"{backend} {order.digest()}"
        elif model.use_mla:  # every rank has all of it
            num_ranks = 1
        elif num_ranks > 1:
            num_rows *= num_ranks
            backend = f"{backend} of {num_ranks}"
        self._part = page_part(page, num_rows=num_rows, rank=self._rank if num_ranks > 1 else 0, num_ranks=num_ranks)
        report = PageReport(
            rank=self._rank,
            backend=backend,
            num_layers=len(layers),
            page_shape=self._part.page_shape,
            dtype=str(page.dtype).removeprefix("torch."),
            num_blocks=self._kv_cache_config.num_blocks,
        )
        self._report(report)

    def get_handshake_metadata(self) -> None:
        """See `KVConnectorBase_V1`. All processes of the engine have begun to talk: killed ones then leave no names."""
        forget_shared_names()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `KVConnectorBase_V1`."""
        for load in self._errands.loads:
            self._slots.load(load.block_ids, load.slots)
            self._report(Staged(rank=self._rank, key=load.key, num_tokens=load.num_tokens))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `KVConnectorBase_V1`: `start_load_kv` has loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """See `KVConnectorBase_V1`: all layers leave together."""

    def wait_for_save(self) -> None:
        """See `KVConnectorBase_V1`. Requests that are over come last: the steps that touch their slots have run."""
        for store in self._errands.stores:
            self._slots.store(store.block_ids, store.slots)
            self._report(Staged(rank=self._rank, key=store.key, num_tokens=store.num_tokens))
        if self._errands.closed:
            self._report(Closed(rank=self._rank, keys=self._errands.closed))
        self._warmed_up()

    @property
    def _errands(self) -> StepErrands:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        return metadata.errands

    @property
    def _slots(self) -> RankStaging:
        if self._staging is None:  # the worker makes the region when it knows the pages
            self._staging = RankStaging(self._layers, self._part, self._errands.region_path)
        return self._staging
