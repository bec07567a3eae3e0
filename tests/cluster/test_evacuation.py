"""Distribution of prefixes, and evacuation between real workers with fake engines."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.processes import evacuation
from cluster.processes.evacuation import Evacuation, Peer, Room, share_out
from cluster.processes.plan import ProcessRole
from common.block_hash import BlockHashes
from common.ids import BlockHash
from common.prefix_chains import ChainSelection, PrefixChain, whole_chain
from tests.builders import BLOCK_SIZE, make_request
from tests.trust import CONTROLLER
from tests.worker.cluster import running_pool, until_empty
from worker.serving import RunningWorker

NAMES = ("prefill-0", "prefill-1", "prefill-2", "decode-0")
GRACE_S = 120.0


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


@st.composite
def forests(draw: st.DrawFn) -> list[PrefixChain]:
    """Return chains with blocks of their own, some of which branch off earlier ones."""
    chains: list[PrefixChain] = []
    number = 0
    for _ in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, 5))
        trunk = draw(st.none() | st.integers(0, len(chains) - 1)) if chains else None
        shared = 0 if trunk is None else draw(st.integers(chains[trunk].num_shared + 1, chains[trunk].num_all))
        hashes = BlockHashes.of(block(number + i) for i in range(length))
        chains.append(PrefixChain(hashes=hashes, values=(1.0,) * length, num_reused=0, trunk=trunk, num_shared=shared))
        number += length
    return chains


def room(chains: list[PrefixChain], num_free: int, *, role: ProcessRole = ProcessRole.PREFILL) -> Room:
    peer = Peer(worker_id=f"{role}-{num_free}", address="", role=role)
    return Room(
        peer=peer,
        num_free=num_free,
        is_second_choice=role is not ProcessRole.PREFILL,
        selection=ChainSelection(chains),
    )


@given(chains=forests(), sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4), max_blocks=st.integers(0, 40))
def test_every_chain_comes_whole_to_at_most_one_room_that_has_it(
    chains: list[PrefixChain], sizes: list[int], max_blocks: int
) -> None:
    rooms = [room(chains, size) for size in sizes]
    share_out(chains, rooms, max_blocks=max_blocks)

    wanted = {whole_chain(chains, idx).hashes for idx in range(len(chains))}
    ends: Counter[BlockHash] = Counter()
    for each in rooms:
        chosen = each.selection.chosen
        named = [whole_chain(chosen, idx) for idx in range(len(chosen))]
        assert {whole.hashes for whole in named} <= wanted, "from the root to the end, without a gap"
        assert sum(len(chain.hashes) for chain in chosen) == each.num_taken <= each.num_free
        ends.update(whole.hashes[-1] for whole in named)
    assert not ends or max(ends.values()) == 1, "no chain goes to two rooms"


@given(chains=forests())
def test_one_room_that_is_large_enough_gets_everything_once(chains: list[PrefixChain]) -> None:
    large = room(chains, 1000)
    share_out(chains, [large], max_blocks=1000)

    assert large.num_taken == sum(len(chain.hashes) for chain in chains)


def test_other_pool_gets_only_what_its_own_pool_has_no_room_for() -> None:
    chains = [
        PrefixChain(hashes=BlockHashes.of(map(block, range(10 * i, 10 * i + 4))), values=(1.0,) * 4, num_reused=0)
        for i in range(3)
    ]
    own, other = room(chains, 9), room(chains, 100, role=ProcessRole.DECODE)
    share_out(chains, [other, own], max_blocks=100)

    assert (own.selection.chosen, other.selection.chosen) == (chains[:2], chains[2:])


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers take their time: what has not moved within its limit stays where it is."""
    for limit in ("MAX_EVACUATION_S", "WARMING_S", "_ANSWER_S"):
        monkeypatch.setattr(evacuation, limit, GRACE_S / 2)


def peer(worker: RunningWorker) -> Peer:
    return Peer(worker_id=worker.runtime.worker_id, address=worker.address, role=ProcessRole(worker.role))


def chat(number: int, num_blocks: int = 10) -> list[int]:
    return [number + 1] * (num_blocks * BLOCK_SIZE)


async def test_prefixes_of_a_worker_that_goes_are_found_on_those_that_stay() -> None:
    async with running_pool({name: {"lease_ttl_s": 60.0} for name in NAMES}) as pool:
        leaving, *staying = (pool.workers[name] for name in NAMES)
        for number in range(4):
            await pool.pair("prefill-0", "decode-0").generate(make_request(chat(number), max_tokens=1))
        await until_empty(leaving)
        moved = await Evacuation(CONTROLLER).evacuate(peer(leaving), [peer(each) for each in staying], grace_s=GRACE_S)
        await pool.until_empty()
        held = {
            each.runtime.worker_id: await each.runtime.engine.call(lambda core: set(core.snapshot().stored))
            for each in staying
        }
        hashes = [make_request(chat(number)).block_hashes for number in range(4)]

        assert moved == 40
        owners = [[name for name, stored in held.items() if set(each) <= stored] for each in hashes]
        assert Counter(name for names in owners for name in names if name.startswith("prefill")) == {
            "prefill-1": 2,
            "prefill-2": 2,
        }


async def test_peer_that_does_not_answer_holds_nothing_up_and_others_take_over() -> None:
    async with running_pool({name: {"lease_ttl_s": 60.0} for name in NAMES}) as pool:
        leaving, staying = pool.workers["prefill-0"], pool.workers["prefill-1"]
        await pool.pair("prefill-0", "decode-0").generate(make_request(chat(1), max_tokens=1))
        await until_empty(leaving)
        dead = Peer(worker_id="prefill-9", address="127.0.0.1:1", role=ProcessRole.PREFILL)
        moved = await Evacuation(CONTROLLER).evacuate(peer(leaving), [dead, peer(staying)], grace_s=GRACE_S)

        assert moved == 10


async def test_worker_that_is_gone_is_evacuated_without_an_error() -> None:
    async with running_pool({"prefill-1": {}}) as pool:
        gone = Peer(worker_id="prefill-0", address="127.0.0.1:1", role=ProcessRole.PREFILL)
        assert await Evacuation(CONTROLLER).evacuate(gone, [peer(pool.workers["prefill-1"])], grace_s=GRACE_S) == 0
        assert await Evacuation(CONTROLLER).evacuate(peer(pool.workers["prefill-1"]), [], grace_s=GRACE_S) == 0


async def test_new_worker_begins_with_the_hottest_prefixes_of_its_pool() -> None:
    async with running_pool({name: {"lease_ttl_s": 60.0} for name in NAMES}) as pool:
        newcomer, *peers = (pool.workers[name] for name in NAMES)
        for name, number in (("prefill-1", 1), ("prefill-2", 2)):
            await pool.pair(name, "decode-0").generate(make_request(chat(number), max_tokens=1))
        moved = await Evacuation(CONTROLLER).warm(peer(newcomer), [peer(each) for each in peers])
        answers = [
            await pool.pair("prefill-0", "decode-0").generate(make_request([*chat(number), 9, 9], max_tokens=1))
            for number in (1, 2)
        ]

        assert moved == 20
        assert [each.num_cached for each in answers] == [10 * BLOCK_SIZE] * 2
