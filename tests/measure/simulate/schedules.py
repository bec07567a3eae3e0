"""Every schedule of a tiny fleet, by search: what the bound is compared with.

Workers take steps of any composition within the budget, whenever they like; requests move between workers at no cost,
and full pages are in every cache as soon as they are computed. Only requests that can still be good are served.
"""

from dataclasses import dataclass, replace
from itertools import product

from common.slo import Slo
from common.timing import StepShape
from measure.simulate.bound import BoundFleet
from measure.workload.traces import Trace

_LATE = -1
"""Number of tokens of a request that cannot be good any more."""
_ROUNDING_S = 1e-9
Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Progress:
    """One request."""

    num_computed: int = 0
    num_emitted: int = 0
    first_s: float = 0.0
    busy_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _State:
    free_s: tuple[float, ...]
    """Time at which each worker is free; prefill workers come first."""
    requests: tuple[_Progress, ...]
    cached: frozenset[tuple[Prefix, float]]
    """Leading tokens of full pages, with the time from which they are there."""


class Search:
    """Finds the most good requests of any schedule of a trace with one-token blocks."""

    def __init__(self, trace: Trace, fleet: BoundFleet, slo: Slo) -> None:
        assert trace.block_size == 1, "tokens are block ids"
        self._trace, self._fleet, self._slo = trace, fleet, slo
        self._seen: set[_State] = set()
        self._best = 0

    def best(self) -> int:
        """Return the most good requests."""
        workers = self._fleet.num_prefill + self._fleet.num_decode
        start = _State((0.0,) * workers, (_Progress(),) * len(self._trace.requests), frozenset())
        self._visit(start)
        return self._best

    def _visit(self, state: _State) -> None:
        now_s = min(state.free_s)
        done = [self._is_done(index, state) for index in range(len(state.requests))]
        alive = [index for index, is_done in enumerate(done) if not is_done and self._may_be_good(index, state, now_s)]
        self._best = max(self._best, sum(done))
        if sum(done) + len(alive) <= self._best or state in self._seen:
            return
        self._seen.add(state)
        worker = state.free_s.index(now_s)
        choices = [self._choices(index, state, worker, now_s) for index in alive]
        for counts in product(*choices):
            step = {index: count for index, count in zip(alive, counts, strict=True) if count}
            if step and sum(step.values()) <= self._fleet.max_step_tokens:
                self._visit(self._after(state, worker, step, now_s))
        later = [request.arrival_s for request in self._trace.requests]
        later += [request.busy_until_s for request in state.requests]
        if any(time_s > now_s for time_s in later):
            self._visit(_moved(state, worker, min(time_s for time_s in later if time_s > now_s)))

    def _is_done(self, index: int, state: _State) -> bool:
        return state.requests[index].num_emitted == self._trace.requests[index].num_output_tokens

    def _may_be_good(self, index: int, state: _State, now_s: float) -> bool:
        request, progress = self._trace.requests[index], state.requests[index]
        if progress.num_emitted == _LATE:
            return False
        if progress.num_emitted == 0:
            return now_s <= request.arrival_s + self._slo.ttft_of(request.num_prompt_tokens)
        return now_s <= progress.first_s + self._slo.tpot_s * (request.num_output_tokens - 1)

    def _choices(self, index: int, state: _State, worker: int, now_s: float) -> range:
        """Return the numbers of tokens that a request may have in a step that begins now."""
        request, progress = self._trace.requests[index], state.requests[index]
        if request.arrival_s > now_s or progress.busy_until_s > now_s:
            return range(1)
        if progress.num_emitted:
            return range(2) if worker >= self._fleet.num_prefill else range(1)
        return range(request.num_prompt_tokens - self._found(index, state, now_s) + 1)

    def _found(self, index: int, state: _State, now_s: float) -> int:
        """Return the tokens of a prompt that are computed or cached; the last one never is."""
        request, size = self._trace.requests[index], self._fleet.block_size
        prefixes = {prefix for prefix, at_s in state.cached if at_s <= now_s}
        found = 0
        while request.block_ids[: found + size] in prefixes and found + size < request.num_prompt_tokens:
            found += size
        return max(found, state.requests[index].num_computed)

    def _after(self, state: _State, worker: int, step: dict[int, int], now_s: float) -> _State:
        """Return the state after a step of these tokens by request."""
        shape, found = StepShape(), {}
        for index, count in step.items():
            request, progress = self._trace.requests[index], state.requests[index]
            found[index] = before = self._found(index, state, now_s)
            context = request.num_prompt_tokens + progress.num_emitted
            if progress.num_emitted or request.num_prompt_tokens - before == 1:  # as `engine.steps.scheduler` counts
                shape = replace(
                    shape,
                    num_decodes=shape.num_decodes + 1,
                    num_context_tokens=shape.num_context_tokens + (context if progress.num_emitted else before + 1),
                )
            else:
                shape = replace(
                    shape,
                    num_prefill_tokens=shape.num_prefill_tokens + count,
                    num_prefill_pairs=shape.num_prefill_pairs + count * before + count * (count + 1) // 2,
                )
        end_s = now_s + self._fleet.times.step_s(shape)
        requests, cached = list(state.requests), set(state.cached)
        for index, count in step.items():
            requests[index] = self._progressed(index, requests[index], found[index] + count, end_s)
            size, num_prompt = self._fleet.block_size, requests[index].num_computed
            for stop in range(size, num_prompt + 1, size):
                prefix = self._trace.requests[index].block_ids[:stop]
                if not any(known == prefix and at_s <= end_s for known, at_s in cached):
                    cached.add((prefix, end_s))
        return _moved(replace(state, requests=tuple(requests), cached=frozenset(cached)), worker, end_s)

    def _progressed(self, index: int, before: _Progress, num_computed: int, end_s: float) -> _Progress:
        """Return a request's progress at the end of its step; an answer that is too late counts as none."""
        request = self._trace.requests[index]
        if before.num_emitted == 0:
            if num_computed < request.num_prompt_tokens:
                return replace(before, num_computed=num_computed, busy_until_s=end_s)
            is_late = end_s > request.arrival_s + self._slo.ttft_of(request.num_prompt_tokens) + _ROUNDING_S
            return _Progress(request.num_prompt_tokens, _LATE if is_late else 1, end_s, end_s)
        num_emitted = before.num_emitted + 1
        due_s = before.first_s + self._slo.tpot_s * (request.num_output_tokens - 1)
        if num_emitted == request.num_output_tokens and end_s > due_s + _ROUNDING_S:
            num_emitted = _LATE
        return replace(before, num_emitted=num_emitted, busy_until_s=end_s)


def _moved(state: _State, worker: int, free_s: float) -> _State:
    """Return the state with a worker that is free later."""
    times = list(state.free_s)
    times[worker] = free_s
    return replace(state, free_s=tuple(times))
