"""The most valuable prefixes of a cache, against a naive model that looks at every block."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.block_hash import hash_blocks
from common.eviction import MAX_VALUE
from common.ids import BlockHash
from common.prefix_chains import whole_chain
from engine.core import EngineCore
from engine.pages.hot_prefixes import hot_prefixes
from tests.builders import BLOCK_SIZE, make_core, make_request, served, submit
from tests.engine.test_block_pool import BLOCK_SIZE as SMALL_BLOCK
from tests.engine.test_block_pool import NUM_BLOCKS, PoolMachine


class HotMachine(PoolMachine):
    """The pool under any use; its hot prefixes are always what evicting all other blocks would leave."""

    def check(self) -> None:
        held = [holder.table for holder in self.holders]
        for max_blocks in (1, 3, NUM_BLOCKS):
            chains = hot_prefixes(self.pool, self.pool.last_reused(held), max_blocks)
            named: list[BlockHash] = [block_hash for chain in chains for block_hash in chain.hashes]
            assert len(named) == len(set(named)) <= max_blocks, "every block once"
            for idx in range(len(chains)):
                whole = whole_chain(chains, idx)
                assert list(whole.values) == sorted(whole.values, reverse=True)
                reused = [self.pool.is_reused(self.page(block_hash)) for block_hash in whole.hashes]
                assert reused == sorted(reused, reverse=True)
                assert sum(reused) == whole.num_reused
                tokens, root = self.tokens_of[whole.hashes[-1]], self.root_of[whole.hashes[-1]]
                assert whole.hashes == hash_blocks(tokens, root=root, block_size=SMALL_BLOCK), "no gap"
            firsts = [chain.values[0] for chain in chains]
            assert firsts == sorted(firsts, reverse=True)
            self.check_choice(set(named), max_blocks)

    def check_choice(self, named: set[BlockHash], max_blocks: int) -> None:
        free = [(value, self.pool.hash_of(page)) for value, page in self.pool.hottest()]
        worth: dict[BlockHash, float] = {}  # a block that is asked for takes all before it
        for value, block_hash in free:
            tokens, root = self.tokens_of[block_hash], self.root_of[block_hash]
            for each in hash_blocks(tokens, root=root, block_size=SMALL_BLOCK):
                worth[each] = max(value, worth.get(each, value))
        left_out = [worth[block_hash] for _, block_hash in free if block_hash not in named]
        if len(named) < max_blocks:
            assert not left_out, "there was room for them"
        chosen = [worth[block_hash] for _, block_hash in free if block_hash in named]
        assert not left_out or not chosen or max(left_out) <= min(chosen)

    def page(self, block_hash: BlockHash) -> int:
        (page,) = self.pool.match_prefix([block_hash])
        return page

    def teardown(self) -> None:
        self.check()


HotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestHotPrefixes = HotMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=10), min_size=1, max_size=6))
def test_evicted_page_has_the_least_value(tokens: list[list[int]]) -> None:
    machine = HotMachine()
    for each in tokens:
        machine.admit(each, 1, None, is_published=True)
        if len(machine.holders) > 2:
            machine.pool.release(machine.holders.pop(0).table)
    while machine.holders:
        machine.pool.release(machine.holders.pop().table)
    for _ in range(NUM_BLOCKS):
        value_of = {page: value for value, page in machine.pool.hottest()}
        (page,) = machine.pool.allocate(1)
        assert page not in value_of or value_of[page] == min(value_of.values())


def test_prefix_that_running_requests_share_comes_first() -> None:
    core = make_core()
    prefix = list(range(3 * BLOCK_SIZE))
    serve(core, [*prefix, 90, 91])
    serve(core, [*prefix, 80, 81])
    serve(core, list(range(40, 40 + 2 * BLOCK_SIZE + 1)))
    request = make_request([*prefix, 70, 71], max_tokens=200, ignore_eos=True)
    submit(core, request)
    core.step()

    first, *_rest = core.hot_prefixes(64)

    assert first.hashes[:3] == request.block_hashes[:3]
    assert first.values[:3] == (MAX_VALUE,) * 3
    assert first.num_reused == 3


def test_hot_prefixes_are_cut_to_max_blocks_from_their_ends() -> None:
    core = make_core()
    request = make_request(list(range(5 * BLOCK_SIZE + 1)), max_tokens=1)
    served(core, request)

    (chain,) = core.hot_prefixes(3)

    assert chain.hashes == request.block_hashes[:3]


def serve(core: EngineCore, prompt: list[int]) -> None:
    served(core, make_request(prompt, max_tokens=1))
