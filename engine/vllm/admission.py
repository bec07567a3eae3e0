"""Pages, places and slots of a vLLM as its worker gives them out, and the line of the requests that wait for them.

vLLM's own scheduler queues a request that finds no pages. Here a request is passed to vLLM only when there are pages
for all its tokens and the next ones. They count from the grant until vLLM has confirmed the end of the request.

Answers that grow may exceed what there is. For a request that was granted pages, and has not begun in vLLM, the latest
arrivals then leave vLLM and line up again. While nothing is granted, vLLM itself takes the pages of the latest one.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from common.errors import InvalidRequest, PromptTooLong, Refused
from engine.vllm.staging import StagedStore
from engine.vllm.work import Work

_RETRY_AFTER_S = 0.5


@dataclass(slots=True)
class Admission:
    """See the module. Event loop only."""

    kv: StagedStore
    num_blocks: int
    max_running: int
    max_waiting: int
    _line: list[Work] = field(default_factory=list)
    """By arrival."""
    _holders: set[Work] = field(default_factory=set)

    @property
    def num_used(self) -> int:
        """Pages that are given out."""
        return min(self.num_blocks, sum(work.num_blocks for work in self._holders))

    @property
    def num_sequences(self) -> int:
        """Places of a step that are given out."""
        return sum(work.num_sequences for work in self._holders)

    def check_fits(self, work: Work) -> None:
        """Raise PromptTooLong or InvalidRequest for a request that is too large even when it is alone."""
        if work.num_blocks > self.num_blocks:
            raise PromptTooLong(f"needs {work.num_blocks} KV blocks; this worker has {self.num_blocks}", field="prompt")
        if work.num_sequences > self.max_running:
            raise InvalidRequest(
                f"{work.num_sequences} samples run together; this worker runs {self.max_running}", field="n"
            )

    def line_up(self, work: Work) -> Refused | None:
        """Put a request at the end of the line."""
        if len(self._line) >= self.max_waiting:
            return Refused(reason=f"{len(self._line)} requests wait already", retry_after_s=_RETRY_AFTER_S)
        insort(self._line, work, key=_order)
        return None

    def line_up_again(self, work: Work) -> None:
        """Take everything back from a request that vLLM has ended for another one, and put it at its place in line."""
        self.take_pages_back(work)
        self.take_slots_back(work)
        work.num_loaded = 0
        for sequence in work.group.sequences:
            sequence.num_computed = 0
        insort(self._line, work, key=_order)

    def reserve(self, work: Work) -> Refused | None:
        """Give a request what it needs now, or nothing. What those in line need stays free."""
        num_spared = sum(each.num_blocks for each in self._line)
        if not (self._has_room(work, num_spared=num_spared) and self._has_slots(work)):
            needs = (
                f"needs {work.num_blocks} pages, {work.num_prompt_blocks} staged blocks, {work.num_sequences} places"
            )
            num_pages = max(0, self.num_blocks - self.num_used - num_spared)
            num_places = max(0, self.max_running - self.num_sequences)
            free = f"{num_pages}, {self.kv.num_free} and {num_places} are free"
            return Refused(reason=f"{needs}; {free}", retry_after_s=_RETRY_AFTER_S)
        self._give(work, has_slots=True)
        return None

    def let_in(self) -> Iterator[Work]:
        """Yield the first in line with what they need, while there is room."""
        while self._line and self._has_room(self._line[0]):
            work = self._line[0]
            if work.group.holds_after_prefill:
                self._free_slots_for(work)
                if not self._has_slots(work):
                    return
            del self._line[0]
            self._give(work, has_slots=work.group.holds_after_prefill)
            yield work

    def take_pages_back(self, work: Work) -> None:
        """Take pages and places of a request back, or its place in line."""
        self._holders.discard(work)
        if work in self._line:
            self._line.remove(work)

    def take_slots_back(self, work: Work) -> None:
        """Take the slots of a request back."""
        self.kv.free(work.slots)
        work.slots = ()

    def outgrown(self, num_free_pages: int) -> list[Work]:
        """Return the requests that have to leave vLLM, so that its free pages are all that were granted to others."""
        staying = [work for work in self._holders if not work.is_leaving]
        num_awaited = sum(work.num_awaited_blocks for work in staying if not work.is_preempted)
        num_short = num_awaited - num_free_pages - sum(work.num_blocks for work in self._holders if work.is_leaving)
        found: list[Work] = []
        for work in sorted(staying, key=_order, reverse=True):
            if not num_awaited or not work.has_begun or work.group.holds_after_prefill:
                continue
            if work.is_preempted:  # it would be first in vLLM's own line
                found.append(work)
            elif num_short > 0:
                found.append(work)
                num_short -= work.num_blocks
        return found

    def _free_slots_for(self, first: Work) -> None:
        """Take back what was pulled for the latest in line while the first lacks slots: it would wait for them."""
        for work in reversed(self._line):
            if work is first or self._has_slots(first):
                return
            self.kv.free(work.drop_pulled())

    def _has_slots(self, work: Work) -> bool:
        return self.kv.num_free >= work.num_prompt_blocks - len(work.slots)

    def _has_room(self, work: Work, *, num_spared: int = 0) -> bool:
        has_place = self.num_sequences + work.num_sequences <= self.max_running
        # The samples of one request may outgrow all pages: vLLM then computes them in turn.
        num_used, num_needed = self.num_used + num_spared, min(self.num_blocks, work.num_blocks)
        return has_place and num_used + num_needed <= self.num_blocks

    def _give(self, work: Work, *, has_slots: bool) -> None:
        self._holders.add(work)
        if has_slots:
            work.slots += self.kv.take(work.num_prompt_blocks - len(work.slots))
            work.group.leader.block_table.extend(work.slots)


def _order(work: Work) -> int:
    return work.group.leader.order
