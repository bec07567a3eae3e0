"""Records of the connector: orders of vLLM's scheduler to its ranks, and `kv_transfer_params` of a request.

The field's proxies for prefill and decode copy `kv_transfer_params` from the prefill's answer into the decode's
request, and mark the first request with `do_remote_decode`, the second one with `do_remote_prefill`. So do we. A caller
that chooses the `handoff_id` of the first request need not wait for its answer: `ranks` are the same in all answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.ids import BlockHash, BlockId, Epoch, HandoffId, mint_handoff_id

_OFFER = "do_remote_decode"
_PULL = "do_remote_prefill"
_PULLERS = "num_pullers"
_MAX_ID_CHARS = 128
_MAX_RANKS = 64


COUNTS = {
    "pulls": "Prompts that were pulled, by each rank",
    "failed_pulls": "Pulls that have failed: the prompts were computed here",
    "pulled_bytes": "KV that was pulled",
    "exposed_seconds": "Seconds from when prompts were computed to when they were sent",
    "failed_offers": "Offers that could not be made, or whose requests have ended early",
    "expired": "Offers and pulls whose other side did not come within lease_ttl_s",
}
"""Counts of transfers, and what they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """Listener of one rank, in one life of its process."""

    address: str
    """host:port."""
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Pages of a prompt on another server."""

    handoff_id: HandoffId
    ranks: tuple[RankAddress, ...]
    """Listeners, one per rank."""
    num_pullers: int
    """Ranks for which they are offered."""

    def to_params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` of a request that pulls these pages."""
        # Epochs as text: JSON numbers of 63 bits are rounded by many proxies.
        ranks = [{"address": rank.address, "epoch": str(rank.epoch)} for rank in self.ranks]
        rest = {"handoff_id": self.handoff_id, _PULLERS: self.num_pullers}
        return {_PULL: True, _OFFER: False, "ranks": ranks, **rest}

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None, *, num_ranks: int) -> "Source | None":
        """Invert `to_params`, for a server with so many ranks; None for a request that does not ask for a pull.

        Raises ValueError.
        """
        if not (params and params.get(_PULL)):
            return None
        try:
            ranks = tuple(
                RankAddress(address=str(rank["address"]), epoch=Epoch(int(rank["epoch"]))) for rank in params["ranks"]
            )
            num_pullers = int(params.get(_PULLERS, num_ranks))
            source = cls(handoff_id=HandoffId(str(params["handoff_id"])), ranks=ranks, num_pullers=num_pullers)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"cannot read kv_transfer_params ({type(error).__name__}: {error}); copy them from the prefill's answer"
            ) from error
        if not ranks or num_pullers != num_ranks:
            raise ValueError(
                f"{len(ranks)} ranks offer it to {num_pullers}, and this server has {num_ranks}; send {_PULLERS}:"
                f" {num_ranks} in the kv_transfer_params of the prefill"
            )
        return source


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Wish that a prompt's pages be offered."""

    handoff_id: HandoffId
    num_pullers: int
    """Ranks that will pull."""

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None, *, num_ranks: int) -> "Wish | None":
        """Read `kv_transfer_params` of a request to a server with so many ranks. Raises ValueError."""
        if not (params and params.get(_OFFER)):
            return None
        chosen = params.get("handoff_id") or mint_handoff_id()
        if not isinstance(chosen, str) or len(chosen) > _MAX_ID_CHARS:
            raise ValueError(
                f"the handoff_id of kv_transfer_params is not a text of up to {_MAX_ID_CHARS} characters; choose a"
                " random one, or leave it out"
            )
        num_pullers = params.get(_PULLERS) or num_ranks
        if not isinstance(num_pullers, int) or not 1 <= num_pullers <= _MAX_RANKS:
            raise ValueError(f"{_PULLERS} of kv_transfer_params is not a number of ranks from 1 to {_MAX_RANKS}")
        return cls(handoff_id=HandoffId(chosen), num_pullers=num_pullers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt, as both servers name it."""

    num_tokens: int
    num_blocks: int
    last_hash: BlockHash
    """Chained hash of the last block, which may be partly filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A prompt that a puller may fetch as its chunks are computed."""

    request_id: str
    wish: Wish
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Pages of an offered prompt that a step has filled."""

    request_id: str
    block_ids: tuple[BlockId, ...]
    """Those that no earlier chunk had."""
    num_tokens: int
    """Tokens of the prompt that are computed, earlier chunks included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """A prompt's pages that are to be filled from another server."""

    request_id: str
    source: Source
    prompt: Prompt
    block_ids: tuple[BlockId, ...]
    first_block: int
    """Blocks before this one are here already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrders:
    """Orders that go to the ranks with one step."""

    preempted: tuple[str, ...]
    """Requests with an offer whose pages this step may give to others."""
    offers: tuple[Offer, ...]
    """Offers that begin."""
    chunks: tuple[Chunk, ...]
    """Pages that this step fills."""
    ended: tuple[str, ...]
    """Requests with an offer that have ended: their pages are free once they are copied."""
    pulls: tuple[Pull, ...]
    is_idle: bool
    """Whether the step computes nothing."""


@dataclass(slots=True, kw_only=True)
class RankResults:
    """Transfers that have ended on a rank since the last step."""

    offered: set[str]
    """Requests that have ended and whose pages are free again."""
    pulled: set[str]
    """Requests whose pages are filled, or never will be."""
    invalid_blocks: set[int]
    """Pages of failed pulls."""
    counts: dict[str, float]
    """Additions to `COUNTS`."""

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0) + amount

    @classmethod
    def none(cls) -> "RankResults":
        """Return results without any."""
        return cls(offered=set(), pulled=set(), invalid_blocks=set(), counts={})
