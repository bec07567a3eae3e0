"""Records of the connector: orders of vLLM's scheduler to its ranks, and `kv_transfer_params` of a request.

The field's proxies for prefill and decode copy `kv_transfer_params` from the prefill's answer into the decode's
request, and mark the first request with `do_remote_decode`, the second one with `do_remote_prefill`. So do we.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.ids import BlockHash, BlockId, Epoch, HandoffId

_OFFER = "do_remote_decode"
_PULL = "do_remote_prefill"


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

    def to_params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` of a request that pulls these pages."""
        # Epochs as text: JSON numbers of 63 bits are rounded by many proxies.
        ranks = [{"address": rank.address, "epoch": str(rank.epoch)} for rank in self.ranks]
        return {_PULL: True, _OFFER: False, "handoff_id": self.handoff_id, "ranks": ranks}

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None) -> "Source | None":
        """Invert `to_params`; None for a request that does not ask for a pull. Raises ValueError."""
        if not (params and params.get(_PULL)):
            return None
        try:
            ranks = tuple(
                RankAddress(address=str(rank["address"]), epoch=Epoch(int(rank["epoch"]))) for rank in params["ranks"]
            )
            return cls(handoff_id=HandoffId(str(params["handoff_id"])), ranks=ranks)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"cannot read kv_transfer_params ({type(error).__name__}: {error}); copy them from the prefill's answer"
            ) from error


def asks_for_offer(params: Mapping[str, Any] | None) -> bool:
    """Return whether `kv_transfer_params` ask for pages that stay for a puller."""
    return bool(params and params.get(_OFFER))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPages:
    """Pages of a prompt on this server, and what the prompt is."""

    num_tokens: int
    last_hash: BlockHash
    """Chained hash of the prompt's last block, which may be partly filled."""
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A prompt's pages that a puller may fetch."""

    request_id: str
    handoff_id: HandoffId
    pages: PromptPages


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """A prompt's pages that are to be filled from another server."""

    request_id: str
    source: Source
    pages: PromptPages
    first_block: int
    """Blocks before this one are here already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrders:
    """Orders that go to the ranks with one step."""

    offers: tuple[Offer, ...]
    pulls: tuple[Pull, ...]


@dataclass(slots=True, kw_only=True)
class RankResults:
    """What has ended on a rank since the last step."""

    offered: set[str]
    """Requests whose pages are free again."""
    pulled: set[str]
    """Requests whose pages are filled, or never will be."""
    invalid_blocks: set[int]
    """Pages of failed pulls."""
