"""Packed columns, rows of tables on the device, padded decode steps."""

import random
from array import array

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.buffers import BlockTables, DecodeColumns, DecodeLayout, RaggedColumns
from engine.cuda.columns import Column, PackedColumns, RowMap
from engine.executor import ScheduledSequence
from engine.ops.metadata import AttentionMetadata, SequenceSpan
from engine.ops.triton_kernels.step import DeviceStep
from engine.sequence import Sequence
from tests.engine.driver import DEVICE, make_sequence
from tests.engine.tiny_models import make_prompt

Array = npt.NDArray[np.generic]

device = torch.device(DEVICE)


def sequence_with(table: list[int], *, num_computed: int = 0, num_tokens: int = 1) -> Sequence:
    sequence = make_sequence(make_prompt(num_tokens, seed=num_tokens))
    sequence.block_table = array("i", table)
    sequence.num_computed = num_computed
    return sequence


def make_columns() -> tuple[PackedColumns, list[tuple[Column, Array]]]:
    columns = PackedColumns()
    arrays: list[Array] = [
        np.arange(5, dtype=np.int64),
        np.array([7], dtype=np.int32),
        np.array([], dtype=np.int64),
        np.array([0.1, -2.5, np.inf]),
        np.arange(6, dtype=np.int32).reshape(3, 2),
        np.array([2**62, -1], dtype=np.int64),
    ]
    return columns, [(columns.add(each), each) for each in arrays]


def test_upload_brings_columns_of_all_types_unchanged_and_aligned() -> None:
    columns, expected = make_columns()
    words = columns.upload(device)
    for column, each in expected:
        tensor = column.of(words)
        assert tensor.cpu().numpy().dtype == each.dtype
        assert np.array_equal(tensor.cpu().numpy(), each)
        assert tensor.data_ptr() % 16 == 0 or not each.size


@pytest.mark.parametrize("room", [-3, 0, 50])
def test_upload_into_an_arena_keeps_the_fixed_columns_there_when_the_rest_overflows(room: int) -> None:
    columns, expected = make_columns()
    arena = torch.full((columns.num_words + room,), 99, dtype=torch.int64, device=device)
    first = expected[0][0]
    words = columns.upload_into(arena, num_fixed=6)
    assert first.of(arena).tolist() == [0, 1, 2, 3, 4]
    for column, each in expected:
        assert np.array_equal(column.of(words).cpu().numpy(), each)
    assert (words.data_ptr() == arena.data_ptr()) == (room >= 0)


def apply(tables: BlockTables, sequences: list[Sequence]) -> tuple[list[int], int]:
    """Update tables; return the rows, and the number of words sent to the device."""
    columns = PackedColumns()
    rows = tables.assign(sequences)
    update = tables.plan(sequences, rows, columns)
    tables.apply(update, columns.upload(device))
    return rows, columns.num_words


def test_block_tables_under_any_change_equal_the_sequences_tables() -> None:
    rng = random.Random(0)
    tables = BlockTables(num_rows=5, max_blocks=12, device=device)
    sequences = [sequence_with([]) for _ in range(9)]
    for _ in range(300):
        batch = rng.sample(sequences, rng.randint(1, 5))
        for sequence in batch:
            table = sequence.block_table
            match rng.randrange(5):
                case 0 if len(table) < 12:
                    table.append(rng.randrange(100))
                case 1 if table:
                    table[rng.randrange(len(table))] = rng.randrange(100)
                case 2:
                    sequence.block_table = array("i", (rng.randrange(100) for _ in range(rng.randint(0, 12))))
                case 3 if table:
                    del table[rng.randrange(len(table)) :]
        if rng.randrange(10) == 0:  # a step that fails between its plan and its launch
            tables.plan(batch, tables.assign(batch), PackedColumns())
            continue
        rows, _ = apply(tables, batch)
        for row, sequence in zip(rows, batch, strict=True):
            assert tables.tables[row, : len(sequence.block_table)].tolist() == sequence.block_table.tolist()


def test_block_tables_send_only_blocks_that_are_new() -> None:
    tables = BlockTables(num_rows=2, max_blocks=1000, device=device)
    sequence = sequence_with(list(range(900)))
    apply(tables, [sequence])
    assert apply(tables, [sequence])[1] == 0
    sequence.block_table.append(5)
    assert apply(tables, [sequence])[1] <= 4


