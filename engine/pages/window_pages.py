"""Pages of layers with a window, and of recurrent ones: a block has one while a sequence may read it, or there is room.

A block of tokens has parts. What layers that see everything hold of it lies in the block's own page, from its
allocation to its eviction. What layers with a window hold lies in a window page, which is attached to the block. A
sequence *needs* the window pages of the blocks in its window, and gives them back once the window has moved on. An
unneeded page stays attached to a cached block until another block takes it. A cached block may therefore have none, and
a prefix can be reused only up to a point before which the whole window is present (`num_usable`), as in vLLM's hybrid
KV-cache manager.

Recurrent layers keep a *state*, all that they know of the tokens before. Their pages are those of a window of one
token: a sequence's state lies in the page of the block with its latest token, and a step reads it there and leaves the
next one in the page of the block in which it ends. No step passes the end of a block and stops inside another one, so
that a block that is left behind holds the state at its end, a *snapshot*, from which another sequence may go on. Blocks
inside of a step get none. `engine.pages.snapshots` says which ones are kept.

Each sequence has a *quota*, the most pages that it needs at a time, promised when it gets its blocks. The promises
never exceed the pages: `attach` always finds one, and no sequence waits for a window page in the middle of its way.
"""

from array import array
from collections.abc import Callable, Iterable

from common.eviction import EvictionClass, EvictionOrder
from common.ids import BlockId
from engine.kv_store import KvShape, WindowedKvStore
from engine.pages.snapshots import Snapshots
from engine.window import BlockWindow

NO_PAGE = -1
MAX_ANSWER_STEP = 80
"""Most tokens of an answer in one step, drafted and forced ones included."""
_MIN_STEP_TOKENS = 1024
"""Tokens of a sequence in one step for which there is always room, though its window is shorter."""
STATE_QUOTA = 2
"""Most states that a sequence needs: one that a step reads, and one that it leaves. Samples copy what they share."""
_TOKENS_PER_STATE = 1024
"""Tokens of blocks for each of which there is a state page."""
_MIN_SEQUENCES = 4
"""Sequences for which there are always pages, unless there are as many as blocks."""


