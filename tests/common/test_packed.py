"""Packed tokens and hashes equal lists of objects at every block boundary; invalid batches of KV events are refused."""

import hashlib
import struct

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from common.block_hash import NO_HASHES, ROOT_BYTES, BlockHashes, hash_blocks, hash_root
from common.errors import InvalidRequest
from common.ids import BlockHash, HashRoot
from common.kv_events import decode_events
from common.tokens import TokenArray, as_tokens, token_view
from common.wire import pack_tokens, token_ids_from_proto, unpack_tokens
from kvrelay.v1 import inference_pb2

ROOT = hash_root(model_fingerprint="model")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)
DIGESTS = st.lists(st.binary(min_size=16, max_size=16).map(BlockHash), max_size=6)


@given(TOKENS)
def test_tokens_through_the_wire_come_back_equal(ids: list[int]) -> None:
    packed = pack_tokens(as_tokens(ids))
    assert packed == b"".join(token.to_bytes(4, "little") for token in ids)
    assert unpack_tokens(packed, vocab_size=2**32, field="f") == as_tokens(ids) == as_tokens(np.array(ids, np.uint32))
    message = inference_pb2.TokenIds(ids=ids)
    assert token_ids_from_proto(message.ids, vocab_size=2**32, field="f").tolist() == ids
    assert token_view(as_tokens(ids)).tolist() == token_view(ids).tolist() == ids


def test_each_byte_of_a_byte_string_is_one_token() -> None:
    assert as_tokens(b"\1\2\3\4").tolist() == [1, 2, 3, 4]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20))
def test_token_beyond_the_vocabulary_is_refused_by_position(ids: list[int]) -> None:
    bad = next((i for i, token in enumerate(ids) if token >= 10), None)
    if bad is None:
        assert unpack_tokens(pack_tokens(ids), vocab_size=10, field="f").tolist() == ids
        return
    with pytest.raises(InvalidRequest, match=f"token {ids[bad]} at position {bad} is not in") as caught:
        unpack_tokens(pack_tokens(ids), vocab_size=10, field="f")
    assert caught.value.field == "f"


@pytest.mark.parametrize("num_bytes", [1, 3, 5])
def test_partial_token_is_refused_by_field(num_bytes: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        unpack_tokens(bytes(num_bytes), vocab_size=10, field="f")
    assert caught.value.field == "f"


@given(TOKENS, st.integers(1, 5))
def test_block_hashes_are_chained_as_documented(ids: list[int], block_size: int) -> None:
    expected: list[bytes] = []
    parent: bytes = ROOT
    for start in range(0, len(ids) - block_size + 1, block_size):
        block = pack_tokens(ids[start : start + block_size])
        parent = hashlib.blake2b(parent + block, digest_size=16).digest()
        expected.append(parent)
    hashes = hash_blocks(as_tokens(ids), root=ROOT, block_size=block_size)
    assert list(hashes) == expected
    for num_known in range(len(hashes) + 1):  # the chain continues from each of its links
        known = hashes[:num_known]
        rest = as_tokens(ids[num_known * block_size :])
        assert known + hash_blocks(rest, root=known[-1] if known else ROOT, block_size=block_size) == hashes


def xxh3_colliding_block(shift: int) -> TokenArray:
    """Return 64 tokens whose xxh3_128 is the same after every 16-byte parent, for any shift.

    Two 64-bit words match the hash's public secret so that both of its products are 0, and only their sum counts.
    """
    words = [0] * 32
    for stripe, key, sign in ((1, 0x2C81017C, 1), (2, 0xE96DD4DE, -1)):
        words[stripe * 8 - 2] = key + ((1 << 20) + sign * shift << 32)
    return as_tokens(np.frombuffer(struct.pack("<32Q", *words), dtype="<u4"))


@pytest.mark.parametrize("root", [ROOT, hash_root(model_fingerprint="model", cache_salt="another")])
def test_prompt_built_to_collide_with_another_does_not_get_its_blocks(root: HashRoot) -> None:
    mine, victims = xxh3_colliding_block(1), xxh3_colliding_block(2)
    parent = root[:16]
    assert mine != victims
    assert xxhash.xxh3_128_digest(parent + pack_tokens(mine)) == xxhash.xxh3_128_digest(parent + pack_tokens(victims))
    assert hash_blocks(mine, root=root, block_size=64) != hash_blocks(victims, root=root, block_size=64)


def test_hashes_of_one_prompt_differ_by_model_salt_and_block_key() -> None:
    roots = [
        hash_root(model_fingerprint=model, cache_salt=salt, key=key)
        for model in ("model", "model2")
        for salt in ("", "a")
        for key in (b"", bytes(32), b"1" * 64)
    ]
    assert {len(root) for root in roots} == {ROOT_BYTES}
    first_blocks = {hash_blocks(range(4), root=root, block_size=4)[0] for root in roots}
    assert len(first_blocks) == len(roots)
    assert all(root[: len(block)] != block for root in roots for block in first_blocks)


@given(DIGESTS, DIGESTS)
def test_block_hashes_behave_as_the_sequence_of_their_digests(left: list[BlockHash], right: list[BlockHash]) -> None:
    hashes = BlockHashes.of(left)
    assert (list(hashes), len(hashes), hashes.digests()) == (left, len(left), left)
    assert hashes.keys == [int.from_bytes(digest[:8], "little") % 2**60 for digest in left]
    assert [hashes[i] for i in range(-len(left), len(left))] == left + left
    assert list(hashes[1:3]) == left[1:3]
    both = hashes + BlockHashes.of(right)
    assert (both.keys, both) == (BlockHashes.of(left + right).keys, BlockHashes.of(left + right))
    assert (both == hashes) is (not right)


def test_block_hashes_refuse_partial_hashes_and_steps() -> None:
    with pytest.raises(ValueError, match="17 bytes are not a multiple of 16"):
        BlockHashes(bytes(17))
    with pytest.raises(ValueError, match="only consecutive ones"):
        BlockHashes(bytes(64))[::2]
    with pytest.raises(IndexError):
        NO_HASHES[0]


@pytest.mark.parametrize(
    "batch",
    [
        {"v": 1, "snap": False, "add": "x" * 16, "del": b""},
        {"v": 1, "snap": False, "add": b"", "del": [1] * 16},
        {"v": 1, "snap": False, "add": b"x" * 15, "del": b""},
        {"v": 2, "snap": False, "add": b"", "del": b""},
        {"v": 1, "snap": False, "add": b"", "del": b"", "off": 1},
        {"v": 1},
        [1, 2],
        7,
    ],
)
def test_invalid_batch_is_refused_as_a_whole(batch: object) -> None:
    with pytest.raises(ValueError, match=r"KV event|block hash"):
        decode_events(msgpack.packb(batch))


@given(st.lists(st.tuples(st.binary(min_size=16, max_size=16), st.booleans())))
def test_split_block_hashes_keep_their_order(pairs: list[tuple[bytes, bool]]) -> None:
    hashes = BlockHashes.of(BlockHash(each) for each, _belongs in pairs)
    first, others = hashes.split([belongs for _each, belongs in pairs])
    assert first.digests() == [each for each, belongs in pairs if belongs]
    assert others.digests() == [each for each, belongs in pairs if not belongs]
