import numpy as np
import torch

from engine.ops.triton_kernels.step import DeviceStep
from tests.engine.triton_kernels.support import Case


def test_device_step_from_mixed_metadata_describes_it(device: torch.device) -> None:
    case = Case(spans=[(3, 6), (8, 1), (0, 1), (0, 4)])
    metadata = case.metadata()
    step = DeviceStep.from_metadata(metadata, tile_tokens=4, device=device)
    assert step.positions.tolist() == metadata.positions.tolist()
    assert step.slot_mapping.tolist() == metadata.slot_mapping.tolist()
    assert step.context_lens.tolist() == [9, 9, 1, 4]
    assert step.query_start_loc.tolist() == [0, 6, 7, 8, 12]
    for row, table in zip(step.block_tables.tolist(), metadata.block_tables, strict=True):
        assert row[: len(table)] == table.tolist()
    assert step.decode_seqs is not None
    assert step.decode_seqs.tolist() == [1, 2]
    assert step.num_decodes == 2
    assert step.prefill_tiles is not None
    assert step.prefill_tiles.tolist() == [[0, 4], [0, 0], [3, 0]]


def test_device_step_from_decodes_alone_needs_no_lists(device: torch.device) -> None:
    step = Case(spans=[(8, 1), (0, 1)]).step(device)
    assert step.decode_seqs is None
    assert step.prefill_tiles is None
    assert step.num_decodes == 2


def test_device_step_from_chunks_alone_has_no_decodes(device: torch.device) -> None:
    step = Case(spans=[(8, 2), (0, 3)]).step(device)
    assert step.num_decodes == 0


def test_device_step_from_metadata_has_dtypes_that_kernels_take(device: torch.device) -> None:
    step = Case(spans=[(8, 2), (0, 1)]).step(device)
    assert step.slot_mapping.dtype == torch.int64
    others = (step.positions, step.context_lens, step.block_tables, step.query_start_loc)
    assert {tensor.dtype for tensor in others} == {torch.int32}
    assert np.all([tensor.device.type == device.type for tensor in others])
