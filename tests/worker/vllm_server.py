"""A server with vLLM's scheduling and our connector, and no model.

A page's KV is a function of the tokens up to each position, as it is of a model. An answer is right when, at the end of
its prompt, all pages of the prompt hold it. Freed pages are scribbled over by the next step, as by other requests.
"""

import random
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from common.ids import BlockId
from engine.vllm.connector.pages import RankPages, copies_of, page_tensors, shape_of
from engine.vllm.connector.routes import RankPlace
from engine.vllm.connector.scheduling import OrderBook, ScheduledStep
from worker.connector_config import ConnectorConfig
from worker.rank_endpoint import RankEndpoint

BLOCK_SIZE = 4
NUM_BLOCKS = 48
NUM_HEADS = 3
CHUNK = 8
LEASE_TTL_S = 0.3
_COPY_S = 0.005


@dataclass(eq=False)
class Request:
    """A request of vLLM."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None
    prompt_embeds: Any = None
    mm_features: Any = ()
    lora_request: Any = None
    cache_salt: str | None = None
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_loading: bool = False
    is_finished: bool = False
    waits_for: set[int] = field(default_factory=set)
    """Ranks that have not told the end of its transfer."""
    answer: dict[str, Any] | None = None

    @property
    def prompt(self) -> list[int]:
        assert self.prompt_token_ids is not None
        return self.prompt_token_ids

    @property
    def num_blocks(self) -> int:
        return -(-len(self.prompt) // BLOCK_SIZE)

    def kv(self) -> torch.Tensor:
        """Return the KV of the prompt, [blocks, heads, block]; unused places are 0."""
        data = np.array(self.prompt, dtype=np.uint16).tobytes()
        hashes = [zlib.crc32(data[: 2 * i + 2]) % (1 << 16) for i in range(len(self.prompt))]
        tokens = torch.zeros(self.num_blocks * BLOCK_SIZE)
        tokens[: len(hashes)] = torch.tensor(hashes, dtype=torch.float32)
        heads = torch.arange(1, NUM_HEADS + 1)[None, :, None]
        return tokens.view(self.num_blocks, 1, BLOCK_SIZE) * heads


class SlowPages(RankPages):
    """Pages whose copies take as long as steps do."""

    def stage(self, block_ids: Seq[BlockId], heads: range, slots: Seq[BlockId]) -> None:
        time.sleep(random.random() * _COPY_S)
        super().stage(block_ids, heads, slots)

    def write_blocks(self, block_ids: Seq[BlockId], data: memoryview) -> None:
        time.sleep(random.random() * _COPY_S)
        super().write_blocks(block_ids, data)


class Server:
    """One server: its scheduler, its ranks and their pages."""

    def __init__(self, num_ranks: int, **config: Any) -> None:
        self._config = ConnectorConfig(lease_ttl_s=LEASE_TTL_S, pull_timeout_s=2.0, **config)
        self._places = [RankPlace(rank=i, num_ranks=num_ranks, num_heads=NUM_HEADS) for i in range(num_ranks)]
        self.free = list(range(NUM_BLOCKS))
        self.waiting: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.preempt: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._finished: set[str] = set()
        self._scribbled: list[int] = []
        self._start()

    def _start(self) -> None:
        self.layers = [torch.zeros(NUM_BLOCKS, len(place.heads), BLOCK_SIZE, 2) for place in self._places]
        self.pages: list[RankPages] = []
        for layer in self.layers:
            layers = page_tensors({"layer": layer}, NUM_BLOCKS)
            shape = shape_of(layers, block_size=BLOCK_SIZE, fingerprint="f")
            self.pages.append(SlowPages(copies_of(layers), shape, num_slots=64 * NUM_HEADS))
        self.ranks = [
            RankEndpoint(pages, self._config, place) for pages, place in zip(self.pages, self._places, strict=True)
        ]
        self.book = OrderBook(fingerprint="m", block_size=BLOCK_SIZE, kv_role="kv_both")
        self.book.set_ranks([rank.address for rank in self.ranks])

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def restart(self) -> None:
        """Lose everything, as by `kill -9`."""
        self.close()
        self.free, self.waiting, self.requests = list(range(NUM_BLOCKS)), [], {}
        self._finished, self._scribbled = set(), []
        self._start()

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.book.expect(request)

    def abort(self, request: Request) -> None:
        if self.requests.get(request.request_id) is request and not request.is_finished:
            self._finish(request)

    def step(self) -> None:
        """Schedule, compute, and take what the ranks tell, in vLLM's order."""
        preempted = self._preempt()
        self._admit()
        running = [each for each in self.requests.values() if each.block_ids and not each.is_loading]
        running = [each for each in running if not each.is_finished]
        num_tokens = {each.request_id: min(CHUNK, len(each.prompt) - each.num_computed_tokens) for each in running}
        block_ids_of = {each.request_id: list(each.block_ids) for each in running}
        orders = self.book.take_orders(
            ScheduledStep(num_tokens=num_tokens, block_ids_of=block_ids_of.__getitem__, preempted=preempted)
        )
        finished, self._finished = self._finished, set()
        offered, pulled, invalid_blocks = [], [], set[int]()
        for rank in self.ranks:
            rank.settle(orders.preempted)
            for offer in orders.offers:
                rank.begin(offer)
        self._compute(num_tokens)
        for idx, rank in enumerate(self.ranks):
            for pull in orders.pulls:
                rank.pull(pull, None)
            for chunk in orders.chunks:
                rank.add(chunk, None)
            rank.end(orders.ended)
            rank.cancel(finished)
            results = rank.take_results()
            offered += [(idx, each) for each in results.offered]
            pulled += [(idx, each) for each in results.pulled]
            invalid_blocks |= results.invalid_blocks
        self._fail(invalid_blocks)
        for request in running:
            request.num_computed_tokens += num_tokens[request.request_id]
            if request.num_computed_tokens == len(request.prompt):
                self._answer(request)
        for idx, request_id in offered + pulled:
            self._told(self.requests[request_id], idx)

    def _preempt(self) -> list[str]:
        chosen = [self.requests[each] for each in self.preempt if each in self.requests]
        chosen = [each for each in chosen if each.block_ids and not each.is_loading and not each.is_finished]
        for request in chosen:
            self._release(request)
            request.num_computed_tokens = 0
            self.waiting.append(request)
            self.preempt.discard(request.request_id)
        return [each.request_id for each in chosen]

    def _admit(self) -> None:
        while self.waiting and len(self.free) >= self.waiting[0].num_blocks:
            request = self.waiting.pop(0)
            request.block_ids = [self.free.pop() for _ in range(request.num_blocks)]
            num_matched = self.book.num_matched(request, 0)
            self.book.allocated(request, request.block_ids, num_matched)
            if num_matched:
                request.is_loading = True
                request.num_computed_tokens = num_matched
                request.waits_for = set(range(len(self.ranks)))

    def _compute(self, num_tokens: dict[str, int]) -> None:
        for layer in self.layers:
            layer[self._scribbled] = -1.0
        self._scribbled = []
        for request_id, num_new in num_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens
            first, stop = start // BLOCK_SIZE, -(-(start + num_new) // BLOCK_SIZE)
            token = torch.arange(first * BLOCK_SIZE, stop * BLOCK_SIZE).view(-1, 1, BLOCK_SIZE, 1)
            kv = request.kv()[first:stop, :, :, None]
            for layer, place in zip(self.layers, self._places, strict=True):
                before = layer[request.block_ids[first:stop]]
                is_new = (token >= start) & (token < start + num_new)
                layer[request.block_ids[first:stop]] = torch.where(is_new, kv[:, list(place.heads)], before)

    def _fail(self, invalid_blocks: set[int]) -> None:
        for request in self.requests.values():
            bad = [i for i, block_id in enumerate(request.block_ids) if block_id in invalid_blocks]
            if bad:
                assert request.is_loading, "only pages that are being filled can be bad"
                request.num_computed_tokens = min(request.num_computed_tokens, bad[0] * BLOCK_SIZE)
                self.counts["recomputed"] += 1

    def _answer(self, request: Request) -> None:
        kv, last = request.kv(), len(request.prompt) - (request.num_blocks - 1) * BLOCK_SIZE
        for layer, place in zip(self.layers, self._places, strict=True):
            found, right = layer[request.block_ids][..., 0], kv[:, list(place.heads)]
            is_right = torch.equal(found[:-1], right[:-1]) and torch.equal(found[-1, :, :last], right[-1, :, :last])
            self.counts["right" if is_right else "wrong"] += 1
        self._finish(request)

    def _finish(self, request: Request) -> None:
        request.is_finished = True
        if request in self.waiting:
            self.waiting.remove(request)
        stays, request.answer = self.book.finished(request)
        self._finished.add(request.request_id)
        if stays:
            request.waits_for = set(range(len(self.ranks)))
        if not request.waits_for:
            self._forget(request)

    def _told(self, request: Request, rank: int) -> None:
        request.waits_for.remove(rank)
        if request.waits_for:
            return
        if request.is_finished:
            self._forget(request)
        else:
            assert request.is_loading
            request.is_loading = False
            self.counts["pulled"] += request.num_computed_tokens == len(request.prompt)
            request.num_computed_tokens = min(request.num_computed_tokens, len(request.prompt) - 1)

    def _forget(self, request: Request) -> None:
        self._release(request)
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        self._scribbled += request.block_ids
        self.free += request.block_ids
        request.block_ids = []


@contextmanager
def serving(num_ranks: int, **config: Any) -> Iterator[Server]:
    made = Server(num_ranks, **config)
    try:
        yield made
    finally:
        made.close()
