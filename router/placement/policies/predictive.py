"""Our own policy: the plan that costs the least, in seconds.

For a prefill worker P and a decode worker D, and for a decode worker that computes the prompt by itself:

    remote(P, D) = first token on P + work(P) + exposed transfer(P → D) + tokens(D) + missed(P, D)
    local(D)     = first token on D + work(D)                           + tokens(D) + missed(D)

- *First token*: max(wait, tier read + pull) + compute. The wait is for prompts accepted before, as predicted by the
  worker's own model and the bookings since its last report. A pull fetches leading blocks, during the wait, from the
  worker that holds most of them; it is planned when computing the blocks would take longer. So is the read of blocks
  that are in tiers only: of the worker's own ones, and at the source of those that are pulled. A worker makes one read
  at a time.
- *Work*: the cost of the computation to others: half of it for later requests, and all of it for every sequence that
  decodes on a worker which does both.
- *Exposed transfer*: the part of the handoff that the computation cannot hide, and its calls.
- *Tokens*: the request's own answer at its predicted gap between tokens, and the increase of the gaps of all sequences
  that decode there already.
- *Missed*: objectives that will probably be missed, of the request and of the sequences that it slows down, each priced
  at a multiple of the objective, so that it outweighs everything else.

A plan whose wait is longer than `max_prefill_wait_s` is not made yet: the request stays in the router's line, where the
order can still change and where the next free worker takes the most urgent request. While half of the workers are free,
there is nothing to order: the request waits at the worker, so that none behind it in line is held up. A request that
will miss its objective anyway waits for a worker that is free. The worker refuses a prompt that would wait much longer,
because another router was quicker; the request then takes its place in line again (`Plan.max_wait_s`).

One copy is enough: after a handoff, both workers hold the same blocks. One of them keeps its copy for later and the
other evicts it first, so that both pools together hold twice as many different blocks; pulls bring them to where they
are needed. The worker that had the blocks keeps them; new ones are dealt out by the sizes of the pools (cf. singlets in
cooperative caching: Dahlin et al., OSDI 1994).
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from common.errors import Refused
from common.ids import WorkerId
from router.placement.answer_pool import AnswerPool
from router.placement.loads import PoolLoads, Positions, ProjectedLoad, lowest
from router.placement.plans import FleetView, PlacementRequest, Plan, PolicySettings, RetainedOn
from router.placement.policies.eligible import Turns, find_eligible, refuse_busy, refuse_without
from router.placement.policies.forecast import PlanForecast, PromptForecast, make_plan
from router.placement.policies.gaps import keep_gaps
from router.placement.policies.pooled import NUM_EXPLAINED
from router.placement.policies.prices import (
    DELAY_PRICE,
    MIN_PULLED_BLOCKS,
    PREFILL_WORK_PRICE,
    RESERVE_PRICE,
    PullSource,
    compute_on,
    local_option,
    pull_sources,
    remote_option,
    token_price,
)

SHORTLIST = 4
"""Workers of each pool that are compared in pairs, after each was ranked by itself."""
NETWORK_S = 1e-3
"""Time that calls add to a first token."""
WAIT_TOLERANCE = 2.0
"""Waits at which a worker refuses a prompt, in multiples of the longest for which it is sent there."""
SLACK_SHARE = 0.5
"""Share of free workers from which a prompt waits at the worker that holds its prefix, not in the line."""
NUM_PRESELECTED = 6
"""Workers that are priced for each virtue when a pool is large."""
NUM_HOLDERS = 64
"""Holders of the prompt's prefix that are looked at, those of the longest first."""


