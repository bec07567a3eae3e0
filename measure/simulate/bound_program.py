"""The linear program of the bound: how many requests' work fits between their arrivals and deadlines.

Time is cut into bins, narrow ones for prompts and wide ones, each of several narrow ones, for answers. Variables:

    y[r, b]  share of request r's prompt work in narrow bin b       z[r, w]  share of its answer work in wide bin w
    s[b]     prompt work that decode workers do in narrow bin b

    maximize   sum of y, or of z for requests without prompt work
    subject to sum_r prefill[r] y[r, b] <= num_prefill * bin + s[b]
               sum_r decode[r] z[r, w] + sum_(b in w) s[b] <= num_decode * wide bin
               sum_b y[r, b] = sum_w z[r, w] <= 1
               0 <= y, z <= what one request can do in the overlap of its window and the bin;  s <= num_decode * bin

Every variable is bounded, so any prices of the rows give a bound: see `_dual_value`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import OptimizeResult, linprog
from scipy.sparse import csr_array

from cluster.planner.plan import PoolSizes
from measure.simulate.bound_work import Demands, Floats

_NARROW_PER_WIDE = 8
_MAX_VARIABLES = 1_000_000
"""Number above which bins are widened, which keeps the bound valid."""
_ROUNDING = 1e-9
"""Allowance in limits of shares for rounded times."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Shares:
    """Shares of requests' work in bins. All arrays [num_shares]."""

    request: Ints
    bin: Ints
    limit: Floats
    """Largest value of the share."""

    @classmethod
    def of(cls, chosen: Ints, windows: tuple[Floats, Floats], seconds: Floats, bin_s: float) -> "_Shares":
        """Return the shares of the chosen requests; `seconds` is the least time that each one's whole work takes."""
        start_s, stop_s = windows[0][chosen], windows[1][chosen]
        first = np.floor(start_s / bin_s).astype(np.int64)
        count = np.maximum(1, np.ceil(stop_s / bin_s).astype(np.int64) - first)
        row = np.repeat(np.arange(len(chosen)), count)
        bins = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[row]
        overlap_s = np.minimum(stop_s[row], (bins + 1) * bin_s) - np.maximum(start_s[row], bins * bin_s)
        limit = np.clip(overlap_s / seconds[chosen][row] + _ROUNDING, 0.0, 1.0)
        return cls(chosen[row], bins, limit)


def most_good(wanted: Demands, sizes: PoolSizes, *, bin_s: float) -> float:
    """Return the most requests whose work fits. `bin_s`: width of the narrow bins; doubled while there are too many."""
    num_requests = len(wanted.arrival_s)
    if num_requests == 0:
        return 0.0
    has_prompt, has_answer = wanted.prefill_s > 0, wanted.decode_s > 0
    num_free = int(num_requests - (has_prompt | has_answer).sum())
    if num_free == num_requests:
        return float(num_requests)
    prompts_s = float((wanted.first_due_s - wanted.arrival_s).sum())
    answers_s = float((wanted.last_due_s - wanted.earliest_first_s).sum())
    horizon_s = float(wanted.last_due_s.max())
    while (prompts_s + answers_s / _NARROW_PER_WIDE + horizon_s) / bin_s > _MAX_VARIABLES:
        bin_s *= 2
    program = _Program.of(wanted, sizes, bin_s)
    return num_free + min(float(num_requests - num_free), program.bound())


