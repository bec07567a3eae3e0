"""A source of KV that does not behave, as the pulling worker meets it."""

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
import numpy as np
import xxhash
from google.protobuf.message import DecodeError, Message

from common.block_hash import hash_blocks
from common.ids import BlockId
from common.tokens import tokens_from_bytes
from common.wire import message_of
from engine.fake_model import token_kv
from kvrelay.v1 import decode_pb2, kv_transfer_pb2_grpc, prefix_pb2, sequence_pb2, worker_pb2
from kvrelay.v1 import kv_transfer_pb2 as pb
from measure.simulate.network import SimServer
from tests.fuzz.callers import with_proof
from tests.fuzz.messages import Hints, Source, draw
from tests.fuzz.play import Step, play
from tests.fuzz.services import BLOCK_SIZE
from tests.fuzz.target import Target, timing
from tests.fuzz.targets.worker import ROOT, decode_step, sequence
from tests.fuzz.world import World

_ADDRESS = "hostile:1"
_PROMPT = list(range(3, 22))
_GAPS_S = (0.0, 0.0, 0.01, 1.0, 20.0)
_SPEC = sequence(_PROMPT, max_tokens=6)
_HASHES = hash_blocks(_PROMPT, root=ROOT, block_size=BLOCK_SIZE).packed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    messages: Sequence[Any]
    described: pb.DescribePagesResponse
    gap_s: float
    status: grpc.StatusCode
    stays: bool
    """Whether the source keeps the stream open after its last message."""
    steps: Sequence[Step]


class PullTarget(Target):
    """Decode calls and pulls of prefixes whose source says anything at all."""

    name = "pull-client"

    def prepare(self, world: World, data: bytes) -> _Plan:
        """Return what the source will say, and who pulls from it."""
        source = Source(data)
        right = _right_messages(world, source.choose((worker_pb2.KV_TRANSPORT_GRPC, worker_pb2.KV_TRANSPORT_SHM)))
        hints = _hints(world)
        messages: list[Any] = []
        for position in range(len(right) + source.below(3)):
            template = right[min(position, len(right) - 1)]
            if source.byte() % 4 == 3:
                template = source.choose(right)
            try:
                messages.append(pb.FetchBlocksResponse.FromString(draw(source, [template], hints)))
            except DecodeError:
                continue
        gap_s = source.choose(_GAPS_S)
        status = source.choose((grpc.StatusCode.OK, grpc.StatusCode.ABORTED, grpc.StatusCode.UNAVAILABLE))
        stays = source.below(4) == 3
        makers = (_handoff, _source, _prefixes, _probe)
        steps = [source.choose(makers)(world, source) for _ in range(1 + source.below(2))]
        return _Plan(
            messages=messages,
            described=_described(world, source, hints),
            gap_s=gap_s,
            status=status,
            stays=stays,
            steps=[with_proof(step, source) for step in steps],
        )

    async def play(self, world: World, plan: Any) -> list[str]:
        """Pull."""
        server = SimServer()
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(_Hostile(plan), cast("grpc.aio.Server", server))
        world.network.listen(_ADDRESS, server)
        try:
            return await play(world, plan.steps)
        finally:
            world.network.crash(_ADDRESS)


