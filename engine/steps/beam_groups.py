"""Beams as sequences of a group: they fork, die and take over each other's pages, as `engine.beams` decides.

A beam that goes on keeps its sequence. Each further child of it is a fork: they share all pages, and a page that is not
full is copied by each beam that writes to it, except the last (`Pages.num_missing_together`). A beam without a child
ends and gives its pages back. No KV is computed twice, except after a preemption.

No beam runs on a pending token (`Sequence.waits_for_tokens`): the candidates of all beams must be known first. Usually
one step brings all of them; when the step has no room for all, those that are known wait.
"""

from collections.abc import Collection, Iterator

from common.clock import Clock
from engine.beams import BeamSearch
from engine.events import BeamsAdvanced, EngineEvent
from engine.executor import Sampled
from engine.sequence import Sequence
from engine.steps.group import Group, Groups
from engine.steps.scheduler import Scheduler


class BeamGroups:
    """The groups of one core whose sequences are beams. Engine thread only."""

    def __init__(self, scheduler: Scheduler, groups: Groups, clock: Clock, *, eos_token_ids: Collection[int]) -> None:
        self._scheduler = scheduler
        self._groups = groups
        self._clock = clock
        self._eos_token_ids = eos_token_ids

    def begin(self, group: Group, leader: Sequence) -> None:
        """Make the leader of an entering group its first beam, if the request is for beams."""
        if not group.request.sampling.has_beams or group.holds_after_prefill:
            return
        group.beams = BeamSearch(
            group.request.sampling,
            eos_token_ids=self._eos_token_ids,
            max_tokens=leader.max_num_tokens - leader.num_prompt_tokens,
            begun=group.request.beams,
        )
        leader.beams = group.sequences

    def resume(self, group: Group) -> None:
        """Put the beams of a search that another engine began in line, in place of the prompt.

        They are like preempted ones. Pages that a reservation has filled stay cached for them.
        """
        begun = group.request.beams
        if group.beams is None or begun is None:
            return
        leader, first_index = group.leader, group.request.first_sample_index
        self._scheduler.withdraw(leader)
        leader.append_tokens(begun.live[0].token_ids)
        for rank, beam in enumerate(begun.live[1:], 1):
            sequence = leader.beside(first_index + rank, beam.token_ids)
            group.sequences.append(sequence)
            self._groups[sequence] = group
        self._scheduler.line_up(group.sequences)

    def take(self, group: Group, search: BeamSearch, sequence: Sequence, sampled: Sampled) -> list[EngineEvent]:
        """Note the candidates of one beam. With those of all beams the search takes a step; returns its events."""
        sequence.candidates = sampled.logprobs.top if sampled.logprobs is not None else ()
        beams = list(group.sequences)
        known = [beam.candidates for beam in beams if beam.candidates is not None]
        if len(known) < len(beams):
            return []
        children = search.advance(known, lambda rank: beams[rank].output_token_ids)
        parents = {child.parent for child in children}
        for rank, beam in enumerate(beams):
            if rank not in parents:
                self._groups.finish(beam)
        if not children:
            return [*group.answer_events(search, self._clock.monotonic())]
        free = self._free_indices(group, {beams[rank].sample_index for rank in parents})
        successors: list[Sequence] = []
        for child in children:  # all forks first: a sequence is copied as it was before the step
            parent = beams[child.parent]
            successors.append(self._groups.fork(parent, next(free)) if parent in successors else parent)
        for child, successor in zip(children, successors, strict=True):
            successor.append_token(child.token_id)
            successor.candidates = None
        group.sequences[:] = successors
        return self._progress(group, search)

    def _free_indices(self, group: Group, taken: Collection[int]) -> Iterator[int]:
        """Return the sample indices that no beam has: an index only names a beam, its answer is ranked at the end."""
        first = group.request.first_sample_index
        return (index for index in range(first, first + group.request.sampling.n) if index not in taken)

    def _progress(self, group: Group, search: BeamSearch) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        snapshot = search.due_snapshot([beam.output_token_ids for beam in group.sequences])
        if snapshot is not None:
            events.append(BeamsAdvanced(snapshot=snapshot))
        prefilled = group.tokens_event((), self._clock.monotonic())
        if prefilled.prefill_s is not None:
            events.append(prefilled)
        return events
