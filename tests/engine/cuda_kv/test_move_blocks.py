"""The kernel against plain torch, in the interpreter or on a GPU, and compiled for Hopper without one."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.kv_copy import move_blocks_in_torch
from tests.engine.cuda_kv.support import DEVICE

pytest.importorskip("triton")

from engine.cuda.move_blocks import move_blocks


@settings(max_examples=20, deadline=None)
@given(
    num_parts=st.integers(1, 4),
    num_words=st.sampled_from([1, 7, 1023, 1024, 1025]),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8]),
    ids=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=6, unique_by=lambda pair: pair[1]),
    layouts=st.tuples(st.booleans(), st.booleans()),
)
def test_move_blocks_equals_torch_in_every_layout(
    num_parts: int,
    num_words: int,
    dtype: torch.dtype,
    ids: list[tuple[int, int]],
    layouts: tuple[bool, bool],
) -> None:
    def blocks(num_blocks: int, by_part: bool) -> torch.Tensor:
        sizes = (num_parts, num_blocks, num_words) if by_part else (num_blocks, num_parts, num_words)
        values = torch.arange(num_blocks * num_parts * num_words).to(dtype).view(sizes).to(DEVICE)
        return values.transpose(0, 1) if by_part else values

    source, target = blocks(4, layouts[0]) + 1, blocks(6, layouts[1])
    source_ids = torch.tensor([pair[0] for pair in ids], dtype=torch.int64, device=DEVICE)
    target_ids = torch.tensor([pair[1] for pair in ids], dtype=torch.int64, device=DEVICE)
    expected = target.clone()
    move_blocks_in_torch(source, source_ids, expected, target_ids)
    move_blocks(source, source_ids, target, target_ids)
    assert torch.equal(target, expected)


_COMPILE = """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from engine.cuda.move_blocks import _move_blocks
    names = _move_blocks.arg_names
    signature = dict.fromkeys(names, "i64") | {name: "*i64" for name in names[:4]} | {"words_per_part": "i32"}
    divisible = {(i,): [["tt.divisibility", 16]] for i in range(9)}
    source = ASTSource(_move_blocks, signature | {"WORDS": "constexpr"}, {"WORDS": 1024}, divisible)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert "ld.global.v2.b64" in kernel.asm["ptx"], "loads are not 16 bytes wide"
    assert "st.global.v2.b64" in kernel.asm["ptx"], "stores are not 16 bytes wide"
    assert kernel.asm["cubin"]
"""


def test_move_blocks_compiled_for_hopper_loads_and_stores_16_bytes_at_once() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_COMPILE)],
        capture_output=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr.decode()
