"""The connector's half in vLLM's scheduler: decides what is offered and what is pulled, by bookkeeping alone.

An offer begins when its request arrives, so that a puller may wait for it, and grows with every chunk of the prompt.

A prompt is named by our chained hash of all its blocks, the partly filled last one included, which both servers compute
for themselves. So a handoff of another prompt never passes for this one's, whatever a request says.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.block_hash import extend_hash, hash_blocks, hash_root
from common.ids import BlockHash, BlockId
from engine.vllm.connector.orders import Chunk, Offer, Prompt, Pull, RankAddress, Source, StepOrders, Wish

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledStep:
    """The part of vLLM's decision about a step that is used here."""

    num_tokens: Mapping[str, int]
    """Tokens to compute, by request id."""
    block_ids_of: Callable[[str], Sequence[int]]
    """Returns the pages of a request in this step."""
    preempted: Collection[str]


@dataclass(slots=True, kw_only=True)
class _Offered:
    """An offer of a request that has not ended."""

    offer: Offer
    request: EngineRequest
    num_blocks: int = 0
    """Blocks that chunks have had so far."""


class OrderBook:
    """Offers and pulls of one server. Scheduler's thread only."""

    def __init__(self, *, fingerprint: str, block_size: int, kv_role: str) -> None:
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._kv_role = kv_role
        self._ranks: tuple[RankAddress, ...] = ()
        self._sources: dict[str, Source] = {}
        """Sources of requests that have not pulled, by request id."""
        self._offered: dict[str, _Offered] = {}
        """Offers by request id."""
        self._offers: list[Offer] = []
        self._ended: list[str] = []
        self._pulls: list[Pull] = []

    def set_ranks(self, ranks: Sequence[RankAddress]) -> None:
        """Take the listeners of our own ranks, in order."""
        self._ranks = tuple(ranks)

    def expect(self, request: EngineRequest) -> None:
        """Note what a new request asks for. A pull or offer that cannot be is logged, and the prompt computed here."""
        try:
            source = self._source_of(request)
            if source is not None:
                self._sources[request.request_id] = source
        except ValueError as error:
            logger.warning("cannot pull the prompt of %s: %s; it is computed here", request.request_id, error)
        try:
            offer = self._offer_of(request)
            if offer is not None:
                self._offers.append(offer)
                self._offered[request.request_id] = _Offered(offer=offer, request=request)
        except ValueError as error:
            logger.warning("cannot offer the prompt of %s: %s", request.request_id, error)

    def _source_of(self, request: EngineRequest) -> Source | None:
        source = Source.from_params(request.kv_transfer_params, num_ranks=len(self._ranks))
        if source is None:
            return None
        if self._kv_role == "kv_producer":
            raise ValueError("its kv_role is kv_producer")
        _check_handoff(request)
        return source

    def _offer_of(self, request: EngineRequest) -> Offer | None:
        wish = Wish.from_params(request.kv_transfer_params, num_ranks=len(self._ranks))
        if wish is None:
            return None
        if self._kv_role == "kv_consumer":
            raise ValueError("its kv_role is kv_consumer")
        if request.request_id in self._sources:  # vLLM ends one transfer of a request, not two
            raise ValueError("it is pulled from another server; offer it there")
        _check_handoff(request)
        return Offer(request_id=request.request_id, wish=wish, prompt=self._prompt_of(request))

    def num_matched(self, request: EngineRequest, num_computed: int) -> int:
        """Return the tokens of the prompt that can be pulled beyond those that are here."""
        return self._num_prompt_tokens(request) - num_computed if request.request_id in self._sources else 0

    def allocated(self, request: EngineRequest, block_ids: Sequence[int], num_matched: int) -> None:
        """Order the pull into pages that vLLM has allocated. A second call, without matched tokens, changes nothing."""
        if num_matched == 0:
            return
        num_here = self._num_prompt_tokens(request) - num_matched
        prompt = self._prompt_of(request)
        pull = Pull(
            request_id=request.request_id,
            source=self._sources.pop(request.request_id),
            prompt=prompt,
            block_ids=tuple(map(BlockId, block_ids[: prompt.num_blocks])),
            first_block=num_here // self._block_size,
        )
        self._pulls.append(pull)

    def finished(self, request: EngineRequest) -> tuple[bool, dict[str, Any] | None]:
        """Return whether its pages stay until they are copied, and the `kv_transfer_params` of the answer."""
        self._sources.pop(request.request_id, None)
        offered = self._offered.pop(request.request_id, None)
        if offered is None:
            return False, None
        self._ended.append(request.request_id)
        if offered.num_blocks < offered.offer.prompt.num_blocks:
            return True, None
        wish = offered.offer.wish
        return True, Source(handoff_id=wish.handoff_id, ranks=self._ranks, num_pullers=wish.num_pullers).to_params()

    def take_orders(self, step: ScheduledStep) -> StepOrders:
        """Return the orders that go with a step."""
        orders = StepOrders(
            preempted=tuple(each for each in step.preempted if each in self._offered),
            offers=tuple(self._offers),
            chunks=tuple(
                chunk
                for request_id, num_tokens in step.num_tokens.items()
                if (chunk := self._chunk(request_id, num_tokens, step)) is not None
            ),
            ended=tuple(self._ended),
            pulls=tuple(self._pulls),
            is_idle=not step.num_tokens,
        )
        self._offers, self._ended, self._pulls = [], [], []
        return orders

    def _chunk(self, request_id: str, num_scheduled: int, step: ScheduledStep) -> Chunk | None:
        """Return what a step adds to an offer; after a preemption, nothing for a while."""
        offered = self._offered.get(request_id)
        if offered is None:
            return None
        prompt = offered.offer.prompt
        num_tokens = min(prompt.num_tokens, offered.request.num_computed_tokens + num_scheduled)
        is_whole = num_tokens == prompt.num_tokens
        num_blocks = prompt.num_blocks if is_whole else num_tokens // self._block_size
        if num_blocks <= offered.num_blocks:
            return None
        block_ids = step.block_ids_of(request_id)[offered.num_blocks : num_blocks]
        offered.num_blocks = num_blocks
        return Chunk(request_id=request_id, block_ids=tuple(map(BlockId, block_ids)), num_tokens=num_tokens)

    def _prompt_of(self, request: EngineRequest) -> Prompt:
        num_tokens = self._num_prompt_tokens(request)
        return Prompt(
            num_tokens=num_tokens,
            num_blocks=-(-num_tokens // self._block_size),
            last_hash=self._last_hash(request),
        )

    def _last_hash(self, request: EngineRequest) -> BlockHash:
        token_ids = request.prompt_token_ids
        assert token_ids, "`_check_handoff` has looked"
        root = hash_root(model_fingerprint=self._fingerprint, cache_salt=request.cache_salt or "")
        hashes = hash_blocks(token_ids, root=root, block_size=self._block_size)
        tail = token_ids[len(hashes) * self._block_size :]
        return extend_hash(hashes[-1] if hashes else root, tail) if tail else hashes[-1]

    @staticmethod
    def _num_prompt_tokens(request: EngineRequest) -> int:
        return len(request.prompt_token_ids or ())


def _check_handoff(request: EngineRequest) -> None:
    """Raise ValueError for a prompt that cannot be handed over."""
    if not request.prompt_token_ids or request.prompt_embeds is not None or request.mm_features:
        raise ValueError("only prompts of tokens are handed over, not images, sounds or embeddings")
    if request.lora_request is not None:
        raise ValueError("prompts of LoRA adapters are not handed over")
