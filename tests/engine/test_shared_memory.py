"""Regions that other processes map: found by pid and descriptor, refused when they are wrong, and never leaked."""

import gc
import os
from pathlib import Path

import pytest

from engine.executor import NONCE_BYTES
from engine.shared_memory import allocate_region, map_peer_region


def test_peer_sees_what_is_written_and_only_with_the_right_nonce_and_size() -> None:
    memory, region = allocate_region(64)
    assert region is not None
    peer = map_peer_region(pid=os.getpid(), fd=region.fd, size_bytes=region.size_bytes, nonce=region.nonce)
    memory[:5] = b"hello"
    assert peer[:5] == b"hello"
    for size_bytes, nonce in ((region.size_bytes, b"x" * NONCE_BYTES), (region.size_bytes + 1, region.nonce)):
        with pytest.raises(OSError, match="/proc/"):
            map_peer_region(pid=os.getpid(), fd=region.fd, size_bytes=size_bytes, nonce=nonce)


def test_dropped_region_closes_its_descriptor_and_survives_in_a_mapping() -> None:
    memory, region = allocate_region(64)
    assert region is not None
    memory[:5] = b"hello"
    peer = map_peer_region(pid=os.getpid(), fd=region.fd, size_bytes=region.size_bytes, nonce=region.nonce)
    del memory
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(region.fd)
    assert peer[:5] == b"hello"


def test_descriptor_of_a_named_pipe_or_an_empty_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it waits for a writer
    pipe, empty = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), os.memfd_create("empty")
    try:
        for fd in (pipe, empty):
            with pytest.raises(OSError, match="/proc/"):
                map_peer_region(pid=os.getpid(), fd=fd, size_bytes=0, nonce=b"x" * NONCE_BYTES)
    finally:
        os.close(pipe)
        os.close(empty)


def test_region_keeps_its_size_so_that_no_peer_can_kill_its_readers() -> None:
    _memory, region = allocate_region(64)
    assert region is not None
    for size_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size_bytes)


def test_peer_that_names_a_pipe_or_memory_that_could_shrink_is_refused_at_once() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    unsealed = os.memfd_create("x", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, 64)
    empty = os.memfd_create("x", os.MFD_CLOEXEC)
    for fd, size_bytes in ((reading, 0), (unsealed, 64), (empty, 0)):
        with pytest.raises(OSError):
            map_peer_region(pid=os.getpid(), fd=fd, size_bytes=size_bytes, nonce=bytes(NONCE_BYTES))
        os.close(fd)
