"""Packed columns, rows of tables on the device, padded decode steps."""

from array import array

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.cuda.buffers import BlockTables, DecodeColumns, DecodeLayout
from engine.device.columns import Column, PackedColumns
from engine.executor import ScheduledSequence
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


def test_decode_columns_of_any_batch_lie_where_those_of_an_empty_one_do() -> None:
    layout = DecodeLayout(size=4, head_words=10, block_size=4)
    assert DecodeColumns.add((), (), (), layout, PackedColumns()) == DecodeColumns.add(
        decode_batch(), [5, 6], (), layout, PackedColumns()
    )
