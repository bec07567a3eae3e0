"""KV from one process to another of the same host, by transport, through the code that serves and pulls it.

`python -m benchmarks.transports [--rounds 7] [--device cpu] [--json FILE]`

Method. A second process holds pages of the shape of Qwen3-8B (2.36 MB a block) and serves them on a Unix socket; this
one pulls handoffs of them, each into the same pages of its own. Arms, in turn in each round: `mapped`, the transport
`shm` between pages in host memory; `ring`, the same transport between pages in device memory; `grpc` between those.
Time is that of a whole pull, with its opening and acknowledgement; bytes are those of the blocks. The first pull of
each arm is left out, and its bytes are compared with those sent. On a CPU, device memory is host memory that is copied
by the device's code: a copy to the device there costs what one of host memory does, and nothing is pinned.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import cast

import grpc
import torch

from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, in_turn
from common.clock import SystemClock
from common.config import TransferConfig
from common.ids import BlockId, Epoch, HandoffId, WorkerId
from common.rpc import MIN_PING_INTERVAL_MS, channel_options, unix_address
from engine.kv_store import KvShape
from engine.pages.kv_cache import TorchKvStore
from engine.thread import EngineDriver
from kv_transfer.handoff import HandoffManifest, HandoffTable
from kv_transfer.pull import KvPuller, PullPlan
from kv_transfer.serve import KvTransferService, ServeSettings
from kv_transfer.transports.registry import WorkerTransports
from kv_transfer.wanted import WantedHandoff
from kvrelay.v1 import kv_transfer_pb2_grpc

ARMS = {"mapped": "shm", "ring": "shm", "grpc": "grpc"}
_LEASE_TTL_S = 600.0
_SERVED, _EPOCH = WorkerId("prefill-0"), Epoch(1)
_QWEN3_8B = KvShape(
    num_layers=36, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16", row_bytes=256, fingerprint="benchmark"
)


def make_store(shape: KvShape, num_blocks: int, device: torch.device, *, is_mappable: bool = False) -> TorchKvStore:
    """Return pages in device memory; on a CPU, such as are copied alike, unless they may be mapped."""
    return TorchKvStore(shape, num_blocks, device=device, is_like_device=not is_mappable)


@asynccontextmanager
async def serving(store: TorchKvStore, transport: str, address: str, *, num_handoffs: int) -> AsyncIterator[None]:
    """Serve handoffs `0`, `1` and so on of all blocks, complete from the start."""
    table = HandoffTable(block_size=store.shape.block_size, lease_ttl_s=_LEASE_TTL_S, clock=SystemClock())
    num_tokens, blocks = store.num_blocks * store.shape.block_size, tuple(map(BlockId, range(store.num_blocks)))
    for number in range(num_handoffs):
        handoff = table.begin(HandoffId(str(number)), lambda: None)
        table.progress(handoff, blocks, num_tokens)
        manifest = HandoffManifest(num_tokens=num_tokens, num_blocks=len(blocks), last_block_hash=None, first_tokens=())
        table.complete(handoff, manifest)
    service = KvTransferService(
        table=table,
        engine=cast(EngineDriver, None),
        store=store,
        settings=ServeSettings(
            worker_id=_SERVED,
            epoch=lambda: _EPOCH,
            transports=WorkerTransports.configured(TransferConfig(transports=(transport,)), store),
            lease_ttl_s=_LEASE_TTL_S,
            check_pull=lambda _source, _opened: None,
        ),
        track=nullcontext,
        on_bytes=lambda _transport, _num_bytes: None,
    )
    options = [*channel_options(), ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS)]
    server = grpc.aio.server(options=options)
    kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(service, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


class Pulls:
    """Pulls handoffs one after the other."""

    def __init__(self, store: TorchKvStore, transport: str, channel: grpc.aio.Channel) -> None:
        self._store = store
        self._channel = channel
        self._puller = KvPuller(
            store=store,
            transports=WorkerTransports.configured(TransferConfig(transports=(transport,)), store),
            clock=SystemClock(),
            on_bytes=lambda _transport, _num_bytes: None,
            on_pull=lambda _peer, _transport, _num_bytes, _seconds: None,
        )
        self._num_pulls = 0

    async def pull(self) -> float:
        """Pull the next handoff and return its seconds."""
        store = self._store
        plan = PullPlan(
            peer=_SERVED,
            epoch=_EPOCH,
            wanted=WantedHandoff(
                handoff_id=HandoffId(str(self._num_pulls)),
                num_tokens=store.num_blocks * store.shape.block_size,
                num_blocks=store.num_blocks,
                last_block_hash=None,
                num_samples=0,
                first_sample_index=0,
            ),
            block_table=tuple(map(BlockId, range(store.num_blocks))),
            first_block=0,
            ticket="",
        )
        self._num_pulls += 1
        started_s = time.perf_counter()
        await self._puller.pull(plan, self._channel)
        return time.perf_counter() - started_s


def fill(store: TorchKvStore) -> memoryview:
    """Fill all blocks with noise and return it."""
    num_bytes = store.num_blocks * store.shape.block_bytes
    noise = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data: memoryview = noise.numpy().data
    store.write_blocks([BlockId(block) for block in range(store.num_blocks)], data)
    return data


def shape_of(*, is_small: bool) -> KvShape:
    """Return the shape of Qwen3-8B, or one of a few bytes."""
    return (
        KvShape(
            num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16", row_bytes=16, fingerprint="small"
        )
        if is_small
        else _QWEN3_8B
    )


async def _serve(args: argparse.Namespace) -> None:
    """The second process: serve until the pipe is closed."""
    store = make_store(shape_of(is_small=args.small), args.blocks, args.device, is_mappable=args.serve == "mapped")
    fill(store)
    with unix_address(args.socket) as address:
        async with serving(store, ARMS[args.serve], address, num_handoffs=args.rounds + 1):
            print("serves", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def source(arm: str, socket: Path, args: argparse.Namespace) -> Iterator["subprocess.Popen[str]"]:
    """Yield the process that serves an arm on a socket, once it does."""
    command = [sys.executable, "-m", "benchmarks.transports", "--serve", arm, "--socket", str(socket)]
    command += ["--blocks", str(args.blocks), "--rounds", str(args.rounds), "--device", str(args.device)]
    command += ["--small"] if args.small else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "serves\n":
            raise RuntimeError(f"the process that serves {arm} has ended; see its log above")
        yield process
    finally:
        with process:
            process.stdin.close()


@asynccontextmanager
async def pulls_of(arm: str, socket: Path, store: TorchKvStore) -> AsyncIterator[Pulls]:
    """Yield what pulls from the process on a socket."""
    with unix_address(socket) as address:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            yield Pulls(store, ARMS[arm], channel)


async def _measure(args: argparse.Namespace) -> Figures:
    figures, shape = Figures(), shape_of(is_small=args.small)
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kvrelay-")))
        arms: dict[str, Pulls] = {}
        for arm in ARMS:
            if arm == "mapped" and args.device.type != "cpu":
                continue
            held.enter_context(source(arm, folder / arm, args))
            store = make_store(shape, args.blocks, args.device, is_mappable=arm == "mapped")
            arms[arm] = await held.enter_async_context(pulls_of(arm, folder / arm, store))
            await arms[arm].pull()
            sent = fill(make_store(shape, args.blocks, torch.device("cpu")))
            if store.read_blocks([BlockId(block) for block in range(args.blocks)]) != sent:
                raise AssertionError(f"other bytes arrived by {arm}")
        for number in range(args.rounds):
            for arm in in_turn(list(arms), number):
                elapsed_s = await arms[arm].pull()
                num_bytes = args.blocks * shape.block_bytes
                figures.add("transports", f"{num_bytes / 1e6:.0f} MB", arm, **{"GB/s": num_bytes / elapsed_s / 1e9})
    return figures


def main(argv: list[str] | None = None) -> None:
    """Measure, print and write the figures."""
    parser = command_line("transports", __doc__, rounds=7)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="where the pages are")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of a pull (default 64)")
    parser.add_argument("--small", action="store_true", help="small blocks: a trial of the code")
    parser.add_argument("--serve", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        asyncio.run(_serve(args))
        return
    figures = asyncio.run(_measure(args))
    figures.show(terminal(), base="grpc")
    write_figures(args.json, figures, method="benchmarks/transports.py", blocks=args.blocks, device=str(args.device))


if __name__ == "__main__":
    main()