def decode_batch() -> list[ScheduledSequence]:
    known = sequence_with([4, 9], num_computed=6, num_tokens=7)
    pending = sequence_with([2, 7, 1], num_computed=8, num_tokens=8)
    return [ScheduledSequence(known, 1, 1), ScheduledSequence(pending, 1, 1, input_row=3)]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_decode_columns_at_any_size_describe_the_batch_and_inert_padding(size: int) -> None:
    batch = decode_batch()
    columns = PackedColumns()
    layout = DecodeLayout(size=size, head_words=10, block_size=4)
    step = DecodeColumns.add(batch, [5, 6], (), layout, columns)
    arena = torch.arange(100, 100 + 10 + columns.num_words, dtype=torch.int64, device=device)
    columns.upload_into(arena[10:], num_fixed=step.num_words)
    words = arena[10:]
    token_ids = arena.index_select(0, step.token_places.of(words))
    padding = [0] * (size - 2)
    assert token_ids.tolist()[:2] == [batch[0].sequence.token_ids[6], 103]
    assert set(token_ids.tolist()[2:]) <= {batch[0].sequence.token_ids[6]}  # any existing token will do
    assert step.positions.of(words).tolist() == [6, 8, *padding]
    assert step.slot_mapping.of(words).tolist() == [9 * 4 + 2, 1 * 4, *[-1] * (size - 2)]
    assert step.context_lens.of(words).tolist() == [7, 9, *padding]
    assert step.table_rows.of(words).tolist()[:2] == [5, 6]


def test_decode_columns_of_any_batch_lie_where_those_of_an_empty_one_do() -> None:
    layout = DecodeLayout(size=4, head_words=10, block_size=4)
    assert DecodeColumns.add((), (), (), layout, PackedColumns()) == DecodeColumns.add(
        decode_batch(), [5, 6], (), layout, PackedColumns()
    )


def test_ragged_columns_equal_the_kernels_own_description_of_the_step() -> None:
    chunk = sequence_with([8, 0, 3, 11], num_computed=3, num_tokens=14)
    batch = [*decode_batch(), ScheduledSequence(chunk, 11, 1)]
    metadata = AttentionMetadata.from_spans([SequenceSpan.of(item) for item in batch], block_size=4)
    tables = BlockTables(num_rows=4, max_blocks=9, device=device)
    columns = PackedColumns()
    sequences = [item.sequence for item in batch]
    rows = tables.assign(sequences)
    step = RaggedColumns.add(batch, metadata, rows, 4, columns)
    update = tables.plan(sequences, rows, columns)
    words = columns.upload(device)
    tables.apply(update, words)
    found = step.on_device(words, tables.tables)
    expected = DeviceStep.from_metadata(metadata, tile_tokens=4, device=device)
    for name in ("positions", "slot_mapping", "context_lens", "query_start_loc", "decode_seqs", "prefill_tiles"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.block_tables.shape == expected.block_tables.shape
    for ours, theirs, sequence in zip(found.block_tables, expected.block_tables, sequences, strict=True):
        num_blocks = len(sequence.block_table)
        assert torch.equal(ours[:num_blocks], theirs[:num_blocks])
    sampled = torch.tensor([70, 71, 72, 73], device=device)
    token_ids = [batch[0].sequence.token_ids[6], 73, *chunk.token_ids[3:14]]
    assert step.input_ids(words, sampled).tolist() == token_ids


KEYS = st.integers(0, 9)


@given(st.lists(st.lists(KEYS, max_size=4), max_size=30))
def test_assign_in_any_order_gives_distinct_keys_distinct_rows(batches: list[list[int]]) -> None:
    rows: RowMap[int] = RowMap(4)
    for batch in batches:
        given_rows = dict(zip(batch, rows.assign(batch), strict=True))
        assert len(set(given_rows.values())) == len(given_rows)
        assert set(given_rows.values()) <= set(range(4))
        assert rows.assign(batch) == [given_rows[key] for key in batch]


def test_assign_when_rows_are_all_given_takes_the_one_unused_longest() -> None:
    rows: RowMap[str] = RowMap(3)
    first = dict(zip("abc", rows.assign(["a", "b", "c"]), strict=True))
    rows.assign(["a"])
    assert rows.assign(["d", "b"]) == [first["c"], first["b"]]
    assert rows.assign(["a"]) == [first["a"]]


def test_grow_keeps_what_is_given_and_adds_rows() -> None:
    rows: RowMap[str] = RowMap(1)
    (kept,) = rows.assign(["a"])
    rows.grow(3)
    assert sorted(rows.assign(["a", "b", "c"])) == [0, 1, 2]
    assert rows.assign(["a"]) == [kept]
    assert rows.num_rows == 3
