"""What the order of instructions in a kernel's PTX says."""

import re

_EVENT = re.compile(r"^(\$L__BB)|\b(wgmma\.wait_group|st\.shared|bar\.sync|barrier\.sync|cp\.async\.c[ag])\b")


def unguarded_refills(ptx: str) -> int:
    """Return the number of asynchronous copies that may overwrite what another warp group's product still reads.

    A `wgmma.wait_group` waits for the products of its own four warps. With more warps a barrier must stand between it
    and the next copy into shared memory. A product whose operand was stored there in the same loop, since it had to be
    converted, reads no memory of the copies.
    """
    is_converted = is_pending = False
    count = 0
    for line in ptx.splitlines():
        found = _EVENT.search(line.strip())
        match found and (found[1] or found[2]):
            case None:
                continue
            case "$L__BB":
                is_converted = False
            case "st.shared":
                is_converted = True
            case "wgmma.wait_group":
                is_pending = is_pending or not is_converted
                is_converted = False
            case "bar.sync" | "barrier.sync":
                is_pending = False
            case _:
                count += is_pending
    return count
