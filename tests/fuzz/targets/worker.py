"""Requests of routers, supervisors and other workers to a worker."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from common.block_hash import hash_blocks, hash_root
from common.sampling import SamplingParams
from common.wire import pack_tokens, sampling_to_proto
from engine.device.shared_memory import host_id
from kvrelay.v1 import decode_pb2, kv_transfer_pb2, prefill_pb2, prefix_pb2, sequence_pb2, worker_pb2
from tests.fuzz.callers import RIGHT, WORDS
from tests.fuzz.messages import Hints, Source, draw
from tests.fuzz.play import Step
from tests.fuzz.services import BLOCK_SIZE, FuzzWorker
from tests.fuzz.target import CallTarget, timing
from tests.fuzz.world import World

_FINGERPRINT = f"fake-v1-{BLOCK_SIZE}"
ROOT = hash_root(model_fingerprint=_FINGERPRINT)
_CAPABILITY = b"c" * 32
_PROMPTS = (list(range(1, 20)), list(range(1, 60)), [7], list(range(1, 17)))
_ENDLESS = ("WatchWorker", "DecodeMany")


def sequence(prompt: Sequence[int], *, output: Sequence[int] = (), **sampling: Any) -> sequence_pb2.SequenceSpec:
    """Return a right sequence."""
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 6} | sampling))
    return sequence_pb2.SequenceSpec(
        request_id="r1",
        prompt_tokens=pack_tokens(prompt),
        output_tokens=pack_tokens(output),
        hash_root=ROOT,
        sampling=sampling_to_proto(params),
    )


def _sequences() -> list[sequence_pb2.SequenceSpec]:
    return [
        sequence(_PROMPTS[0]),
        sequence(_PROMPTS[1], n=3, temperature=1.0, seed=5, detokenize=False),
        sequence(_PROMPTS[1], stop=("e",), num_logprobs=2, num_prompt_logprobs=1, max_tokens=20),
        sequence(_PROMPTS[2], max_tokens=30, ignore_eos=True),
        sequence(_PROMPTS[3], output=[5, 6, 7], max_tokens=9),
    ]


def kv_source(worker_id: str, epoch: int) -> sequence_pb2.KvSource:
    """Return where there is KV to pull."""
    return sequence_pb2.KvSource(
        worker_id=worker_id, address=f"{worker_id}:1", epoch=epoch, num_blocks=20, ticket=RIGHT
    )


def hints_of(world: World) -> Hints:
    """Return values that mean something to the workers of a world."""
    epochs = [worker.runtime.epoch for worker in world.workers]
    hashes = [hash_blocks(prompt, root=ROOT, block_size=BLOCK_SIZE).packed for prompt in _PROMPTS if len(prompt) > 3]
    return {
        "epoch": (*epochs, 1),
        "prefill_epoch": (epochs[0], 1),
        "worker_id": ("prefill-0", "decode-0", "other"),
        "prefill_worker_id": ("prefill-0", "other"),
        "address": ("prefill-0:1", "decode-0:1", "nowhere:1", "dns:///x", "unix:/tmp/x", "h:"),
        "prefill_address": ("prefill-0:1", "decode-0:1", "nowhere:1"),
        "handoff_id": ("h1", "h2", ""),
        "capability": (_CAPABILITY, b"d" * 32),
        "hash_root": (ROOT, b"r" * 32, b"r" * 16),
        "ticket": WORDS,
        "block_hashes": tuple(hashes),
        "prompt_tokens": tuple(pack_tokens(prompt) for prompt in _PROMPTS),
        "output_tokens": (b"", pack_tokens([1]), pack_tokens([300])),
        "layout_fingerprint": (_FINGERPRINT,),
        "transports": (*worker_pb2.KvTransport.values(), 99),
        "host_id": (host_id(),),
        "num_blocks": (0, 1, 4, 14, 2**32 - 1),
        "call_id": (0, 1, 2, 2**32 - 1),
        "num_received": (0, 1, 3),
        "values": (1.0, 0.5, 0.0),
        "trunk": (0, 1, 2),
        "first_sample_index": (0, 1, 2**32 - 1),
        "max_tokens": (1, 6, 40, 10_000),
        "n": (1, 3, 64),
        "ttl_s": (0.1, 5.0, 3599.0),
        "like_s": (0.0, 30.0, 1e308, math.nan),
        "ages_s": (0.0, 60.0, math.inf),
        "time_limit_s": (0.01, 1.0, 600.0),
        "max_bytes": (1, 64, 10_000),
        "grace_s": (0.0, 0.5, 3600.0),
        "role": (1, 2),
    }


def _plain(maker: int) -> Callable[[int], bytes]:
    """Return what writes a call without a change: its maker's number, its template's, and zeros."""
    return lambda template: bytes([maker, template, 0, 0, 0, 0])


_PLAIN = [_plain(maker) for maker in range(6)]


class WorkerTarget(CallTarget):
    """Calls to the workers, one of them or both: half of a handoff finds the other half now and then."""

    name = "worker"
    max_steps = 4

    def step(self, world: World, source: Source) -> Step:
        """Return one call to one of the workers."""
        return source.choose(_MAKERS)(world, source)

    def seeds(self) -> Sequence[bytes]:
        """Return inputs to begin with: calls that need each other, and each by itself."""
        prefill, decode, tokens = _PLAIN[2], _PLAIN[0], _PLAIN[5]
        handoffs = [bytes([1, *prefill(2 * i), *decode(3 * i + 1)]) for i in range(5)]
        directs = [bytes([1, *decode(3 * i + 2), *tokens(0)]) for i in range(5)]
        fetch, cached, shared = ([3, 0, 1, opened, 0, 0, 3, 0, 0, 0, 0, 0, 0] for opened in (2, 0, 1))
        fetches = [bytes([1, *prefill(0), *fetch]), bytes([1, *fetch, *prefill(0)]), bytes([1, *cached, *shared])]
        return [*super().seeds(), *handoffs, *directs, *fetches]

    async def restore(self, world: World) -> None:
        """Give the workers their roles again."""
        for worker in world.workers:
            if worker.runtime.role != worker.endpoint.role:
                await worker.runtime.change_role(worker.endpoint.role, epoch=worker.runtime.epoch, grace_s=600)
        await world.restore()


def _unary(worker: FuzzWorker, method: str, templates: Sequence[Message], world: World, source: Source) -> Step:
    message = draw(source, templates, hints_of(world))
    full_name = f"/kvrelay.v1.{method}"
    step = Step(target=worker.endpoint.address, method=full_name, messages=(message,), **timing(source))
    return _bounded(step)


def _bounded(step: Step) -> Step:
    if step.method.endswith(_ENDLESS):
        return dataclasses.replace(step, is_endless=True, leaves_s=step.leaves_s or 2.0)
    return step


def _decode_requests(world: World) -> list[Message]:
    decode, prefill = world.decode.runtime, world.prefill.runtime
    handoff = decode_pb2.Handoff(
        handoff_id="h1",
        prefill_worker_id="prefill-0",
        prefill_address="prefill-0:1",
        prefill_epoch=prefill.epoch,
        ticket=RIGHT,
    )
    where = kv_source("prefill-0", prefill.epoch)
    access = decode_pb2.DirectAccess(capability=_CAPABILITY, ttl_s=2.0, checkpoint_tokens=2)
    made: list[Message] = []
    for each in _sequences():
        made.append(decode_pb2.DecodeRequest(sequence=each, epoch=decode.epoch))
        made.append(decode_pb2.DecodeRequest(sequence=each, epoch=decode.epoch, handoff=handoff))
        made.append(decode_pb2.DecodeRequest(sequence=each, epoch=decode.epoch, source=where, direct=access))
    return made


def decode_step(worker: FuzzWorker, request: bytes, source: Source) -> Step:
    """Return one decode call, which may be malformed, on a stream of its own."""
    length, prefix = len(request), bytearray([0x08, 1, 0x12])  # call_id = 1; open, whose length follows
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    return Step(
        target=worker.endpoint.address,
        method="/kvrelay.v1.DecodeService/DecodeMany",
        messages=(bytes([*prefix, length]) + request,),
        is_stream=True,
        half_closes=False,
        ends_with_call=True,
        **timing(source),
    )


def _decode(world: World, source: Source) -> Step:
    return decode_step(world.decode, draw(source, _decode_requests(world), hints_of(world)), source)


def _decode_many(world: World, source: Source) -> Step:
    templates: list[Message] = [
        decode_pb2.DecodeManyRequest(call_id=number % 3, open=request)  # type: ignore[arg-type]
        for number, request in enumerate(_decode_requests(world))
    ]
    templates += [decode_pb2.DecodeManyRequest(call_id=number, close=decode_pb2.CloseCall()) for number in range(3)]
    return _stream(world.decode, "DecodeService/DecodeMany", templates, world, source)


def _stream(worker: FuzzWorker, method: str, templates: Sequence[Message], world: World, source: Source) -> Step:
    hints = hints_of(world)
    messages = tuple(draw(source, templates, hints) for _ in range(1 + source.below(5)))
    step = Step(
        target=worker.endpoint.address,
        method=f"/kvrelay.v1.{method}",
        messages=messages,
        is_stream=True,
        gap_s=source.choose((0.0, 0.01, 1.0)),
        half_closes=source.below(2) == 0,
        **timing(source),
    )
    return _bounded(step)


def _prefill(world: World, source: Source) -> Step:
    epochs = [worker.runtime.epoch for worker in world.workers]
    where = kv_source("decode-0", epochs[1])
    templates: list[Message] = []
    for each in _sequences():
        templates.append(prefill_pb2.PrefillRequest(sequence=each, handoff_id="h1", epoch=epochs[0]))
        templates.append(prefill_pb2.PrefillRequest(sequence=each, handoff_id="h2", epoch=epochs[0], source=where))
    return _unary(world.prefill, "PrefillService/Prefill", templates, world, source)


def fetch_requests(worker: FuzzWorker) -> list[Message]:
    """Return right messages of a puller."""
    transports = [worker_pb2.KV_TRANSPORT_GRPC, worker_pb2.KV_TRANSPORT_SHM]
    prompt = hash_blocks(_PROMPTS[1], root=ROOT, block_size=BLOCK_SIZE).packed
    fields: dict[str, Any] = {"epoch": worker.runtime.epoch, "layout_fingerprint": _FINGERPRINT, "host_id": host_id()}
    fields["ticket"] = RIGHT
    opens = [
        kv_transfer_pb2.OpenFetch(block_hashes=prompt, transports=transports[:1], **fields),
        kv_transfer_pb2.OpenFetch(block_hashes=prompt, transports=transports[1:], **fields),
        kv_transfer_pb2.OpenFetch(handoff_id="h1", transports=transports, **fields),
    ]
    acknowledged = kv_transfer_pb2.FetchBlocksRequest(ack=kv_transfer_pb2.AckFetch())
    return [*(kv_transfer_pb2.FetchBlocksRequest(open=each) for each in opens), acknowledged]


def _fetch(world: World, source: Source) -> Step:
    worker = source.choose(world.workers)
    return _stream(worker, "KvTransferService/FetchBlocks", fetch_requests(worker), world, source)


def _pull_prefixes(world: World, source: Source) -> Step:
    prompt = hash_blocks(_PROMPTS[1], root=ROOT, block_size=BLOCK_SIZE)
    where = kv_source("prefill-0", world.prefill.runtime.epoch)
    whole = prefix_pb2.PrefixChain(block_hashes=prompt[:8].packed, values=[1.0] * 8, num_reused_blocks=2)
    branch = prefix_pb2.PrefixChain(block_hashes=prompt[8:10].packed, values=[0.5] * 2, trunk=1, num_shared_blocks=4)
    request = prefix_pb2.PullPrefixesRequest(source=where, chains=[whole, branch], time_limit_s=1.0, max_bytes=1 << 20)
    return _unary(world.decode, "PrefixService/PullPrefixes", [request], world, source)


def _read_ahead(world: World, source: Source) -> Step:
    prompt = hash_blocks(_PROMPTS[1], root=ROOT, block_size=BLOCK_SIZE)
    epoch = world.prefill.runtime.epoch
    request = prefix_pb2.ReadAheadRequest(hash_root=ROOT, block_hashes=prompt.packed, epoch=epoch, time_limit_s=1.0)
    return _unary(world.prefill, "PrefixService/ReadAhead", [request], world, source)


def _expect_returns(world: World, source: Source) -> Step:
    prompt = hash_blocks(_PROMPTS[1], root=ROOT, block_size=BLOCK_SIZE)
    hint = worker_pb2.ExpectedReturn(ends=[prompt[-1], prompt[3]], like_s=[1.0, 30.0], ages_s=[60.0])
    other = worker_pb2.ExpectedReturn(ends=[prompt[1]], like_s=[400.0])
    request = worker_pb2.ExpectReturnsRequest(returns=[hint, other])
    return _unary(source.choose(world.workers), "WorkerService/ExpectReturns", [request], world, source)


def _ask(method: str, template: Callable[[World], Message]) -> Callable[[World, Source], Step]:
    def make(world: World, source: Source) -> Step:
        return _unary(source.choose(world.workers), method, [template(world)], world, source)

    return make


def _stream_tokens(world: World, source: Source) -> Step:
    template = decode_pb2.StreamTokensRequest(capability=_CAPABILITY, num_received=[0])
    return _unary(world.decode, "DirectService/StreamTokens", [template], world, source)


def _set_role(world: World) -> Message:
    return worker_pb2.SetRoleRequest(role=other_role(world), epoch=world.decode.runtime.epoch, grace_s=1.0)


def other_role(world: World) -> "worker_pb2.WorkerRole.ValueType":
    """Return the role that the decode worker does not have."""
    is_decode = world.decode.runtime.role == worker_pb2.WORKER_ROLE_DECODE
    return worker_pb2.WORKER_ROLE_PREFILL if is_decode else worker_pb2.WORKER_ROLE_DECODE


_MAKERS: Sequence[Callable[[World, Source], Step]] = (
    _decode,
    _decode_many,
    _prefill,
    _fetch,
    _pull_prefixes,
    _stream_tokens,
    _ask("WorkerService/SetRole", _set_role),
    _ask(
        "WorkerService/ProbePeer", lambda _: worker_pb2.ProbePeerRequest(address="prefill-0:1", worker_id="prefill-0")
    ),
    _ask("WorkerService/WatchWorker", lambda _: worker_pb2.WatchWorkerRequest()),
    _ask("WorkerService/GetWorkerStatus", lambda _: worker_pb2.GetWorkerStatusRequest()),
    _ask("WorkerService/ForgetBlocks", lambda _: worker_pb2.ForgetBlocksRequest(hash_root=bytes(32))),
    _ask("PrefixService/ListHotPrefixes", lambda _: prefix_pb2.ListHotPrefixesRequest(max_blocks=10)),
    _ask("WorkerService/DescribeWorker", lambda _: worker_pb2.DescribeWorkerRequest()),
    _ask("KvTransferService/DescribePages", lambda _: kv_transfer_pb2.DescribePagesRequest()),
    _read_ahead,
    _expect_returns,
)
