"""Which window pages the sequences of an engine need, as their block tables change (`engine.pages.window_pages`)."""

from collections.abc import Sequence as Seq

from common.eviction import EvictionClass
from engine.pages.snapshots import Place
from engine.pages.window_pages import WindowPages
from engine.sequence import Sequence
from engine.window_ids import NO_WINDOWS, WindowIds


class WindowTables:
    """Window pages of sequences. Engine thread only. Without such pages, nothing here does anything."""

    def __init__(self, pages: WindowPages | None, block_size: int) -> None:
        self._pages = pages
        self._block_size = block_size

    def quota_of(self, sequence: Sequence) -> int:
        """Return the most pages that a sequence needs together with the samples, or beams, that are forked from it."""
        if self._pages is None:
            return 0
        if not sequence.will_decode:
            return self._pages.quota_of(num_samples=1, num_tokens=sequence.num_tokens)
        num_samples = sequence.request.sampling.n if sequence.is_beam else sequence.num_samples
        return self._pages.quota_of(num_samples=num_samples, num_tokens=sequence.max_num_tokens)

    def promise(self, sequence: Sequence, ahead: Seq[Sequence] = ()) -> bool:
        """Promise a sequence its quota, which beams share. False: too few are left beside those `ahead` in line."""
        if self._pages is None or any(beam.window_quota for beam in sequence.beams or ()):
            return True
        quota, num_spared = self.quota_of(sequence), self._num_awaited(ahead)
        if not self._pages.promise(quota, num_spared=num_spared, instead_of=len(sequence.landed_windows)):
            return False
        sequence.window_quota = quota
        return True

    def begin(self, sequence: Sequence, num_cached: int, last_known: int | None) -> None:
        """Need the pages of a sequence's cached prefix that its window still shows.

        `last_known`: last block of its text that is cached at all.
        """
        if self._pages is not None:
            first = min(self._pages.first_needed(num_cached * self._block_size), num_cached)
            sequence.window_blocks = range(first, num_cached)
            self._pages.hold(sequence.block_table[first:num_cached])
            if self._pages.snapshots is not None and last_known is not None:
                self._pages.snapshots.wanted(last_known)
                if num_cached:
                    self._pages.snapshots.used(sequence.block_table[num_cached - 1])

    def attach(self, sequence: Sequence, num_tokens: int) -> None:
        """Need pages for the blocks up to `num_tokens` tokens, which the table has, in the window of those ready.

        Of recurrent layers' blocks only the last one gets a page: that is where the step leaves its state.
        """
        if self._pages is not None:
            window, end = sequence.window_blocks, -(-num_tokens // self._block_size)
            if end <= window.stop:
                return
            first = window.stop if self._pages.snapshots is None else end - 1
            self._pages.attach(sequence.block_table[first:end])
            if self._pages.snapshots is None:
                sequence.window_blocks = range(window.start, end)
            elif window:
                sequence.window_blocks = range(window[-1], end, first - window[-1])
            else:
                sequence.window_blocks = range(first, end)

    def skip_to(self, sequence: Sequence, num_tokens: int) -> None:
        """Need the window at the end of `num_tokens` tokens, whose KV a transfer brings, and nothing before it."""
        if self._pages is not None:
            first, end = self._pages.first_needed(num_tokens), -(-num_tokens // self._block_size)
            self._pass(sequence, first)
            begin = max(first, sequence.window_blocks.stop)
            self._pages.attach(sequence.block_table[begin:end])
            sequence.window_blocks = range(sequence.window_blocks.start if sequence.window_blocks else begin, end)

    def slide(self, sequence: Sequence) -> None:
        """Give back the pages that the window of a sequence's ready tokens has left behind.

        An answer needs no pages for long steps any more, but those of beams, which may read their text again by turns.
        """
        if self._pages is not None:
            self._pass(sequence, self._pages.first_needed(sequence.num_ready))
            if sequence.will_decode and sequence.is_decoding and not sequence.is_beam:
                quota = sequence.num_samples * self._pages.answer_quota_of(sequence.max_num_tokens)
                self._pages.take_back(sequence.window_quota - quota)
                sequence.window_quota = quota

    def num_fitting(self, sequence: Sequence, num_new: int) -> int:
        """Return how many of `num_new` tokens a sequence may compute in the next step, with what was promised to it.

        Recurrent layers stop at the end of a block, and where the prompt leaves a text that is known here: others may
        do so, too, and will find a snapshot there.
        """
        if self._pages is None:
            return num_new
        if self._pages.snapshots is not None:
            begin, end, size = sequence.num_computed, sequence.num_computed + num_new, self._block_size
            stops = (-(-begin // size) * size, sequence.num_known_blocks * size, end // size * size, end)
            return next(stop for stop in stops if begin < stop <= end) - begin
        if not self._pages.is_scarce:
            return num_new
        quota = self._pages.answer_quota if sequence.is_decoding else self._pages.quota
        end = (sequence.window_blocks.start + quota - 1) * self._block_size  # one page is for a copy
        return min(num_new, max(1, end - sequence.num_computed))

    def begin_copy(self, target: int) -> None:
        """Need a page for the copy of a block. From now on the copy needs that of its source, until `end_copies`."""
        if self._pages is not None:
            self._pages.attach([target])

    def end_copies(self, sources: Seq[int]) -> None:
        """Give back the pages that copies needed."""
        if self._pages is not None:
            self._pages.give_back(sources)

    def trim(self, sequence: Sequence, num_kept: int) -> None:
        """Give back the pages of the blocks behind the first `num_kept`, which leave the table."""
        if self._pages is not None and num_kept < sequence.window_blocks.stop:
            first = max(num_kept, sequence.window_blocks.start)
            self._pages.give_back(sequence.block_table[first : sequence.window_blocks.stop])
            sequence.window_blocks = range(min(sequence.window_blocks.start, num_kept), num_kept)

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Need the pages of a sequence twice that was just forked; its quota covers both."""
        if self._pages is not None:
            self._pages.hold(child.block_table[i] for i in child.window_blocks)
            if not child.is_beam:
                child.window_quota = self._pages.answer_quota_of(child.max_num_tokens)
                parent.window_quota -= child.window_quota

    def hold_end(self, block_table: Seq[int], ahead: Seq[Sequence] = ()) -> range | None:
        """Promise and need the window pages at the end of leading blocks of a prompt, for `release_end`.

        Returns the blocks that have them; None when too few are left beside those `ahead` in line.
        """
        if self._pages is None:
            return range(0)
        num_blocks = len(block_table)
        first = min(self._pages.first_needed(num_blocks * self._block_size), num_blocks)
        if not self._pages.promise(num_blocks - first, num_spared=self._num_awaited(ahead)):
            return None
        self._pages.attach(block_table[first:])
        return range(first, num_blocks)

    def release_end(self, block_table: Seq[int], blocks: range, *, num_filled: int = 1 << 62) -> None:
        """Undo `hold_end`. The pages of all but the first `num_filled` blocks of the table hold nothing."""
        if self._pages is not None:
            self._pages.give_back(block_table[blocks.start : blocks.stop])
            self._pages.take_back(len(blocks))
            for block_id in block_table[max(blocks.start, num_filled) : blocks.stop]:
                self._pages.drop(block_id)

    def ids_of(self, block_table: Seq[int], blocks: range) -> WindowIds:
        """Return the window pages of blocks of a table, for transfers."""
        if self._pages is None:
            return NO_WINDOWS
        ids = self._pages.ids_of(block_table[blocks.start : blocks.stop])
        return WindowIds(first_block=blocks.start, ids=tuple(ids))

    def hand_over(self, own: int, published: int) -> None:
        """Let a sequence need the page of an equal block that was published first, and not that of its own."""
        if self._pages is not None:
            self._pages.hand_over(own, published)

    def release(self, sequence: Sequence) -> None:
        """Give back all pages of a sequence, and the promise, which a beam leaves to another one that has pages."""
        if self._pages is not None:
            self._give_back(sequence, list(sequence.window_blocks))
            others = (beam for beam in sequence.beams or () if beam is not sequence and beam.block_table)
            if (heir := next(others, None)) is not None:
                heir.window_quota += sequence.window_quota
            else:
                self._pages.take_back(sequence.window_quota)
            sequence.window_blocks, sequence.window_quota = range(0), 0

    def _num_awaited(self, waiting: Seq[Sequence]) -> int:
        """Return the window pages that waiting sequences will be promised; beams share what the first one gets."""
        firsts = (each for each in waiting if each.beams is None or each is each.beams[0])
        return sum(self.quota_of(each) - len(each.landed_windows) for each in firsts)

    def _pass(self, sequence: Sequence, first: int) -> None:
        assert self._pages is not None, "there are no windows"
        passed = [i for i in sequence.window_blocks if i < first]
        if passed:
            self._give_back(sequence, passed, is_passed=True)
            begin = sequence.window_blocks[len(passed) :].start
            sequence.window_blocks = range(begin, sequence.window_blocks.stop, sequence.window_blocks.step)

    def _give_back(self, sequence: Sequence, blocks: Seq[int], *, is_passed: bool = False) -> None:
        """Give back pages of blocks of a table. `is_passed`: the sequence goes on behind them."""
        assert self._pages is not None, "there are no windows"
        if (snapshots := self._pages.snapshots) is None:
            segment = EvictionClass.BRIEF if is_passed else EvictionClass.COLD
            self._pages.give_back((sequence.block_table[i] for i in blocks), segment)
            return
        for i in blocks:
            block_id = sequence.block_table[i]
            self._pages.give_back(
                [block_id], snapshots.leave(block_id, self._place_of(sequence, i, is_passed=is_passed))
            )

    def _place_of(self, sequence: Sequence, i: int, *, is_passed: bool) -> Place:
        if i + 1 == sequence.num_prompt_tokens // self._block_size:
            return Place.PROMPT_END
        if not is_passed:
            return Place.ANSWER_END
        return Place.FORK if i + 1 == sequence.num_known_blocks else Place.INSIDE