@dataclass(frozen=True, slots=True)
class _Program:
    """max objective . v subject to rows v <= limits, linked v = 0, 0 <= v <= upper."""

    objective: Floats
    rows: csr_array
    limits: Floats
    linked: csr_array
    upper: Floats

    @classmethod
    def of(cls, wanted: Demands, sizes: PoolSizes, bin_s: float) -> "_Program":
        """Return the program; variables are y, z and s in this order, rows narrow bins, wide bins and requests."""
        has_prompt, has_answer = wanted.prefill_s > 0, wanted.decode_s > 0
        y = _Shares.of(np.flatnonzero(has_prompt), (wanted.arrival_s, wanted.first_due_s), wanted.prefill_s, bin_s)
        wide_s = bin_s * _NARROW_PER_WIDE
        z = _Shares.of(
            np.flatnonzero(has_answer),
            (wanted.earliest_first_s, wanted.last_due_s),
            wanted.decode_s / wanted.decode_rate,
            wide_s,
        )
        num_narrow = int(y.bin.max(initial=-1)) + 1
        num_wide = max(int(z.bin.max(initial=-1)), (num_narrow - 1) // _NARROW_PER_WIDE) + 1
        num_y, num_z, num_requests = len(y.bin), len(z.bin), len(wanted.arrival_s)
        at_y, at_z = np.arange(num_y), num_y + np.arange(num_z)
        narrow = np.arange(num_narrow)
        at_s = num_y + num_z + narrow
        counts_z = ~has_prompt[z.request]
        entries = (
            (y.bin, at_y, wanted.prefill_s[y.request]),
            (narrow, at_s, np.full(num_narrow, -1.0)),
            (num_narrow + z.bin, at_z, wanted.decode_s[z.request]),
            (num_narrow + narrow // _NARROW_PER_WIDE, at_s, np.ones(num_narrow)),
            (num_narrow + num_wide + y.request, at_y, np.ones(num_y)),
            (num_narrow + num_wide + z.request[counts_z], at_z[counts_z], np.ones(counts_z.sum())),
        )
        num_columns = num_y + num_z + num_narrow
        both_y, both_z = has_answer[y.request], has_prompt[z.request]
        links = (
            (y.request[both_y], at_y[both_y], np.ones(both_y.sum())),
            (z.request[both_z], at_z[both_z], np.full(both_z.sum(), -1.0)),
        )
        return cls(
            objective=np.concatenate([np.ones(num_y), counts_z.astype(np.float64), np.zeros(num_narrow)]),
            rows=_matrix(entries, (num_narrow + num_wide + num_requests, num_columns)),
            limits=np.concatenate(
                [
                    np.full(num_narrow, sizes.prefill * bin_s),
                    np.full(num_wide, sizes.decode * wide_s),
                    np.ones(num_requests),
                ]
            ),
            linked=_matrix(links, (num_requests, num_columns)),
            upper=np.concatenate([y.limit, z.limit, np.full(num_narrow, sizes.decode * bin_s)]),
        )

    def bound(self) -> float:
        """Return an upper bound of the maximum; it is the maximum when the solver is exact."""
        solved = linprog(
            -self.objective,
            A_ub=self.rows,
            b_ub=self.limits,
            A_eq=self.linked,
            b_eq=np.zeros(self.linked.shape[0]),
            bounds=np.column_stack([np.zeros_like(self.upper), self.upper]),
            method="highs-ipm",
        )
        return self._dual_value(solved)

    def _dual_value(self, solved: OptimizeResult) -> float:
        """Return the value of the solver's prices, a bound for any prices: those of rows need only be >= 0.

        objective . v <= limits . row_prices + sum of upper * max(0, objective - prices of the rows that use v).
        Without prices, as when the solver gives up, every variable counts in full.
        """
        if solved.ineqlin is None or solved.ineqlin.marginals is None:
            return float(self.upper @ self.objective)
        row_prices = np.maximum(0.0, -solved.ineqlin.marginals)
        link_prices = -np.asarray(solved.eqlin.marginals)
        left = self.objective - self.rows.T @ row_prices - self.linked.T @ link_prices
        return float(self.limits @ row_prices + self.upper @ np.maximum(0.0, left))


def _matrix(entries: tuple[tuple[Ints, Ints, Floats], ...], shape: tuple[int, int]) -> csr_array:
    """Return the matrix of (row, column, value) entries."""
    rows, columns, values = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    return csr_array((values, (rows, columns)), shape=shape)
