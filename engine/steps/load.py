"""Measures an engine's load."""

from engine.events import EngineLoad
from engine.steps.backlog import num_pairs
from engine.steps.scheduler import Scheduler


def measure_load(scheduler: Scheduler, *, now_s: float) -> EngineLoad:
    """Return the load at this moment. Engine thread only; O(running and reserved sequences)."""
    pool, backlog, speculator = scheduler.pool, scheduler.backlog, scheduler.speculator
    pool.end_pins()
    num_tokens, pairs, context = backlog.num_tokens, backlog.num_pairs, backlog.num_context_tokens
    num_decoding = 0
    for sequence in scheduler.running:
        num_known = len(sequence.token_ids)
        num_left = num_known - sequence.num_ready
        if sequence.will_decode:
            context += num_known
        if num_left == 1 and sequence.will_decode:
            num_decoding += 1
        else:
            num_tokens += num_left
            pairs += num_pairs(num_left, sequence.num_ready)
    for sequence in scheduler.reserved:
        context += sequence.num_samples * sequence.num_tokens
    return EngineLoad(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_reserved=len(scheduler.reserved),
        num_held=len(scheduler.held),
        num_free_blocks=pool.num_free,
        num_used_blocks=pool.num_used,
        num_cached_blocks=pool.num_cached_blocks,
        num_blocks=pool.num_blocks,
        num_cold_blocks=pool.num_cold,
        num_free_slots=scheduler.num_free_slots,
        num_decoding=num_decoding,
        num_context_tokens=context,
        num_pending_prefill_tokens=num_tokens,
        num_pending_prefill_pairs=pairs,
        num_preemptions=scheduler.num_preemptions,
        num_cached_tokens=scheduler.num_cached_tokens,
        num_computed_tokens=scheduler.num_computed_tokens,
        num_window_pages=0 if pool.windows is None else pool.windows.num_pages,
        num_promised_window_pages=0 if pool.windows is None else pool.windows.num_promised,
        tenant_pins={} if pool.pins is None else pool.pins.counts(),
        num_pinned_blocks=0 if pool.pins is None else pool.pins.num_blocks,
        num_evicted_pins=0 if pool.pins is None else pool.pins.num_evicted,
        drafts=speculator.counts if speculator is not None else (),
        measured_s=now_s,
    )