class Predictive:
    """Chooses the plan of least cost. Event loop only."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._turns = Turns()
        self._dealt = 0.0

    def choose(self, request: PlacementRequest, fleet: FleetView) -> Plan | Refused:
        """Return the cheapest plan, or why there is none now."""
        eligible = find_eligible(request, fleet)
        if isinstance(eligible, Refused):
            return eligible
        holders = request.best_holders(NUM_HOLDERS)
        decodes = keep_gaps(request, self._preselect(request, eligible.decode, holders))
        if isinstance(decodes, Refused):
            return decodes
        prefills = self._preselect(request, eligible.prefill, holders)
        local_prices = self._local_prices(request, decodes, must_be_local=eligible.must_be_local)
        most = islice((each for each in holders if each[1] in fleet.sources), SHORTLIST)
        sources = pull_sources(request, fleet, most)
        options = list(self._options(request, fleet, sources, prefills, decodes, local_prices))
        if not options:
            return refuse_without(AnswerPool.PREFILL)
        options.sort(key=lambda option: (option.cost, self._last_turns(option)))
        best = options[0]
        max_wait_s = self._settings.max_prefill_wait_s
        if max_wait_s != math.inf and request.waited_s + best.prompt.ready_s > request.ttft_slo_s:
            max_wait_s = 0.0  # busy workers are left to requests that may be in time, at this and at other routers
        elif _is_slack(eligible.prefill or eligible.decode, free_by_s=request.now_s + max_wait_s):
            max_wait_s = max(max_wait_s, best.prompt.wait_s)
        if best.prompt.wait_s > max_wait_s:
            return refuse_busy(best.prompt.worker, best.prompt.wait_s, max_wait_s)
        return replace(self._plan(request, fleet, options), max_wait_s=WAIT_TOLERANCE * max_wait_s)

    def _options(
        self,
        request: PlacementRequest,
        fleet: FleetView,
        sources: Sequence[PullSource],
        prefills: Iterable[ProjectedLoad],
        decodes: Sequence[ProjectedLoad],
        local_prices: Mapping[WorkerId, float],
    ) -> Iterator[PlanForecast]:
        """Yield the plans of the best workers of each pool: remote ones in pairs, then local ones."""

        def shortlist(work_prices: Iterable[tuple[ProjectedLoad, float]]) -> list[PromptForecast]:
            priced = (compute_on(request, fleet, sources, worker, work_price=price) for worker, price in work_prices)
            return [prompt for _cost, prompt in heapq.nsmallest(SHORTLIST, priced, key=self._prompt_rank)]

        def decode_rank(priced: tuple[float, ProjectedLoad]) -> tuple[float, int, int]:
            price, worker = priced
            return price, -request.cached_tokens(worker.worker_id), self._turns.last_turn(worker.worker_id)

        token_prices = ((token_price(request, decode), decode) for decode in decodes)
        best_decodes = heapq.nsmallest(SHORTLIST, token_prices, key=decode_rank)
        for prompt in shortlist((prefill, PREFILL_WORK_PRICE) for prefill in prefills):
            for price, decode in best_decodes:
                yield remote_option(request, fleet, prompt, decode, price)
        local = [worker for worker in decodes if worker.worker_id in local_prices]
        for prompt in shortlist((worker, local_prices[worker.worker_id]) for worker in local):
            yield local_option(request, prompt, work_price=local_prices[prompt.worker.worker_id])

    def _preselect(
        self, request: PlacementRequest, pool: PoolLoads, holders: Iterable[tuple[int, WorkerId]]
    ) -> list[ProjectedLoad]:
        """Return the workers of a pool that are worth pricing: all of a small one.

        In a large one, these are the workers that are free soonest (among equals the ones chosen longest ago), that
        decode least, and that hold most of the prompt.
        """
        if len(pool) <= 3 * NUM_PRESELECTED:
            return pool.loads
        loads, num_decodes = pool.loads, pool.num_decodes

        def last_turns(positions: Positions) -> list[int]:
            return self._turns.last_turns(loads[position] for position in positions.tolist())

        soonest = lowest(np.maximum(pool.prefill_free_at_s, request.now_s), NUM_PRESELECTED, tied=last_turns)
        emptiest: list[int] = []
        if num_decodes.any():  # no prefill worker decodes
            emptiest = lowest(num_decodes, NUM_PRESELECTED, tied=pool.num_context_tokens.__getitem__)
        fullest = islice(filter(None, (pool.find(worker_id) for _blocks, worker_id in holders)), NUM_PRESELECTED)
        chosen = [*(loads[position] for position in (*soonest, *emptiest)), *fullest]
        return list({worker.worker_id: worker for worker in chosen}.values())

    def _local_prices(
        self, request: PlacementRequest, decodes: Iterable[ProjectedLoad], *, must_be_local: bool
    ) -> dict[WorkerId, float]:
        """Return the work price of each decode worker that may compute the prompt itself."""
        at_most = math.inf if must_be_local else self._settings.local_prefill_max_tokens
        is_reserved = at_most == math.inf and not must_be_local
        reserve = RESERVE_PRICE if is_reserved else 0.0  # prompts below a configured limit are welcome
        return {
            decode.worker_id: PREFILL_WORK_PRICE + reserve + DELAY_PRICE * decode.num_decodes
            for decode in decodes
            if request.missing_tokens(decode.worker_id) <= at_most
        }

    def _plan(self, request: PlacementRequest, fleet: FleetView, options: Sequence[PlanForecast]) -> Plan:
        best = options[0]
        prompt, decode = best.prompt, best.decode
        self._turns.take(prompt.worker.worker_id, decode.worker_id)
        is_local = best.prefill_id is None
        retained_on = RetainedOn.BOTH if is_local else self._retained_on(request, fleet, prompt, decode)
        return make_plan(
            options[:NUM_EXPLAINED],
            ttft_s=prompt.ready_s + NETWORK_S,
            reason=_reason(request, best),
            num_options=len(options),
            retained_on=retained_on,
        )

    def _prompt_rank(self, priced: tuple[float, PromptForecast]) -> tuple[float, int]:
        cost, prompt = priced
        return cost, self._turns.last_turn(prompt.worker.worker_id)

    def _last_turns(self, option: PlanForecast) -> tuple[int, int]:
        turn = self._turns.last_turn
        return turn(option.prompt.worker.worker_id), turn(option.decode.worker_id)

    def _retained_on(
        self, request: PlacementRequest, fleet: FleetView, prompt: PromptForecast, decode: ProjectedLoad
    ) -> RetainedOn:
        """Return which side keeps the prompt's blocks."""
        held_by_decode = request.cached_blocks.get(decode.worker_id, 0)
        held_by_prefill = request.cached_blocks.get(prompt.worker.worker_id, 0)
        if prompt.pull is not None and prompt.pull.num_blocks > held_by_decode:
            is_from_prefill = fleet.prefill.find(prompt.pull.source) is not None
            return RetainedOn.PREFILL if is_from_prefill else RetainedOn.DECODE
        if max(held_by_decode, held_by_prefill) >= MIN_PULLED_BLOCKS:
            return RetainedOn.PREFILL if held_by_prefill >= held_by_decode else RetainedOn.DECODE
        num_prefill_blocks, num_decode_blocks = fleet.prefill.num_blocks.sum(), fleet.decode.num_blocks.sum()
        self._dealt += num_prefill_blocks / (num_prefill_blocks + num_decode_blocks)
        if self._dealt >= 1.0:
            self._dealt -= 1.0
            return RetainedOn.PREFILL
        return RetainedOn.DECODE


def _is_slack(pool: PoolLoads, *, free_by_s: float) -> bool:
    """Return whether so many workers are free by a time that nothing is gained by an order of the requests."""
    return float((pool.prefill_free_at_s <= free_by_s).mean()) >= SLACK_SHARE


def _reason(request: PlacementRequest, option: PlanForecast) -> str:
    prompt = option.prompt
    pulled = "" if prompt.pull is None else f", {prompt.pull.num_blocks} blocks from {prompt.pull.source}"
    num_reads = sum(prompt.tier_reads.values())
    read = f", {num_reads} blocks from tiers" if num_reads else ""
    gap = "" if request.pool is AnswerPool.PREFILL else f"; {option.tpot_s * 1e3:.1f} ms between tokens"
    return (
        f"{request.num_tokens - prompt.num_cached_tokens} tokens to compute in {prompt.prefill_s * 1e3:.0f} ms"
        f" after {prompt.fetched_s * 1e3:.0f} ms{pulled}{read}{gap}"
    )
