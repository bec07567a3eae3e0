"""Prompts that a rank of a vLLM server offers: pages are copied into slots, chunk by chunk, and served from there.

Each rank that pulls has a handoff of its own, with the heads that it takes from this rank.
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

from common.errors import EngineFault, HandoffGone, KvrelayError
from common.ids import BlockId, HandoffId
from engine.vllm.connector.endpoint import Ready
from engine.vllm.connector.orders import Chunk, Offer
from engine.vllm.connector.pages import RankPages
from engine.vllm.connector.routes import RankPlace, routes
from kv_transfer.handoff import Handoff, HandoffManifest, HandoffTable

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Part:
    """The part of an offer for one rank that pulls."""

    handoff: Handoff
    heads: range
    """Heads, as this rank numbers its own."""
    slots: tuple[BlockId, ...] = ()
    """Slots for the whole prompt, from the first chunk on."""
    is_copying: bool = False
    """Whether pages are being copied into slots; these are then freed afterwards."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A prompt that is offered."""

    offer: Offer
    parts: list[_Part] = field(default_factory=list)
    num_copied: int = 0
    """Blocks that are in slots."""
    is_given_up: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a chunk is copied."""


class RankOffers:
    """Offers of one rank. Event loop only."""

    def __init__(self, table: HandoffTable, pages: RankPages, place: RankPlace) -> None:
        """`table` counts pieces where it says tokens and blocks: its blocks have one token."""
        self._table = table
        self._pages = pages
        self._place = place
        self._outgoing: dict[str, _Outgoing] = {}
        """By request id, until the request has ended."""

    def begin(self, offer: Offer) -> None:
        """Expect the chunks of a prompt, and its pullers."""
        outgoing = self._outgoing[offer.request_id] = _Outgoing(offer)
        place, wish = self._place, offer.wish
        try:
            for route in routes(place.num_heads, num_sources=place.num_ranks, num_pullers=wish.num_pullers):
                if route.source == place.rank:
                    handoff = self._table.begin(part_id(wish.handoff_id, route.puller), lambda: None)
                    part = _Part(handoff, place.own(route.heads))
                    handoff.on_end = partial(self._free, part)
                    outgoing.parts.append(part)
        except KvrelayError as error:
            self._give_up(outgoing, error)

    async def copy(self, chunk: Chunk, ready: Ready | None) -> None:
        """Copy the pages of a chunk, once `ready` has come, and make them available."""
        outgoing = self._outgoing[chunk.request_id]
        async with outgoing.turn:
            if outgoing.is_given_up:
                return
            try:
                if ready is not None:
                    await asyncio.get_running_loop().run_in_executor(None, ready.synchronize)
                for part in outgoing.parts:
                    if not part.handoff.is_over:
                        await self._copy(outgoing, part, chunk)
            except Exception as error:  # noqa: BLE001 - whatever it is, no puller may take the pages for good
                self._give_up(outgoing, EngineFault(f"{type(error).__name__}: {error}"))
            else:
                outgoing.num_copied += len(chunk.block_ids)

    async def end(self, request_id: str) -> bool:
        """Return whether a request that has ended was offered as a whole, once its pages are copied."""
        outgoing = self._outgoing.pop(request_id)
        async with outgoing.turn:
            if outgoing.num_copied < outgoing.offer.prompt.num_blocks:
                self._abort(outgoing, HandoffGone("its request ended before the prompt was computed"))
                return False
        return True

    async def settle(self, request_ids: Collection[str]) -> None:
        """Return when the chunks of requests so far are copied."""
        for request_id in request_ids:
            if (outgoing := self._outgoing.get(request_id)) is not None:
                async with outgoing.turn:
                    pass

    async def _copy(self, outgoing: _Outgoing, part: _Part, chunk: Chunk) -> None:
        prompt, num_heads = outgoing.offer.prompt, len(part.heads)
        first, stop = outgoing.num_copied, outgoing.num_copied + len(chunk.block_ids)
        if not part.slots:
            part.slots = self._pages.take_slots(prompt.num_blocks * num_heads)
        slots = part.slots[first * num_heads : stop * num_heads]
        part.is_copying = True
        try:
            staging = partial(self._pages.stage, chunk.block_ids, part.heads, slots)
            await asyncio.get_running_loop().run_in_executor(None, staging)
        finally:
            part.is_copying = False
            if part.handoff.is_over:
                self._free(part)
        self._table.progress(part.handoff, part.slots, stop * num_heads)
        if chunk.num_tokens == prompt.num_tokens:
            manifest = HandoffManifest(
                num_tokens=prompt.num_tokens,
                num_blocks=prompt.num_blocks * num_heads,
                last_block_hash=prompt.last_hash,
                first_tokens=(),
            )
            self._table.complete(part.handoff, manifest)

    def _free(self, part: _Part) -> None:
        if not part.is_copying:
            self._pages.free_slots(part.slots)
            part.slots = ()

    def _give_up(self, outgoing: _Outgoing, error: KvrelayError) -> None:
        logger.warning("cannot offer the prompt of %s: %s", outgoing.offer.request_id, error)
        outgoing.is_given_up = True
        self._abort(outgoing, error)

    def _abort(self, outgoing: _Outgoing, error: KvrelayError) -> None:
        for part in outgoing.parts:
            self._table.abort(part.handoff, error)


def part_id(handoff_id: HandoffId, puller: int) -> HandoffId:
    """Return the id of the handoff for one rank that pulls."""
    return HandoffId(f"{handoff_id}/{puller}")
