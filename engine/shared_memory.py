"""Host memory that other processes of this host can map, and that cannot leak.

The region is an anonymous memory file (memfd): it has no name in any file system and is gone with the last process that
holds it, kill -9 included. Another process of the same user opens it as /proc/<pid>/fd/<fd>, and compares the random
bytes at its end with those it was told over gRPC: proof that it opened the right one. The file is sealed: it keeps its
size, since reading a mapping whose file has shrunk kills the reader.
"""

import fcntl
import functools
import mmap
import os
import secrets
import weakref
from pathlib import Path

from engine.executor import SharedRegion

NONCE_BYTES = 16


def allocate_region(num_bytes: int) -> tuple[mmap.mmap, SharedRegion | None]:
    """Return `num_bytes` of zeroed, writable memory (plus a nonce behind them), shareable where the system can."""
    size_bytes = num_bytes + NONCE_BYTES
    if not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, size_bytes), None
    fd = os.memfd_create("kvrelay-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    memory = mmap.mmap(fd, size_bytes)
    weakref.finalize(memory, os.close, fd)  # peers find the region by this descriptor for as long as it is used here
    nonce = secrets.token_bytes(NONCE_BYTES)
    memory[num_bytes:] = nonce
    return memory, SharedRegion(fd=fd, size_bytes=size_bytes, nonce=nonce)


def map_peer_region(*, pid: int, fd: int, size_bytes: int, nonce: bytes) -> mmap.mmap:
    """Return another process's region, read-only. Raises OSError when it is not there or is another one."""
    path = f"/proc/{pid}/fd/{fd}"
    peer_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a named pipe would wait for a writer
    try:
        if size_bytes <= NONCE_BYTES or not fcntl.fcntl(peer_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"{path} is no memory that keeps its size, or has no room for pages")
        actual = os.fstat(peer_fd).st_size
        if actual != size_bytes:
            raise OSError(f"{path} has {actual} bytes, not {size_bytes}")
        memory = mmap.mmap(peer_fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(peer_fd)
    if len(nonce) != NONCE_BYTES or memory[-NONCE_BYTES:] != nonce:
        memory.close()
        raise OSError(f"{path} is not the peer's KV memory")
    return memory


@functools.cache
def host_id() -> str:
    """Return what processes share exactly when one can open the other's /proc entries, or "" where there is none."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}/{Path('/proc/self/ns/pid').readlink()}/{os.getuid()}"
    except OSError:
        return ""
