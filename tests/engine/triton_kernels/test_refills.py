"""The rule of PTX finds refills that other warps' products may still read."""

import pytest

from tests.engine.triton_kernels.refills import refills_without_barrier

LOOP = """
cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;
$L__BB0_2:                              // %loop
cp.async.wait_group 	3;
{before}
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%r2}}, %rd2, %rd3;
wgmma.wait_group.sync.aligned 0;
{behind}
@%p21 bra 	$L__BB0_2;
"""
COPY = "@%p9 cp.async.cg.shared.global [ %r3 + 0 ], [ %rd4 + 0 ], 0x10, %r5;"
STORE = "st.shared.v4.b32 [ %r6 + 0 ], { %r7, %r8, %r9, %r10 };"


@pytest.mark.parametrize("refill", [COPY, STORE])
@pytest.mark.parametrize(
    ("before", "behind", "num_found"),
    [
        ("", "bar.sync 	0;\n{refill}", 0),
        ("bar.sync 	0;\n{refill}", "", 0),
        ("{refill}", "bar.sync 	0;", 0),
        ("bar.sync 	0;", "{refill}", 3),
        ("{refill}", "", 1),
        ("{refill}\nbar.sync 	0;", "", 1),
    ],
)
def test_refills_are_found_where_no_barrier_precedes_them(
    refill: str, before: str, behind: str, num_found: int
) -> None:
    ptx = LOOP.format(before=before.format(refill=refill), behind=behind.format(refill=refill))
    assert refills_without_barrier(ptx) == [refill] * num_found


def test_copies_that_products_do_not_read_need_no_barrier_behind_them() -> None:
    assert refills_without_barrier(LOOP.format(before=f"bar.sync 	0;\n{STORE}", behind=COPY)) == []
