"""Upper bound on the goodput of any way to serve a trace on a fleet of workers.

The bound is the value of a linear program that knows the whole trace. In it work is a fluid, moves between workers at
no cost, and every block of KV that was ever computed is in every cache. Its variables are the shares of each request's
work done in each interval of time. This is why no policy, online or not, has more good requests.

Setting. A worker runs one step at a time. A step with P prompt tokens and D decoding sequences has P + D <= B, the step
budget. A *floor* of the step times is F + a P + b pairs + c D + d context <= T for every step (`StepTimes.floors`).
Every argument below holds for every floor. Take any schedule, and the requests that are good in it.

1. Prompt work has an owner. A page of a prompt is owned by the first request of the trace that contains it with all
   tokens before it; tokens after the last full page are owned by their request, since only full pages are shared. If
   the owner is good, some worker has computed the page between the owner's arrival, when it became known, and the
   owner's deadline for the first token. So an owned token is computed in this window by a step that no other request is
   charged for, whether or not its pages are cached and whatever else is served. A token that ends a prompt may be
   computed as if it decoded, and then its page serves others: tokens that end a page or their prompt are charged the
   cheaper of the two. A page is computed after the pages before it, or in the same step: the copies that lead to the
   owner's first token come from steps that follow each other, wherever they ran. Those are the ones charged, and their
   time is a lower bound of TTFT.
2. Answer work. Every later token needs a step that reads the request's context, after the step of the token before it.
   The one exception: after preemption or a move a sequence starts again after its last full page, and k >= 2 tokens
   are computed as a prompt; the charge is the cheaper of the two. The mean gap bounds the time from the first token to
   the last, so all this happens between the arrival and (TTFT objective + TPOT objective x gaps) later.
3. Fixed times. The charges of a step's tokens add up to at most T under each of two rules. *Even*: each token has its
   marginal time and F / (P + D) >= F / B. *By work*: a token of marginal time e has e T / (T - F). A gap is at least T,
   so the n gaps of a good request have sum(T - F) <= n (TPOT - F), and by Cauchy-Schwarz its charge is at least
   sum(e) + F sum(sqrt(e))^2 / (n (TPOT - F)). Prompts are charged e only.
4. Capacity. Spread each charge over its step. In an interval of length L a pool of M workers is charged at most M L.
   Decode workers do the answers' work, any worker prompt work. One request's steps follow each other, so its charge in
   an interval is at most L times the largest charge per second. A request whose own steps, alone on a worker, take
   longer than its objectives allow is good in no schedule.
5. Relaxation. The schedule gives x = 1 to each good request, and its shares of the charge in each bin satisfy every
   constraint of `bound_program`. Hence the program's maximum, over x in [0, 1], is at least the number of good ones.
   Bins that a window touches count up to the overlap, and answers have wider bins than prompts: both only add
   schedules. The number taken is not the solver's optimum but the value of its dual prices, which bounds the program's
   maximum whatever the solver's tolerances (weak duality).

The program is solved once per *charge*: even with the first floor, by work with the last one. Each value is a bound, so
the least is. The proof needs answers that are not part of later prompts, as in a replayed trace, and different block
ids with different tokens.
"""

import math
from dataclasses import dataclass

from cluster.planner.plan import PoolSizes
from common.slo import Slo
from measure.simulate.bound_program import most_good
from measure.simulate.bound_work import Charge, WorkerLimits, demands
from measure.simulate.timing import StepTimes
from measure.workload.traces import Trace

_BINS_PER_TTFT = 8
"""Bins of prompt work in the objective of a short prompt."""
_ROUNDING = 1e-6
"""Allowance for sums of floating-point numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundFleet:
    """Workers that serve a trace."""

    num_prefill: int
    """Workers that compute prompts only; 0: aggregated."""
    num_decode: int
    """Workers that decode, and may compute prompts."""
    block_size: int
    """Tokens of a page."""
    max_step_tokens: int
    times: StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Upper bound of a trace's goodput."""

    num_requests: int
    num_good: int
    """Most requests that any schedule finishes within both objectives."""

    @property
    def good_share(self) -> float:
        """Good requests of all requests; 0 without any."""
        return self.num_good / self.num_requests if self.num_requests else 0.0

    def ratio(self, num_good: int) -> float:
        """Return a schedule's good requests as a share of the bound; 1 where none can be good."""
        return num_good / self.num_good if self.num_good else 1.0


def goodput_bound(trace: Trace, fleet: BoundFleet, slo: Slo) -> Bound:
    """Return the bound for a trace under objectives. Takes 5 to 10 s per thousand requests.

    Without a finite objective for the first token or the mean gap the bound is trivial: every request.
    """
    if not (math.isfinite(slo.ttft_s) and math.isfinite(slo.tpot_s)):
        return Bound(num_requests=len(trace.requests), num_good=len(trace.requests))
    floors = fleet.times.floors()
    limits = WorkerLimits(max_step_tokens=fleet.max_step_tokens, block_size=fleet.block_size)
    sizes = PoolSizes(prefill=fleet.num_prefill, decode=fleet.num_decode)
    charges = (Charge.EVEN, floors[0]), (Charge.BY_WORK, floors[-1])
    most = float(len(trace.requests))
    for charge, floor in charges:
        wanted = demands(trace, slo, limits, charge=charge, floor=floor, floors=floors)
        most = min(most, most_good(wanted, sizes, bin_s=slo.ttft_s / _BINS_PER_TTFT))
    return Bound(num_requests=len(trace.requests), num_good=math.floor(most + _ROUNDING))
