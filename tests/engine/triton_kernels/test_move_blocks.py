import pytest
import torch

from engine.cuda.kv_copy import block_view, move_blocks_in_torch
from engine.cuda.move_blocks import move_blocks
from engine.executor import KvShape
from tests.engine.triton_kernels.support import bits


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype"),
    [(16, 128, torch.bfloat16), (4, 10, torch.float32), (3, 10, torch.float16), (1, 5, torch.float8_e4m3fn)],
)
def test_move_blocks_of_any_word_equals_torch(
    block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = KvShape(
        num_layers=2,
        num_kv_heads=3,
        head_dim=head_dim,
        block_size=block_size,
        dtype=str(dtype).removeprefix("torch."),
        bytes_per_element=dtype.itemsize,
        fingerprint="test",
    )
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 2, 7, block_size, 3, head_dim * dtype.itemsize)
    source, target = torch.randint(0, 256, (2, *sizes), generator=generator, dtype=torch.uint8).to(device)
    expected = target.clone()
    source_ids, target_ids = torch.tensor([5, 0, 6], device=device), torch.tensor([1, 6, 2], device=device)
    move_blocks(block_view(source, shape), source_ids, block_view(target, shape), target_ids)
    move_blocks_in_torch(block_view(source, shape), source_ids, block_view(expected, shape), target_ids)
    assert torch.equal(bits(target), bits(expected))
