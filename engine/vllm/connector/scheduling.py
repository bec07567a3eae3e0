"""The connector's half in vLLM's scheduler: decides what is offered and what is pulled, by bookkeeping alone.

A prompt is named by our chained hash of all its blocks, the partly filled last one included, which both servers compute
for themselves. So a handoff of another prompt never passes for this one's, whatever a request says.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from common.block_hash import extend_hash, hash_blocks, hash_root
from common.ids import BlockHash, BlockId, mint_handoff_id
from engine.vllm.connector.orders import Offer, PromptPages, Pull, RankAddress, Source, StepOrders, asks_for_offer

logger = logging.getLogger(__name__)

_WHOLE = ("stop", "length")
"""Reasons by which a request ends with its prompt computed."""


class EngineRequest(Protocol):
    """The part of vLLM's request that is used here."""

    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    mm_features: Any
    lora_request: Any
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int

    def get_finished_reason(self) -> Any:
        """Return an enum whose text is the reason; None before the end."""
        ...


class OrderBook:
    """Offers and pulls of one server. Scheduler's thread only."""

    def __init__(self, *, fingerprint: str, block_size: int, kv_role: str) -> None:
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._kv_role = kv_role
        self._ranks: tuple[RankAddress, ...] = ()
        self._sources: dict[str, Source] = {}
        """Sources of requests that have not pulled, by request id."""
        self._offers: list[Offer] = []
        self._pulls: list[Pull] = []

    def set_ranks(self, ranks: Sequence[RankAddress]) -> None:
        """Take the listeners of our own ranks, in order."""
        self._ranks = tuple(ranks)

    def expect(self, request: EngineRequest) -> None:
        """Note the source of a new request. One that cannot be pulled from is logged, and the prompt computed here."""
        try:
            source = Source.from_params(request.kv_transfer_params)
            if source is None:
                return
            if self._kv_role == "kv_producer":
                raise ValueError("its kv_role is kv_producer")
            if len(source.ranks) != len(self._ranks):
                raise ValueError(f"the source has {len(source.ranks)} ranks and this server {len(self._ranks)}")
            if (reason := _no_handoff(request)) is not None:
                raise ValueError(reason)
        except ValueError as error:
            logger.warning("cannot pull the prompt of %s: %s; it is computed here", request.request_id, error)
            return
        self._sources[request.request_id] = source

    def num_matched(self, request: EngineRequest, num_computed: int) -> int:
        """Return the tokens of the prompt that can be pulled beyond those that are here."""
        return self._num_prompt_tokens(request) - num_computed if request.request_id in self._sources else 0

    def allocated(self, request: EngineRequest, block_ids: Sequence[int], num_matched: int) -> None:
        """Order the pull into pages that vLLM has allocated. A second call, without matched tokens, changes nothing."""
        if num_matched == 0:
            return
        num_here = self._num_prompt_tokens(request) - num_matched
        pull = Pull(
            request_id=request.request_id,
            source=self._sources.pop(request.request_id),
            pages=self._pages(request, block_ids),
            first_block=num_here // self._block_size,
        )
        self._pulls.append(pull)

    def finished(self, request: EngineRequest, block_ids: Sequence[int]) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` of the answer when its pages are offered: they are then not free yet."""
        self._sources.pop(request.request_id, None)
        if not asks_for_offer(request.kv_transfer_params):
            return None
        if (reason := self._not_offered(request)) is not None:
            logger.warning("cannot offer the prompt of %s: %s", request.request_id, reason)
            return None
        handoff_id = mint_handoff_id()
        pages = self._pages(request, block_ids)
        self._offers.append(Offer(request_id=request.request_id, handoff_id=handoff_id, pages=pages))
        return Source(handoff_id=handoff_id, ranks=self._ranks).to_params()

    def take_orders(self) -> StepOrders:
        """Return the orders that go with the next step."""
        orders = StepOrders(offers=tuple(self._offers), pulls=tuple(self._pulls))
        self._offers, self._pulls = [], []
        return orders

    def _not_offered(self, request: EngineRequest) -> str | None:
        if self._kv_role == "kv_consumer":
            return "its kv_role is kv_consumer"
        reason = str(request.get_finished_reason())
        if reason not in _WHOLE or request.num_computed_tokens < self._num_prompt_tokens(request):
            return f"it ended before the prompt was computed ({reason})"
        return _no_handoff(request)

    def _pages(self, request: EngineRequest, block_ids: Sequence[int]) -> PromptPages:
        num_tokens = self._num_prompt_tokens(request)
        num_blocks = -(-num_tokens // self._block_size)
        return PromptPages(
            num_tokens=num_tokens,
            last_hash=self._last_hash(request),
            block_ids=tuple(map(BlockId, block_ids[:num_blocks])),
        )

    def _last_hash(self, request: EngineRequest) -> BlockHash:
        token_ids = request.prompt_token_ids
        assert token_ids, "`_no_handoff` has looked"
        root = hash_root(model_fingerprint=self._fingerprint, cache_salt=request.cache_salt or "")
        hashes = hash_blocks(token_ids, root=root, block_size=self._block_size)
        tail = token_ids[len(hashes) * self._block_size :]
        return extend_hash(hashes[-1] if hashes else root, tail) if tail else hashes[-1]

    @staticmethod
    def _num_prompt_tokens(request: EngineRequest) -> int:
        return len(request.prompt_token_ids or ())


def _no_handoff(request: EngineRequest) -> str | None:
    """Return why a prompt cannot be handed over; None when it can."""
    if not request.prompt_token_ids or request.prompt_embeds is not None or request.mm_features:
        return "only prompts of tokens are handed over, not images, sounds or embeddings"
    if request.lora_request is not None:
        return "prompts of LoRA adapters are not handed over"
    return None
