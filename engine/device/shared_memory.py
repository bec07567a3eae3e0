"""Host memory that other processes of this host can map and that cannot leak.

The region is an anonymous memory file (memfd): it has no name in any file system and is freed with the last process
that holds it, kill -9 included. Another process of the same user opens it as /proc/<pid>/fd/<fd> and compares the
random bytes at its end with those received over gRPC, as proof that it opened the right one. The file is sealed against
changes of its size: reading a mapping whose file has shrunk would kill the reader.
"""

import fcntl
import functools
import mmap
import os
import secrets
import weakref
from contextlib import suppress
from pathlib import Path

from engine.kv_store import NONCE_BYTES, SharedRegion


def allocate_region(
    num_bytes: int, *, num_pieces: int = 1, num_window_pieces: int = 1
) -> tuple[mmap.mmap, SharedRegion | None]:
    """Return `num_bytes` of zeroed, writable memory plus a nonce, shareable where the system supports it.

    `num_pieces`, `num_window_pieces`: see `SharedRegion`.
    """
    size_bytes = num_bytes + NONCE_BYTES
    if not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, size_bytes), None
    fd = os.memfd_create("kvrelay-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    memory = mmap.mmap(fd, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    weakref.finalize(memory, os.close, fd)  # peers find the region by this descriptor until it is freed
    nonce = secrets.token_bytes(NONCE_BYTES)
    memory[num_bytes:] = nonce
    region = SharedRegion(
        fd=fd, size_bytes=size_bytes, nonce=nonce, num_pieces=num_pieces, num_window_pieces=num_window_pieces
    )
    return memory, region


def map_peer_region(*, pid: int, fd: int, size_bytes: int, nonce: bytes) -> mmap.mmap:
    """Return another process's region, read-only. Raises OSError when it is missing or another one."""
    path = f"/proc/{pid}/fd/{fd}"
    peer_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe would wait for a writer
    try:
        if size_bytes <= NONCE_BYTES or not fcntl.fcntl(peer_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"cannot map {path}: it is not sealed against shrinking, or has no room for pages")
        actual = os.fstat(peer_fd).st_size
        if actual != size_bytes:
            raise OSError(f"cannot map {path}: it has {actual} bytes, not {size_bytes}")
        memory = mmap.mmap(peer_fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(peer_fd)
    if len(nonce) != NONCE_BYTES or memory[-NONCE_BYTES:] != nonce:
        memory.close()
        raise OSError(f"cannot map {path}: it is not the peer's KV memory")
    return memory


@functools.cache
def host_id() -> str:
    """Return an id that two processes share exactly when each can open the other's /proc entries; "" without /proc."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}/{Path('/proc/self/ns/pid').readlink()}/{os.getuid()}"
    except OSError:
        return ""
