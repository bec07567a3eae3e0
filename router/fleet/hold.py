"""One request's share of a worker, and the sums over all that a worker has."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.ids import Epoch, RequestId
from router.fleet.lives import Life

if TYPE_CHECKING:
    from router.fleet.member import Member


@dataclass(slots=True, eq=False, kw_only=True)
class Hold:
    """One request's share of one life of one worker."""

    member: "Member"
    epoch: Epoch
    request_id: RequestId
    booked_s: float
    num_blocks: int
    """Pages that the request will occupy."""
    num_prompt_tokens: int = 0
    """Prompt tokens if the worker computes the prompt; else 0."""
    num_missing_tokens: int = 0
    """Prompt tokens that the worker is expected to compute."""
    prefill_s: float = 0.0
    """Predicted time of that computation."""
    num_decodes: int = 0
    """Sequences that the request adds to the worker's decode batch."""
    num_context_tokens: int = 0
    """KV tokens of these sequences."""
    num_growth_blocks: float = 0.0
    """Pages that their answers are expected to fill."""
    tpot_slo_s: float = math.inf
    """Objective for the mean gap of these sequences; infinite when the worker cannot keep it."""
    bounds_prompts: bool = False
    """Whether the worker holds prompts back for this objective: there is no prefill worker to compute them instead."""
    is_quarantined: bool = False
    """The request may be the one that crashes the workers that compute it."""
    is_prefilled: bool = False
    """The first token has arrived."""
    has_answered: bool = False
    """Whether the worker has answered the call, so that it was alive when the call came."""
    has_left: bool = False
    """The worker has nothing more to do for the request."""

    @property
    def life(self) -> Life:
        """The worker, and which of its lives."""
        return self.member.endpoint.worker_id, self.epoch


@dataclass(slots=True, eq=False)
class HoldSums:
    """Sums over the holds of one life."""

    num_blocks: int = 0
    num_prefills: int = 0
    """Prompts to be computed whose first token has not arrived."""
    num_prompt_tokens: int = 0
    """Tokens of these prompts."""
    num_missing_tokens: int = 0
    """Tokens of these prompts that are expected to be computed."""
    num_decodes: int = 0
    num_growth_blocks: float = 0.0
    num_by_tpot_slo: Counter[float] = field(default_factory=Counter)
    """Decoding holds by their objective, if they have one."""

    def num_kept_blocks(self, num_decodes: int) -> float:
        """Return the free pages to keep for `num_decodes` answers that grow as the active ones do.

        While answers come and go, the pages of those that end pay for the growth of the others, in the mean. The number
        that ends in a time scatters by its square root, so that many answers need no more than that share.
        """
        return math.sqrt(num_decodes) * self.num_blocks_per_answer

    @property
    def num_blocks_per_answer(self) -> float:
        """Pages that an answer is expected to fill, in the mean; 0 without any answer."""
        return self.num_growth_blocks / self.num_decodes if self.num_decodes else 0.0

    def count(self, hold: Hold, sign: int) -> None:
        """Add a hold, or take it out."""
        self.num_blocks += sign * hold.num_blocks
        self.num_decodes += sign * hold.num_decodes
        self.num_growth_blocks += sign * hold.num_growth_blocks
        if not hold.is_prefilled and hold.num_prompt_tokens:
            self.num_prefills += sign
            self.num_prompt_tokens += sign * hold.num_prompt_tokens
            self.num_missing_tokens += sign * hold.num_missing_tokens
        if hold.tpot_slo_s != math.inf:
            self.num_by_tpot_slo[hold.tpot_slo_s] += sign
            if not self.num_by_tpot_slo[hold.tpot_slo_s]:
                del self.num_by_tpot_slo[hold.tpot_slo_s]
