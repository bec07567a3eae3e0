"""Runs on each rank of a vLLM process group: turns orders into vLLM's steps, and samples as every other engine does.

vLLM computes hidden states and logits; the next token is chosen by `engine.sampler`, on rank 0. The tokens of a
sequence come with the order of the next step, never from what vLLM sampled: the rank writes them where vLLM's runner
looks.

Written against the V1 model runner of vLLM's CPU build (`engine.vllm.signatures` checks it).
"""

import glob
import logging
import os
import select
import threading
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.sampling import SamplingParams
from common.tokens import TokenArray
from engine.executor import StepResult
from engine.kv_store import KvShape
from engine.logits import SamplingRow
from engine.runner import pooled_sum, prompt_logprobs
from engine.sampler import Sampler
from engine.vllm.kernels import use_fused_norms
from engine.vllm.order import SequenceOrder, StepOrder
from engine.vllm.pages import HeadOrder, learn_head_order, map_region

logger = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
_PYTHON_NAMES = ("psm_", "sem.mp-")
"""Beginnings of the names that Python gives to shared memory and to locks."""
_EXIT_ORPHANED = 70  # sysexits.h: internal software error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """Facts that a rank needs before its first step."""

    region_path: str
    """File of the pages, which the rank maps."""
    num_blocks: int
    shape: KvShape
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A step that has failed on a rank: every rank replies to every order, or later replies would be taken for it."""

    reason: str


class RankExtension:
    """Methods that vLLM adds to its worker of each rank (`worker_extension_cls`)."""

    def kvrelay_backend(self) -> str:
        """Return the name of the attention backend of all layers."""
        layers = _attention_layers(self.model_runner)  # type: ignore[attr-defined]
        return "+".join(sorted({layer.attn_backend.get_name() for layer in layers}))

    def kvrelay_open(self, setup: RankSetup) -> HeadOrder:
        """Take the pages of `setup` instead of vLLM's own; returns the order of a head page's elements."""
        self.kvrelay_rank = Rank(self, setup)
        return self.kvrelay_rank.head_order

    def kvrelay_step(self, order: StepOrder) -> list[StepResult] | RankFailed | None:
        """Run one step. Returns one result per sequence on rank 0, None on the others."""
        try:
            return self.kvrelay_rank.step(order)
        except Exception as error:
            logger.exception("a step has failed")
            return RankFailed(reason=f"{type(error).__name__}: {error}")


@dataclass(slots=True, eq=False)
class _Open:
    """A sequence that the rank knows."""

    sampling: SamplingParams
    prompt_token_ids: TokenArray
    output_token_ids: TokenArray


@dataclass(slots=True)
class _Requests:
    """vLLM's records of a step's sequences."""

    new: list[Any] = field(default_factory=list)
    cached_ids: list[str] = field(default_factory=list)
    cached_blocks: list[tuple[list[int]] | None] = field(default_factory=list)
    cached_num_computed: list[int] = field(default_factory=list)
    cached_num_output: list[int] = field(default_factory=list)


class Rank:
    """One rank, between vLLM's worker and our orders."""

    def __init__(self, worker: Any, setup: RankSetup) -> None:
        from vllm import SamplingParams as VllmSampling
        from vllm.config import CompilationMode

        self._worker = worker
        self._runner = worker.model_runner
        self._open: dict[str, _Open] = {}
        self._unsampled = VllmSampling(temperature=0.0)  # its choice is never made
        self._sampler = Sampler(vocab_size=setup.vocab_size, eos_token_ids=setup.eos_token_ids)
        if self._runner.compilation_config.mode == CompilationMode.NONE:
            use_fused_norms(self._runner.model)
        layers = _attention_layers(self._runner)
        self._bind(layers, setup)
        if worker.parallel_config.tensor_parallel_size > 1:
            forget_shared_names()
            _end_with_parent()
        self.head_order = learn_head_order(layers[0], block_size=setup.shape.block_size, head_dim=setup.shape.head_dim)

    @torch.inference_mode()
    def step(self, order: StepOrder) -> list[StepResult] | None:
        """Run one step; see `RankExtension.kvrelay_step`."""
        scheduled = self._scheduler_output(order)
        try:
            self._worker.execute_model(scheduled)
            state = self._runner.execute_model_state
        finally:
            self._runner.execute_model_state = None
        rows = self._runner.input_batch.req_id_to_index
        bounds = self._runner.query_start_loc.np
        hidden = [
            state.hidden_states[bounds[row] : bounds[row + 1]] for row in (rows[each.key] for each in order.sequences)
        ]
        # Logits are a collective of all ranks, so all of them walk through the same calls.
        told = [self._prompt_logprobs(each, part) for each, part in zip(order.sequences, hidden, strict=True)]
        if self._worker.rank != 0:
            return None
        results = [
            StepResult(sampled=[], prompt_logprobs=logprobs, pooled=pooled_sum(part, each.first_pooled))
            for each, part, logprobs in zip(order.sequences, hidden, told, strict=True)
        ]
        self._sample(order.sequences, state.logits, results)
        return results

    def _sample(self, sequences: Seq[SequenceOrder], logits: Tensor, results: list[StepResult]) -> None:
        """Choose the due tokens and add them to the results."""
        index = self._runner.input_batch.req_id_to_index
        owners: list[int] = []
        logit_rows: list[int] = []
        sampling_rows: list[SamplingRow] = []
        for i, each in enumerate(sequences):
            if each.sample is None:
                continue
            known = self._open[each.key]
            for j in range(each.sample.num_samples):
                owners.append(i)
                logit_rows.append(index[each.key])
                sampling_rows.append(
                    SamplingRow(
                        params=known.sampling,
                        sample_index=each.sample.sample_index + j,
                        token_index=each.sample.token_index,
                        prompt_token_ids=known.prompt_token_ids,
                        output_token_ids=known.output_token_ids,
                        owner=known,
                        allowed=each.sample.allowed,
                    )
                )
        if owners:
            sampled = self._sampler.sample(logits[torch.tensor(logit_rows, device=logits.device)], sampling_rows)
            for i, token in zip(owners, sampled, strict=True):
                results[i].sampled.append(token)

    def _prompt_logprobs(self, order: SequenceOrder, hidden: Tensor) -> list[Any]:
        return prompt_logprobs(self._runner.model.compute_logits, hidden, order.targets, order.num_top)

    def _scheduler_output(self, order: StepOrder) -> Any:
        """Return vLLM's record of a step, and write what vLLM's scheduler would not: tokens chosen elsewhere."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        for key in order.closed:
            self._open.pop(key, None)
        requests = _Requests()
        for each in order.sequences:
            if each.opened is not None:
                self._open_sequence(each, requests)
            else:
                self._continue_sequence(each, requests)
        scheduled = SchedulerOutput.make_empty()
        scheduled.finished_req_ids = set(order.closed)
        scheduled.scheduled_new_reqs = requests.new
        scheduled.scheduled_cached_reqs = CachedRequestData(
            req_ids=requests.cached_ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=requests.cached_blocks,
            num_computed_tokens=requests.cached_num_computed,
            num_output_tokens=requests.cached_num_output,
        )
        scheduled.num_scheduled_tokens = {each.key: each.num_new_tokens for each in order.sequences}
        scheduled.total_num_scheduled_tokens = sum(each.num_new_tokens for each in order.sequences)
        return scheduled

    def _open_sequence(self, order: SequenceOrder, requests: _Requests) -> None:
        from vllm.v1.core.sched.output import NewRequestData

        opened = order.opened
        assert opened is not None
        self._open[order.key] = _Open(opened.sampling, opened.prompt_token_ids, opened.output_token_ids[:])
        # To vLLM everything that is known when it opens is prompt.
        token_ids = (opened.prompt_token_ids + opened.output_token_ids).tolist()
        requests.new.append(
            NewRequestData(
                req_id=order.key,
                prompt_token_ids=token_ids,
                prefill_token_ids=token_ids,
                mm_features=[],
                sampling_params=self._unsampled,
                pooling_params=None,
                block_ids=(order.new_blocks.tolist(),),
                num_computed_tokens=order.num_computed,
                lora_request=None,
            )
        )

    def _continue_sequence(self, order: SequenceOrder, requests: _Requests) -> None:
        self._open[order.key].output_token_ids.extend(order.new_output)
        request = self._runner.requests[order.key]
        request.output_token_ids.extend(order.new_output)
        batch = self._runner.input_batch
        row = batch.req_id_to_index.get(order.key)
        if row is not None and order.new_output:  # else vLLM copies them when it adds the row again
            begin = batch.num_tokens_no_spec[row]
            end = begin + len(order.new_output)
            batch.token_ids_cpu[row, begin:end] = order.new_output
            batch.is_token_ids[row, begin:end] = True
            batch.num_tokens_no_spec[row] = end
        requests.cached_ids.append(order.key)
        requests.cached_blocks.append((order.new_blocks.tolist(),) if order.new_blocks else None)
        requests.cached_num_computed.append(order.num_computed)
        requests.cached_num_output.append(len(request.output_token_ids))

    def _bind(self, layers: list[Any], setup: RankSetup) -> None:
        """Let the layers compute on this rank's heads in the region of all ranks; vLLM's own pages are freed."""
        shape = setup.shape
        own = self._runner.kv_caches[0]
        num_own_heads = own.shape[1]
        pages = map_region(setup.region_path, shape, setup.num_blocks, own.dtype)
        pages = pages.view(*pages.shape[:3], *own.shape[2:])
        # With more ranks than heads, vLLM gives neighbours the same head, and they write the same values.
        first_head = self._worker.rank * shape.num_kv_heads // self._worker.parallel_config.tensor_parallel_size
        for i, layer in enumerate(layers):
            view = pages[i, :, first_head : first_head + num_own_heads]
            layer.bind_kv_cache(view)
            self._runner.kv_caches[i] = view


def forget_shared_names() -> None:
    """Unlink the memory by which vLLM's processes of one worker talk, once all have mapped it.

    vLLM and Python leave the names behind, and with them the memory, when a process is killed and its helper with it.
    """
    group = os.environ.get("VLLM_DIST_IDENT")
    names = set(_SHARED_MEMORY.glob(f"{glob.escape(group)}-*")) if group else set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = Path(f"/{line.partition('/')[2]}")
        if path.parent == _SHARED_MEMORY and path.name.startswith(_PYTHON_NAMES):
            names.add(path)
    for path in names:
        path.unlink(missing_ok=True)  # another rank may have been first


def _end_with_parent() -> None:
    """End this process as soon as the worker that has started it is over, by SIGKILL too.

    vLLM's ranks notice that by themselves, and then take half a minute to end.
    """
    if hasattr(os, "pidfd_open"):
        parent = os.pidfd_open(os.getppid())
        threading.Thread(target=_await_end, args=(parent,), name="end with parent", daemon=True).start()


def _await_end(parent: int) -> None:
    select.select([parent], [], [])
    os._exit(_EXIT_ORPHANED)


def _attention_layers(runner: Any) -> list[Any]:
    """Return the attention layers in the order of the model."""
    from vllm.model_executor.models.utils import extract_layer_index

    context = runner.compilation_config.static_forward_context
    (group,) = runner.kv_cache_config.kv_cache_groups
    return [context[name] for name in sorted(group.layer_names, key=extract_layer_index)]
