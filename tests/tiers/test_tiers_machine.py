"""Both tiers against a naive dictionary: whatever happens to files and processes, a block is right or gone."""

import shutil
import tempfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.faulty_files import FaultyFiles, Killed
from common.ids import BlockHash, HashRoot
from kv_tiers.records import RECORD_BYTES
from kv_tiers.tiers import Tiers
from tests.tiers.blocks import OTHER, ROOT, SLOT_BYTES, data_of, hash_of, settings

NUMBERS = st.integers(1, 12)  # an empty record has the hash 0
WRITES_OF_PUT = 3


class NaiveTier:
    """Blocks in order of use, the least recent first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, HashRoot] = OrderedDict()

    def put(self, number: int, root: HashRoot) -> None:
        if number in self.blocks:
            self.blocks.move_to_end(number)
            return
        if len(self.blocks) == self.capacity:
            self.blocks.popitem(last=False)
        self.blocks[number] = root

    def touch(self, numbers: list[int]) -> None:
        for number in reversed(numbers):
            if number in self.blocks:
                self.blocks.move_to_end(number)

    def forget(self, root: HashRoot) -> set[int]:
        gone = {number for number, owner in self.blocks.items() if owner == root}
        for number in gone:
            del self.blocks[number]
        return gone


class TiersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.told: set[BlockHash] = set()
        self.bad: set[int] = set()
        """Blocks whose bytes on disk have been changed."""

    @initialize(host=st.integers(0, 3), disk=st.integers(1, 6))
    def begin(self, host: int, disk: int) -> None:
        self.host, self.disk = NaiveTier(host), NaiveTier(disk)
        self.open()

    def open(self) -> None:
        self.files = FaultyFiles()
        self.settings = settings(host=self.host.capacity, disk=self.disk.capacity, path=self.path)
        self.tiers = Tiers.open(self.settings, files=self.files)
        self.host.blocks.clear()
        self.told.clear()

    def owner_of(self, number: int) -> HashRoot:
        return ROOT if number < 8 else OTHER

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        self.tiers.put(hash_of(number), self.owner_of(number), data_of(number))
        if self.host.capacity:
            self.host.put(number, self.owner_of(number))
        if number not in self.disk.blocks:
            self.bad.discard(number)
        self.disk.put(number, self.owner_of(number))

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        got = self.tiers.get(hash_of(number), self.owner_of(number))
        on_disk = number in self.disk.blocks and number not in self.bad
        if number in self.host.blocks or on_disk:
            assert got == data_of(number)
        else:
            assert got is None
        if number in self.host.blocks:
            return
        if on_disk and self.host.capacity:
            self.host.put(number, self.owner_of(number))
        elif number in self.bad:
            self.disk.blocks.pop(number, None)

    @rule(number=NUMBERS)
    def get_with_another_root(self, number: int) -> None:
        wrong = OTHER if self.owner_of(number) == ROOT else ROOT
        assert self.tiers.get(hash_of(number), wrong) is None

    @rule(numbers=st.lists(NUMBERS, unique=True, max_size=6))
    def touch(self, numbers: list[int]) -> None:
        self.tiers.touch([hash_of(number) for number in numbers])
        self.host.touch(numbers)
        self.disk.touch(numbers)

    @rule(root=st.sampled_from([ROOT, OTHER]))
    def forget(self, root: HashRoot) -> None:
        gone = self.host.forget(root) | self.disk.forget(root)
        assert self.tiers.forget(root) == len(gone)

    @rule()
    def restart(self) -> None:
        self.tiers.close()
        self.open()

    @rule(number=NUMBERS, num_writes=st.integers(0, WRITES_OF_PUT), num_bytes=st.integers(0, 64))
    def kill_while_writing(self, number: int, num_writes: int, num_bytes: int) -> None:
        left = [num_writes]

        def die(path: Path, most: int) -> int | None:
            left[0] -= 1
            if left[0] < -1:
                raise Killed
            return None if left[0] >= 0 else num_bytes

        is_new = number not in self.disk.blocks
        self.files.before_write = die
        with suppress(Killed):
            self.tiers.put(hash_of(number), self.owner_of(number), data_of(number))
        self.files.kill()
        before = OrderedDict(self.disk.blocks)
        self.disk.put(number, self.owner_of(number))
        self.open()
        found = set(self.tiers.snapshot())
        here = [each for each in self.disk.blocks if hash_of(each) in found]
        if is_new:
            may_miss = {number}
            evicted = set(before) - set(self.disk.blocks)
            assert set(self.disk.blocks) - set(here) <= may_miss
            if any(hash_of(each) in found for each in evicted):  # killed before anything was written
                assert number not in here
                self.disk.blocks = before
            elif number not in here:
                del self.disk.blocks[number]
            else:
                self.bad.discard(number)
            return
        if number not in here:  # killed while it noted the use: the record may be torn
            del self.disk.blocks[number]
        elif num_writes == 0:
            self.disk.blocks = before
        assert set(self.disk.blocks) == set(here)

    @precondition(lambda self: self.disk.blocks)
    @rule(data=st.data(), bit=st.integers(0, 8 * 64 - 1))
    def flip_a_bit_of_a_block(self, data: st.DataObject, bit: int) -> None:
        slot = data.draw(st.integers(0, self.disk.capacity - 1))
        numbers = self.blocks_in(slot)
        if not numbers & self.bad:  # the same bit twice would mend it
            self.flip("blocks", slot * SLOT_BYTES, bit)
            self.bad |= numbers

    @precondition(lambda self: self.disk.blocks)
    @rule(data=st.data(), bit=st.integers(0, 8 * RECORD_BYTES - 1))
    def flip_a_bit_of_a_record_and_restart(self, data: st.DataObject, bit: int) -> None:
        self.tiers.close()
        slot = data.draw(st.integers(0, self.disk.capacity - 1))
        for number in self.blocks_in(slot):
            del self.disk.blocks[number]
        self.flip("index", slot * RECORD_BYTES, bit)
        self.open()

    def flip(self, name: str, offset: int, bit: int) -> None:
        file = self.folder / name
        content = bytearray(file.read_bytes())
        content[offset + bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)

    def blocks_in(self, slot: int) -> set[int]:
        """Return the block that is held in a slot, if any."""
        record = (self.folder / "index").read_bytes()[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
        return {number for number in self.disk.blocks if record[24:40] == hash_of(number)}

    @property
    def folder(self) -> Path:
        (store,) = self.path.iterdir()
        return store / "0"

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "tiers"):
            return
        expected = {hash_of(number) for number in (*self.host.blocks, *self.disk.blocks)}
        assert set(self.tiers.snapshot()) == expected and len(self.tiers) == len(expected)
        for block_hash, is_here in self.tiers.drain_changes().items():
            assert is_here != (block_hash in self.told)
            self.told ^= {block_hash}
        assert self.told == expected
        assert self.tiers.stats().alarms == ()

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.close()
        shutil.rmtree(self.path)


TestTiers = TiersMachine.TestCase
TestTiers.settings = hypothesis_settings(max_examples=60, stateful_step_count=40)