def window_quota(shape: KvShape, max_step_tokens: int) -> int:
    """Return the most pages that a sequence needs which computes up to so many tokens in a step; larger steps are cut.

    Both ends of window and step may lie inside a block, and a block may have to be copied.
    """
    assert shape.windowed is not None, "no layer has window pages"
    if shape.windowed.has_states:
        return STATE_QUOTA
    window = shape.windowed.num_tokens
    num_new = min(max_step_tokens, max(window, _MIN_STEP_TOKENS))
    return -(-window // shape.block_size) + -(-num_new // shape.block_size) + 4


def split_budget(kv_bytes: int, shape: KvShape, max_step_tokens: int) -> tuple[int, int]:
    """Return how many blocks and window pages fit in `kv_bytes`: a page for some blocks, but some sequences'."""
    num_pages, interval = _MIN_SEQUENCES * window_quota(shape, max_step_tokens), _interval(shape)
    num_blocks = interval * kv_bytes // (interval * shape.block_bytes + shape.window_page_bytes)
    if num_blocks < interval * num_pages:
        num_blocks = (kv_bytes - num_pages * shape.window_page_bytes) // shape.block_bytes
    if num_blocks < num_pages:
        num_blocks = kv_bytes // (shape.block_bytes + shape.window_page_bytes)
    return num_blocks, num_pages_beside(num_blocks, shape, max_step_tokens)


def num_pages_beside(num_blocks: int, shape: KvShape, max_step_tokens: int) -> int:
    """Return the window pages beside so many blocks; 0 where no layer has any."""
    if shape.windowed is None:
        return 0
    num_pages = num_blocks // _interval(shape)
    return min(num_blocks, max(num_pages, _MIN_SEQUENCES * window_quota(shape, max_step_tokens)))


def _interval(shape: KvShape) -> int:
    """Return the number of blocks for which there is one window page, or state page."""
    assert shape.windowed is not None, "no layer has window pages"
    return max(1, _TOKENS_PER_STATE // shape.block_size) if shape.windowed.has_states else 4


class WindowPages:
    """Window pages 0 … num_pages-1 of one worker's blocks. Every operation is O(blocks named). Engine thread only."""

    def __init__(self, store: WindowedKvStore, max_step_tokens: int) -> None:
        """`max_step_tokens`: most tokens of a sequence in one step. Changes the store's `window_page_of`."""
        assert store.shape.windowed is not None, "no layer has window pages"
        self._page_of = store.window_page_of
        self._page_of[:] = array("i", [NO_PAGE]) * store.num_blocks
        self._needs = array("i", [0]) * len(self._page_of)
        self._empty = list(range(store.num_window_pages - 1, -1, -1))
        self._unneeded: EvictionOrder[int] = EvictionOrder()
        """Blocks whose pages may be taken."""
        self._changed: set[int] = set()
        """Blocks that got or lost a page since `drain_changed`."""
        self._window = BlockWindow(window=store.shape.windowed.window, block_size=store.shape.block_size)
        self.snapshots = Snapshots(store.num_blocks) if store.shape.windowed.has_states else None
        """How long states are kept; None: the pages hold rows of windows."""
        self._block_size = store.shape.block_size
        self.num_pages = store.num_window_pages
        self.num_promised = 0
        self.is_scarce = self.num_pages < len(self._page_of)
        """Whether there are fewer pages than blocks; if not, no promise is ever refused."""
        self.quota = min(window_quota(store.shape, max_step_tokens), self.num_pages)
        """Most pages that a sequence needs at a time."""
        self.answer_quota = min(window_quota(store.shape, MAX_ANSWER_STEP), self.quota)
        """Most pages that one needs whose prompt is computed."""

    def quota_of(self, *, num_samples: int, num_tokens: int) -> int:
        """Return the most pages that samples of one prompt need, with texts of up to `num_tokens` tokens."""
        num_others = (num_samples - 1) * self.answer_quota_of(num_tokens)
        return min(self.quota, self._num_blocks_of(num_tokens)) + num_others

    def answer_quota_of(self, num_tokens: int) -> int:
        """Return the most pages that one sample needs whose prompt is computed, with a text of up to so many tokens."""
        return min(self.answer_quota, self._num_blocks_of(num_tokens))

    def _num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) + 1  # one is copied

    @property
    def num_needed(self) -> int:
        """Pages that sequences need."""
        return self.num_pages - len(self._empty) - len(self._unneeded)

    def has_page(self, block_id: int) -> bool:
        """Whether a block has a page."""
        return self._page_of[block_id] != NO_PAGE

    def drain_changed(self) -> set[int]:
        """Return the blocks that got or lost a page since the last call, those that had none before included."""
        changed, self._changed = self._changed, set()
        return changed

    def first_needed(self, num_tokens: int) -> int:
        """Return the first block of a window that a sequence with KV of `num_tokens` tokens needs.

        The window before the end of the last full block is in it, too: another prompt may begin there.
        """
        return self._window.first_needed(num_tokens // self._block_size)

    def promise(self, num_pages: int, *, num_spared: int = 0, instead_of: int = 0) -> bool:
        """Add to the promises. False: they would exceed all pages but `num_spared`.

        `instead_of`: promised pages that do not count, since their promise ends at once.
        """
        if self.is_scarce and self.num_promised - instead_of + num_pages > self.num_pages - num_spared:
            return False
        self.num_promised += num_pages
        return True

    def take_back(self, num_pages: int) -> None:
        """End a promise."""
        self.num_promised -= num_pages
        assert self.num_promised >= 0, f"{-self.num_promised} pages were never promised"

    def attach(self, block_ids: Iterable[int]) -> None:
        """Need a page for each block, which it gets if it has none. The caller's promise covers them."""
        for block_id in block_ids:
            if self._page_of[block_id] == NO_PAGE:
                self._set_page(block_id, self._empty.pop() if self._empty else self._detach())
            self._need(block_id)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Need the pages of blocks that have one."""
        for block_id in block_ids:
            assert self._page_of[block_id] != NO_PAGE, f"block {block_id} has no page for windows"
            self._need(block_id)

    def give_back(self, block_ids: Iterable[int], segment: EvictionClass = EvictionClass.COLD) -> None:
        """Need pages no longer. `segment`: how soon others may take them; BRIEF for what a window has left behind."""
        for block_id in block_ids:
            self._needs[block_id] -= 1
            assert self._needs[block_id] >= 0, f"block {block_id}: {self._needs[block_id]} needs"
            if not self._needs[block_id]:
                self._unneeded.put(block_id, segment)

    def drop(self, block_id: int) -> None:
        """Empty the page of a block that is no longer cached; harmless when it has none."""
        if self.snapshots is not None:
            self.snapshots.begin(block_id)
        if self._page_of[block_id] != NO_PAGE:
            assert not self._needs[block_id], f"block {block_id} is dropped while {self._needs[block_id]} need it"
            self._unneeded.remove(block_id)
            self._empty.append(self._set_page(block_id, NO_PAGE))

    def hand_over(self, source: int, target: int) -> None:
        """Let the need of one block's page become one of another block with the same content, whatever it has."""
        if self._page_of[target] != NO_PAGE:
            self._need(target)
            self.give_back([source])
            return
        assert self._needs[source] == 1, f"block {source} has a page that {self._needs[source]} need"
        self._set_page(target, self._set_page(source, NO_PAGE))
        self._needs[target], self._needs[source] = 1, 0

    def num_usable(self, num_blocks: int, block_at: Callable[[int], int]) -> int:
        """Return how many of some leading blocks of a prompt a sequence may begin behind. O(blocks)."""
        end = begin = num_blocks
        while begin and begin > self.first_needed(end * self._block_size):
            begin -= 1
            if self._page_of[block_at(begin)] == NO_PAGE:
                end = begin
        return end

    def ids_of(self, block_ids: Iterable[int]) -> list[BlockId]:
        """Return the ids of blocks' pages for transfers, which count on from the blocks' own pages."""
        return [BlockId(len(self._page_of) + self._page_of[block_id]) for block_id in block_ids]

    def _need(self, block_id: int) -> None:
        if not self._needs[block_id] and block_id in self._unneeded:
            self._unneeded.remove(block_id)
        self._needs[block_id] += 1

    def _detach(self) -> int:
        return self._set_page(self._unneeded.evict(), NO_PAGE)

    def _set_page(self, block_id: int, page: int) -> int:
        """Give a block a page, or none. Returns the one before."""
        before, self._page_of[block_id] = self._page_of[block_id], page
        self._changed.add(block_id)
        return before
