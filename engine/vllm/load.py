"""Measures the load of a `VllmEngine`, for routers and the scheduler of placements."""

from collections.abc import Collection

from engine.events import EngineLoad
from engine.sequence import SequenceState
from engine.steps.backlog import num_pairs
from engine.vllm.admission import Admission
from engine.vllm.observed import Observed
from engine.vllm.work import Work


def measure_load(works: Collection[Work], admission: Admission, observed: Observed) -> EngineLoad:
    """Return the load at this moment. O(requests)."""
    num_tokens = pairs = context = num_decoding = 0
    for work in works:
        for sequence in work.group.sequences:
            num_left = sequence.num_tokens - sequence.num_computed
            is_live = sequence.state in (SequenceState.WAITING, SequenceState.RUNNING)
            if is_live and num_left > 1:
                num_tokens += num_left
                pairs += num_pairs(num_left, sequence.num_computed)
            elif is_live:
                num_decoding += 1
            if sequence.state is not SequenceState.FINISHED and not work.group.holds_after_prefill:
                context += sequence.num_tokens
    states = [work.group.leader.state for work in works]
    num_used = admission.num_used
    num_free = admission.num_blocks - num_used
    num_cached_blocks = observed.mirror.num_blocks
    return EngineLoad(
        num_running=sum(len(work.runs) for work in works),
        num_waiting=states.count(SequenceState.WAITING),
        num_reserved=states.count(SequenceState.RESERVED),
        num_held=states.count(SequenceState.HELD),
        num_free_blocks=num_free,
        num_used_blocks=num_used,
        num_cached_blocks=num_cached_blocks,
        num_blocks=admission.num_blocks,
        num_cold_blocks=max(0, num_free - num_cached_blocks),
        num_free_slots=max(0, admission.max_running - admission.num_sequences),
        num_decoding=num_decoding,
        num_context_tokens=context,
        num_pending_prefill_tokens=num_tokens,
        num_pending_prefill_pairs=pairs,
        num_preemptions=observed.num_preemptions,
        num_cached_tokens=observed.num_cached_tokens,
        num_computed_tokens=observed.num_computed_tokens,
        measured_s=observed.clock.monotonic(),
    )
