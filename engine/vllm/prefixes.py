"""Cached blocks that travel between vLLMs, by way of staged blocks.

*Out*: pages of the cache are copied into slots within one step of vLLM (`exports.py`), so that none is held while a
puller reads. *In*: a pull fills slots, and the request whose prefix they are brings them into vLLM, which caches them
under its own names, like blocks that it has computed. Until then they are *coming*: requests behind it do not pull them
again.
"""

from array import array
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from common.block_hash import BlockHashes, PrefixTokens
from common.errors import PromptTooLong, Refused
from common.ids import BlockId, mint_request_id
from common.sampling import SamplingParams
from common.tokens import as_tokens
from engine.request import EngineRequest
from engine.steps.group import Group, Sink
from engine.steps.landing import Landing, Pinned
from engine.vllm.cache_mirror import CacheMirror
from engine.vllm.staging import StagedStore
from engine.vllm.work import Work

_RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSlots:
    """See the module; an `engine.interface.PrefixPages`. Event loop only."""

    kv: StagedStore
    mirror: CacheMirror
    entered: Iterable[Work]
    """Requests that are here."""
    export: Callable[[tuple[bytes, ...], tuple[BlockId, ...]], Awaitable[int]]
    """Copies cached blocks, by vLLM's names, into slots; returns how many leading ones vLLM still had."""
    add: Callable[[EngineRequest, Sink, Landing], Group | Refused]
    """See `Engine`."""
    num_empty: Callable[[], int]
    """Returns the pages of vLLM that are neither used nor cached."""
    _landed: dict[Landing, None] = field(default_factory=dict)
    """Landings with verified blocks whose requests have not entered."""
    _alone: dict[Landing, None] = field(default_factory=dict)
    """Landings without a request."""

    async def pin(self, hashes: BlockHashes) -> Pinned:
        """See `EngineDriver`. Not to be cancelled."""
        names = self.mirror.vllm_names(hashes)[: self.kv.num_free]
        if not names:
            return Pinned()
        prefix = self.mirror.tokens(hashes[: len(names)])
        slots = self.kv.take(len(names))
        num_blocks = await self.export(names, slots)
        self.kv.free(slots[num_blocks:])
        token_ids = prefix.token_ids[: num_blocks * self.kv.shape.block_size]
        return Pinned(block_ids=slots[:num_blocks], prefix=replace(prefix, token_ids=token_ids))

    def unpin(self, pinned: Pinned) -> None:
        """See `PrefixPages`."""
        self.kv.free(pinned.block_ids)

    def reserve(self, landing: Landing) -> Refused | None:
        """See `PrefixPages`; the slots of blocks that are cached stay empty."""
        assert not landing.block_table, "slots are granted already"
        landing.num_cached_blocks = landing.num_landed_blocks = self._num_here(landing.hashes)
        if landing.num_missing_blocks == 0:
            return None
        if len(landing.hashes) > self.kv.num_free:
            reason = f"{self.kv.num_free} staged blocks are free; too few for a pull"
            return Refused(reason=reason, retry_after_s=_RETRY_AFTER_S)
        landing.block_table = array("i", self.kv.take(len(landing.hashes)))
        return None

    def reserve_below(self, landing: Landing, values: Seq[float], max_blocks: int) -> Refused | None:
        """See `PrefixPages`; only for pages of vLLM that are empty, since it evicts others whatever they are worth."""
        num_here = self._num_here(landing.hashes)
        landing.hashes = landing.hashes[: num_here + min(max_blocks, self.num_empty())]
        if num_here and len(landing.hashes) == num_here:
            landing.num_cached_blocks = landing.num_landed_blocks = num_here
            return None
        if not landing.hashes:
            return Refused(reason="no page is empty", retry_after_s=_RETRY_AFTER_S)
        self._alone[landing] = None
        return self.reserve(landing)

    def mark_reused(self, landing: Landing, num_blocks: int) -> int:
        """Return how many blocks are here; they count as reused when a request has found them here."""
        return landing.num_landed_blocks

    def commit(self, landing: Landing, num_blocks: int, prefix: PrefixTokens | None = None) -> None:
        """See `PrefixPages`. Blocks that no request waits for enter vLLM with a request for them and one more token."""
        landing.num_landed_blocks = num_blocks
        self._landed[landing] = None
        if landing in self._alone and (prefix is None or not self._bring(landing, prefix)):
            landing.num_landed_blocks = landing.num_cached_blocks

    def enter(self, work: Work) -> None:
        """Hand the blocks that were pulled for a request to it."""
        landing = work.landing
        if landing.pulled:
            work.take_pulled(landing.block_ids()[: landing.num_landed_blocks])
            landing.block_table = landing.block_table[landing.num_landed_blocks :]
        self.release(landing)

    def release(self, landing: Landing) -> None:
        """See `PrefixPages`."""
        self.kv.free(landing.block_ids())
        landing.block_table = array("i")
        self._landed.pop(landing, None)
        self._alone.pop(landing, None)

    def _bring(self, landing: Landing, prefix: PrefixTokens) -> bool:
        """Let a request in for blocks that were pulled alone. Returns whether there is room in line."""
        request = EngineRequest(
            request_id=mint_request_id(),
            prompt_token_ids=prefix.token_ids + as_tokens((0,)),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            hash_root=prefix.root,
            block_hashes=landing.hashes[: landing.num_landed_blocks],
        )
        try:
            return isinstance(self.add(request, lambda _event: None, landing), Group)
        except PromptTooLong:
            return False

    def _num_here(self, hashes: BlockHashes) -> int:
        """Return the leading blocks that are cached, or coming."""
        num_cached = len(self.mirror.vllm_names(hashes))
        coming = {name for landing in self._coming() for name in landing.hashes[: landing.num_landed_blocks]}
        while num_cached < len(hashes) and hashes[num_cached] in coming:
            num_cached += 1
        return num_cached

    def _coming(self) -> Iterable[Landing]:
        yield from self._landed
        yield from (work.landing for work in self.entered if work.is_bringing)
