"""The connector's half in vLLM's scheduler: what ranks copy with each step, and what the worker hears of it.

By bookkeeping alone; vLLM is not imported here.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from common.timing import StepShape
from engine.steps.backlog import num_pairs
from engine.vllm.errands import BlocksStored, Copy, Errand, StepBegun, StepEnded, StepErrands


class _Open:
    """A request that vLLM's scheduler knows."""

    def __init__(self, errand: Errand, num_prompt_tokens: int) -> None:
        self.errand = errand
        self.num_prompt_tokens = num_prompt_tokens
        self.is_started = False
        self.is_loaded = errand.num_loaded == 0
        self.num_stored = 0
        """Leading blocks of its prompt that are in their slots."""


class StepBook:
    """Errands of one engine's requests. Scheduler's thread only; the requests are vLLM's."""

    def __init__(self, *, block_size: int, pool: Callable[[], Any], tables: Callable[[str], list[int]]) -> None:
        """`pool`: vLLM's block pool; `tables`: pages of a request."""
        self._block_size = block_size
        self._pool = pool
        self._tables = tables
        self._open: dict[str, _Open] = {}
        self._loads: list[Copy] = []
        self._exports: list[Errand] = []
        self._closed: list[int] = []
        self._cache_events: list[Any] = []
        self._begun_s: deque[float] = deque()
        """Times at which the steps that have not ended were planned."""
        self._ended_s = 0.0
        self._region_path = ""

    def opened(self, request: Any) -> None:
        """Take a new request."""
        errand = Errand.from_params(request.kv_transfer_params)
        self._open[request.request_id] = _Open(errand, request.num_prompt_tokens)
        self._region_path = errand.region_path or self._region_path
        if errand.exports:
            self._exports.append(errand)

    def num_matched(self, request: Any, num_computed: int) -> int | None:
        """Return the tokens in slots beyond those that vLLM has in its cache; None: it is not to be scheduled."""
        known = self._open[request.request_id]
        if known.errand.exports:
            return None
        if known.is_loaded or num_computed < known.errand.num_presumed:
            return 0
        return max(0, known.errand.num_loaded - num_computed)

    def allocated(self, request: Any, block_ids: list[int], num_matched: int) -> None:
        """Order the copy of slots into pages that vLLM has allocated; a request loads once, whatever it loses later."""
        known = self._open[request.request_id]
        if known.is_loaded:
            return
        known.is_loaded = True
        num_tokens = known.errand.num_loaded
        stop = -(-num_tokens // self._block_size)
        first = (num_tokens - num_matched) // self._block_size if num_matched else stop
        self._loads.append(_copy(known.errand, block_ids, slice(first, stop), num_tokens))

    def closed(self, request: Any) -> None:
        """Forget a request that is over; the ranks forget it with the next step."""
        self._closed.append(self._open.pop(request.request_id).errand.key)

    def hear_cache(self) -> None:
        """Take the events of the prefix cache so far, before vLLM's scheduler drops them."""
        self._cache_events += self._pool().take_events()

    def plan(self, scheduled: Any, requests: dict[str, Any]) -> tuple[StepErrands, StepBegun]:
        """Return what ranks do with a step that vLLM has planned, and the report of it."""
        self._begun_s.append(time.monotonic())
        # What is cached once a step is planned is whole behind it, and no step before the next one overwrites it.
        stores = [self._export(errand) for errand in self._exports]
        started: list[tuple[int, int]] = []
        computed: list[tuple[int, int]] = []
        num_prefill_tokens = pairs = num_decodes = num_context_tokens = 0
        for request_id, num_new in scheduled.num_scheduled_tokens.items():
            known, num_before = self._open[request_id], requests[request_id].num_computed_tokens
            if not known.is_started:
                known.is_started = True
                started.append((known.errand.key, num_before))
            if num_before + 1 < known.num_prompt_tokens or num_new > 1 or known.errand.stores:
                num_prefill_tokens += num_new
                pairs += num_pairs(num_new, num_before)
                computed.append((known.errand.key, num_before + num_new))
            else:
                num_decodes += 1
                num_context_tokens += num_before + 1
            if known.errand.stores and (store := self._store(request_id, known, num_before + num_new)) is not None:
                stores.append(store)
        preempted = [self._open[each] for each in scheduled.preempted_req_ids or () if each in self._open]
        for known in preempted:
            known.is_started = False
        errands = StepErrands(
            region_path=self._region_path,
            loads=tuple(self._loads),
            stores=tuple(stores),
            closed=tuple(self._closed),
        )
        self.hear_cache()
        changes, is_cleared = cache_changes(self._cache_events, self._block_size)
        self._loads, self._exports, self._closed, self._cache_events = [], [], [], []
        begun = StepBegun(
            shape=StepShape(
                num_prefill_tokens=num_prefill_tokens,
                num_prefill_pairs=pairs,
                num_decodes=num_decodes,
                num_context_tokens=num_context_tokens,
            ),
            started=tuple(started),
            computed=tuple(computed),
            changes=tuple(changes),
            is_cleared=is_cleared,
            preempted=tuple(known.errand.key for known in preempted),
            num_free_pages=self._pool().get_num_free_blocks(),
        )
        return errands, begun

    def ended(self) -> StepEnded | None:
        """Return the report of the oldest step's end; steps that overlap last from the end of the one before."""
        if not self._begun_s:
            return None
        now_s, since_s = time.monotonic(), max(self._begun_s.popleft(), self._ended_s)
        self._ended_s = now_s
        return StepEnded(seconds=now_s - since_s)

    def _export(self, errand: Errand) -> Copy:
        """Return the copy of the leading ones of some blocks that are in vLLM's cache."""
        block_ids: list[int] = []
        for name in errand.exports:
            found = self._pool().get_cached_block(name, [0])
            if found is None:
                break
            block_ids.append(found[0].block_id)
        return _copy(errand, block_ids, slice(0, len(block_ids)), len(block_ids) * self._block_size)

    def _store(self, request_id: str, known: _Open, num_computed: int) -> Copy | None:
        """Return the copy of the blocks that are final once so many tokens are computed; None: there are none."""
        num_tokens = min(num_computed, known.num_prompt_tokens)
        num_blocks = num_tokens // self._block_size
        if num_tokens == known.num_prompt_tokens:
            num_blocks = len(known.errand.slots)
        blocks = slice(known.num_stored, num_blocks)
        if blocks.start >= blocks.stop:
            return None
        known.num_stored = num_blocks
        return _copy(known.errand, self._tables(request_id), blocks, num_tokens)


def _copy(errand: Errand, block_ids: list[int], blocks: slice, num_tokens: int) -> Copy:
    return Copy(key=errand.key, block_ids=tuple(block_ids[blocks]), slots=errand.slots[blocks], num_tokens=num_tokens)


def cache_changes(events: Iterable[Any], block_size: int) -> tuple[list[BlocksStored | bytes], bool]:
    """Return the changes of vLLM's prefix cache, and whether it was emptied before them."""
    changes: list[BlocksStored | bytes] = []
    is_cleared = False
    for event in events:
        match type(event).__name__:
            case "BlockStored" if event.block_size == block_size:
                first = event.extra_keys[0] if event.extra_keys else None
                stored = BlocksStored(
                    hashes=tuple(event.block_hashes),
                    parent=event.parent_block_hash,
                    salt=first[0] if first else "",
                    token_ids=tuple(event.token_ids),
                )
                changes.append(stored)
            case "BlockRemoved":
                changes += event.block_hashes
            case "AllBlocksCleared":
                changes, is_cleared = [], True
    return changes, is_cleared
