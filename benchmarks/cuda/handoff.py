"""KV from one process to another on one card, against a plain copy inside the card.

    python -m benchmarks.cuda.handoff [--device cuda] [--out DIR] [--smoke]

Method. A second process holds pages of the shape of Qwen3-8B, full of noise, and reports over a pipe where they are, as
a prefill worker does over gRPC. This process maps them once (CUDA IPC) and copies blocks out of them into pages of its
own, scattered on both sides, as a decode worker does; each copy has ended when the call returns. The bytes are compared
with what the other process read for itself. Bound: the same bytes at the measured rate of a large copy, which counts a
byte twice, read and written. On a CPU, shared memory takes the place of CUDA IPC.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from benchmarks.cuda.arms import BLOCK_SIZE, Arm, Format
from benchmarks.cuda.card import load_rates
from benchmarks.cuda.part import Part, part_parser, run_part
from benchmarks.cuda.report import Reading
from common.ids import BlockId
from engine.device.shared_memory import map_peer_region
from engine.kv_store import DeviceRegion, KvShape
from engine.pages.kv_cache import TorchKvStore

_GOAL = 0.5
_NUM_CHECKED = 16

CopyBlocks = Callable[[Sequence[BlockId], Sequence[BlockId]], None]
"""(the peer's blocks, ours): done when it returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Blocks that are moved."""

    model: str
    num_blocks: int
    num_moved: tuple[int, ...]
    """Blocks per handoff."""
    repetitions: int


FULL = Sizes(model="qwen3-8b", num_blocks=640, num_moved=(8, 64, 512), repetitions=20)
SMOKE = Sizes(model="tiny", num_blocks=32, num_moved=(4, 16), repetitions=3)


def _shape(sizes: Sizes) -> KvShape:
    decoder = Arm(model=sizes.model, format=Format.BF16).decoder
    return KvShape(
        num_layers=decoder.num_layers,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        block_size=BLOCK_SIZE,
        dtype="bfloat16",
        row_bytes=2 * decoder.head_dim,
        fingerprint="benchmark",
    )


def _serve(device: torch.device, sizes: Sizes) -> None:
    """The second process: hold pages until the pipe is closed."""
    store = TorchKvStore(_shape(sizes), sizes.num_blocks, device=device)
    for keys_or_values in (pages for layer in store.layers for pages in layer):
        keys_or_values.copy_(torch.randn(keys_or_values.shape, dtype=torch.bfloat16, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    told: dict[str, Any] = {"checksums": [_checksum(store, BlockId(i)) for i in range(_NUM_CHECKED)]}
    if store.device_sharing is not None:
        region = store.device_sharing.region
        told["device"] = {
            "handle": region.handle.hex(),
            "offset_bytes": region.offset_bytes,
            "size_bytes": region.size_bytes,
            "device_uuid": region.device_uuid,
            "nonce": region.nonce.hex(),
        }
    elif store.shared_region is not None:
        shared = store.shared_region
        told["host"] = {
            "fd": shared.fd,
            "size_bytes": shared.size_bytes,
            "nonce": shared.nonce.hex(),
            "pid": os.getpid(),
        }
    print(json.dumps(told), flush=True)
    sys.stdin.read()


def _checksum(store: TorchKvStore, block_id: BlockId) -> int:
    return xxhash.xxh3_64_intdigest(store.read_blocks([block_id]))


@contextmanager
def _peer(part: Part) -> Iterator[dict[str, Any]]:
    """Run the second process; yields its description of its pages."""
    command = [sys.executable, "-m", "benchmarks.cuda.handoff", "--serve", "--device", part.device.type]
    command += ["--smoke"] if part.is_smoke else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the second process ended with status {process.wait()}")
        yield json.loads(line)
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _mapped(store: TorchKvStore, told: dict[str, Any], num_blocks: int) -> Iterator[CopyBlocks]:
    """Map the peer's pages and yield what copies blocks out of them."""
    if "device" in told:
        if store.device_sharing is None:
            raise RuntimeError("these pages cannot be shared, so the peer's cannot be mapped; see the log")
        raw = told["device"]
        region = DeviceRegion(
            handle=bytes.fromhex(raw["handle"]),
            offset_bytes=raw["offset_bytes"],
            size_bytes=raw["size_bytes"],
            device_uuid=raw["device_uuid"],
            nonce=bytes.fromhex(raw["nonce"]),
        )
        pages = store.device_sharing.map_peer(region, num_blocks)
        try:
            yield pages.copy_blocks
        finally:
            pages.close()
    elif "host" in told:
        raw = told["host"]
        memory = map_peer_region(
            pid=raw["pid"], fd=raw["fd"], size_bytes=raw["size_bytes"], nonce=bytes.fromhex(raw["nonce"])
        )
        peer = store.map_peer(memoryview(memory), num_blocks)
        yield lambda sources, targets: store.write_blocks(targets, peer.read_blocks(sources))
    else:
        raise RuntimeError("the second process could not share its pages; see its log above")


def measure(part: Part) -> None:
    """Move blocks between two processes."""
    sizes = SMOKE if part.is_smoke else FULL
    shape = _shape(sizes)
    bytes_per_s = load_rates(part).copy_bytes_per_s / 2
    store = TorchKvStore(shape, sizes.num_blocks, device=part.device)
    with _peer(part) as told:
        started_s = time.perf_counter()
        with _mapped(store, told, sizes.num_blocks) as copy_blocks:
            print(f"  mapped in {(time.perf_counter() - started_s) * 1000:.1f} ms", flush=True)
            with part.case("bytes arrive unchanged"):
                _check_bytes(store, told, copy_blocks)
            for num_moved in sizes.num_moved:
                with part.case(f"{num_moved} blocks"):
                    elapsed_s = _time_moves(copy_blocks, sizes, num_moved)
                    part.add(
                        _reading(shape, num_moved, elapsed_s, bytes_per_s, is_largest=num_moved == sizes.num_moved[-1])
                    )


def _check_bytes(store: TorchKvStore, told: dict[str, Any], copy_blocks: CopyBlocks) -> None:
    sources = [BlockId(i) for i in range(_NUM_CHECKED)]
    targets = [BlockId(store.num_blocks - 1 - i) for i in range(_NUM_CHECKED)]
    copy_blocks(sources, targets)
    found = [_checksum(store, block_id) for block_id in targets]
    if found != told["checksums"]:
        wrong = sum(mine != theirs for mine, theirs in zip(found, told["checksums"], strict=True))
        raise AssertionError(f"{wrong} of {_NUM_CHECKED} blocks arrived with other bytes")


def _time_moves(copy_blocks: CopyBlocks, sizes: Sizes, num_moved: int) -> float:
    rng = random.Random(num_moved)
    ids = [BlockId(i) for i in range(sizes.num_blocks)]
    times = []
    for _ in range(sizes.repetitions + 2):
        sources, targets = rng.sample(ids, num_moved), rng.sample(ids, num_moved)
        started_s = time.perf_counter()
        copy_blocks(sources, targets)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[2:])


def _reading(shape: KvShape, num_moved: int, elapsed_s: float, bytes_per_s: float, *, is_largest: bool) -> Reading:
    num_bytes = num_moved * shape.block_bytes
    return Reading(
        case=f"{num_moved * shape.block_size} tokens, {num_bytes / 1e6:.0f} MB",
        value=num_bytes / elapsed_s / 1e9,
        unit="GB/s",
        bound=bytes_per_s / 1e9,
        ratio=num_bytes / elapsed_s / bytes_per_s,
        goal=_GOAL if is_largest else None,
        note=f"{elapsed_s * 1e6:.0f} us",
    )


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = part_parser("handoff", __doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        _serve(torch.device(args.device), SMOKE if args.smoke else FULL)
        return 0
    return run_part("handoff", "KV handoff between two processes on one card", args, measure)


if __name__ == "__main__":
    sys.exit(main())