class _Hostile(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    def __init__(self, plan: _Plan) -> None:
        self._plan = plan

    async def DescribePages(self, request: Any, context: Any) -> pb.DescribePagesResponse:
        return self._plan.described

    async def FetchBlocks(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await anext(request_iterator, None)
        for message in self._plan.messages:
            await context.write(message)
            if self._plan.gap_s:
                await asyncio.sleep(self._plan.gap_s)
        if self._plan.stays:
            while await anext(request_iterator, None) is not None:
                pass
            await asyncio.sleep(60.0)
        if self._plan.status is not grpc.StatusCode.OK:
            await context.abort(self._plan.status, "so it says")


def _described(world: World, source: Source, hints: Hints) -> pb.DescribePagesResponse:
    """Return what the source says of its pages."""
    layout = message_of(worker_pb2.KvLayout, world.decode.runtime.executor.kv.shape)
    right = pb.DescribePagesResponse(worker_id="hostile", layout=layout)
    try:
        return pb.DescribePagesResponse.FromString(draw(source, [right], hints))
    except DecodeError:
        return pb.DescribePagesResponse()


def _right_messages(world: World, transport: "worker_pb2.KvTransport.ValueType") -> list[pb.FetchBlocksResponse]:
    """Return what a good source would send for `_PROMPT`: its pages by shared memory have the right content, too."""
    tokens = tokens_from_bytes(_SPEC.prompt_tokens)
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    opened = pb.FetchOpened(transport=transport)
    messages = [pb.FetchBlocksResponse(opened=opened)]
    if transport == worker_pb2.KV_TRANSPORT_SHM:
        kv = world.prefill.runtime.executor.kv
        region = kv.shared_region
        assert region is not None
        memory = pb.SharedMemory(
            pid=os.getpid(), fd=region.fd, size_bytes=region.size_bytes, nonce=region.nonce, num_blocks=kv.num_blocks
        )
        messages[0].opened.shared_memory.CopyFrom(memory)
        size = kv.shape.block_bytes
        data = kv.read_blocks([BlockId(i) for i in range(num_blocks)])
        checksums = [xxhash.xxh3_64_intdigest(data[i * size : (i + 1) * size]) for i in range(num_blocks)]
        sealed = pb.SealedBlocks(first_block=0, block_ids=range(num_blocks), checksums=checksums)
        messages.append(pb.FetchBlocksResponse(sealed=sealed))
    else:
        for index in range(num_blocks):
            positions = range(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE)
            values = [token_kv(tokens[p], p) if p < len(tokens) else 0 for p in positions]
            raw = np.array(values, dtype="<u8").tobytes()
            chunk = pb.BlockChunk(block_index=index, data=raw, checksum=xxhash.xxh3_64_intdigest(raw))
            messages.append(pb.FetchBlocksResponse(chunk=chunk))
    manifest = pb.Manifest(
        num_tokens=len(tokens),
        num_blocks=num_blocks,
        last_block_hash=_HASHES[-16:],
        first_tokens=[pb.ManifestToken(sample_index=0, token_id=101)],
    )
    return [*messages, pb.FetchBlocksResponse(manifest=manifest)]


def _hints(world: World) -> Hints:
    region = world.prefill.runtime.executor.kv.shared_region
    assert region is not None
    return {
        "transport": (1, 2, 3, 0),
        "pid": (os.getpid(), 0, 2**32 - 1),
        "fd": (region.fd, 2**32 - 1),
        "size_bytes": (region.size_bytes, 0, 16, 2**63),
        "nonce": (region.nonce, b"n" * 16),
        "num_blocks": (4, 5, 64, 63, 0, 2**32 - 1),
        "block_ids": (0, 1, 63, 64, 2**32 - 1),
        "block_index": (0, 1, 4, 5),
        "offset": (0, 8, 32),
        "sample_index": (0, 1),
        "token_id": (101, 256, 257),
        "last_block_hash": (_HASHES[-16:], _HASHES[:16], b""),
        "num_tokens": (16, 19, 20),
        "age_s": (0.0, 1.0),
    }


def _handoff(world: World, source: Source) -> Step:
    handoff = decode_pb2.Handoff(
        handoff_id="h9", prefill_worker_id="hostile", prefill_address=_ADDRESS, prefill_epoch=1
    )
    request = decode_pb2.DecodeRequest(sequence=_SPEC, epoch=world.decode.runtime.epoch, handoff=handoff)
    # The router bounds it: a worker cannot know how long the prefill may take.
    return dataclasses.replace(decode_step(world.decode, request.SerializeToString(), source), is_endless=True)


def _where() -> sequence_pb2.KvSource:
    return sequence_pb2.KvSource(worker_id="hostile", address=_ADDRESS, epoch=1, num_blocks=4)


def _source(world: World, source: Source) -> Step:
    request = decode_pb2.DecodeRequest(sequence=_SPEC, epoch=world.decode.runtime.epoch, source=_where())
    return decode_step(world.decode, request.SerializeToString(), source)


def _prefixes(world: World, source: Source) -> Step:
    chain = prefix_pb2.PrefixChain(block_hashes=_HASHES, values=[1.0] * 4)
    request = prefix_pb2.PullPrefixesRequest(source=_where(), chains=[chain], time_limit_s=5.0, max_bytes=1 << 20)
    return _step("PrefixService/PullPrefixes", world, request, source)


def _probe(world: World, source: Source) -> Step:
    request = worker_pb2.ProbePeerRequest(address=_ADDRESS, worker_id="hostile")
    return _step("WorkerService/ProbePeer", world, request, source)


def _step(method: str, world: World, request: Message, source: Source) -> Step:
    return Step(
        target=world.decode.endpoint.address,
        method=f"/kvrelay.v1.{method}",
        messages=(request.SerializeToString(),),
        **timing(source),
    )
