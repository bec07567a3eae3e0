"""Everything that can break a handoff between two vLLM servers: no wrong token, no page lost."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import count, cycle, repeat

import pytest

from common.errors import EngineFault
from common.ids import BlockId
from kv_transfer.transports.grpc_chunks import GrpcChunks
from kv_transfer.transports.shared_memory import SharedMemory
from kv_transfer.transports.transport import Transport
from kvrelay.v1 import kv_transfer_pb2 as pb
from tests.worker.vllm_server import LEASE_TTL_S, NUM_BLOCKS, Request, Server, serving

NUM_FAULTS = int(os.environ.get("KVRELAY_FAULTS", "50"))
"""Faults to inject."""
MAX_TOKENS = 40
NUM_OPEN = 8
_DEADLINE_S = 60.0

FAULTS = (
    "late",
    "unclaimed",
    "abort prefill",
    "abort decode",
    "preempt",
    "restart",
    "stranger",
    "earlier life",
    "wire",
)


class Wire:
    """Breaks messages with blocks, when it is told to."""

    def __init__(self, chance: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self._chance = chance
        self.num_armed = 0
        for transport in (SharedMemory, GrpcChunks):
            monkeypatch.setattr(transport, "seal", self._breaking(transport.seal))

    def _breaking(
        self, seal: Callable[..., list[pb.FetchBlocksResponse]]
    ) -> Callable[..., list[pb.FetchBlocksResponse]]:
        def broken(transport: Transport, first_block: int, block_ids: Seq[BlockId]) -> list[pb.FetchBlocksResponse]:
            messages = seal(transport, first_block, block_ids)
            if not self.num_armed:
                return messages
            self.num_armed -= 1
            message = self._chance.choice(messages)
            match self._chance.choice(["cut", "lose", "repeat", "move", "flip", "flip", "flip"]):
                case "cut":
                    raise EngineFault("injected")
                case "lose":
                    messages.remove(message)
                case "repeat":
                    messages.append(message)
                case "move" if transport.payload == "sealed":
                    message.sealed.first_block += 1
                case "move":
                    message.chunk.block_index += 1
                case _ if transport.payload == "sealed":
                    message.sealed.checksums[0] ^= 1
                case _:
                    message.chunk.data = bytes([message.chunk.data[0] ^ 1]) + message.chunk.data[1:]
            return messages

        return broken


class Trial:
    """Two servers, and handoffs between them, some of which are broken."""

    def __init__(self, chance: random.Random, wire: Wire, prefill: Server, decode: Server) -> None:
        self._chance = chance
        self._wire = wire
        self._prefill = prefill
        self._decode = decode
        self._ids = count()
        self._order = cycle(chance.sample([*FAULTS, None, None, None], len(FAULTS) + 3))
        self.faults: Counter[str] = Counter()

    def run(self, num_faults: int) -> None:
        """Inject so many faults into handoffs that overlap, and wait until all is over."""
        open_handoffs: list[Iterator[None]] = []
        while self.faults.total() < num_faults or open_handoffs:
            if self.faults.total() < num_faults and len(open_handoffs) < NUM_OPEN:
                open_handoffs.append(self._handoff(f"ho-{next(self._ids)}"))
            self._step()
            open_handoffs = [each for each in open_handoffs if next(each, "over") is None]
        self._until(lambda: not (self._prefill.requests or self._decode.requests))
        self._until(lambda: all(pages.num_free_slots == pages.num_blocks for pages in self._prefill.pages))

    def _step(self) -> None:
        self._prefill.step()
        self._decode.step()
        time.sleep(0.0005)  # a step takes time, in which transfers go on

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s
            self._step()

    def _handoff(self, handoff_id: str) -> Iterator[None]:
        """Hand one prompt over; goes on with every step."""
        chance, prefill, decode = self._chance, self._prefill, self._decode
        fault = next(self._order)
        self.faults.update([fault] if fault is not None else [])
        prompt = [chance.randrange(1 << 16) for _ in range(chance.randint(1, MAX_TOKENS))]
        other = [chance.randrange(1 << 16) for _ in prompt]
        offer = {"do_remote_decode": True, "handoff_id": handoff_id, "num_pullers": len(decode.ranks)}
        ranks = [
            {"address": each.address.address, "epoch": "1" if fault == "earlier life" else str(each.address.epoch)}
            for each in prefill.ranks
        ]
        pull = {"do_remote_prefill": True, "handoff_id": handoff_id, "ranks": ranks}
        source = Request(f"p-{handoff_id}", prompt, offer)
        target = Request(f"d-{handoff_id}", other if fault == "stranger" else prompt, pull)
        self._wire.num_armed += fault == "wire"
        is_early = fault not in ("late", "unclaimed") and chance.random() < 0.5
        if is_early:
            decode.add(target)
        yield from repeat(None, chance.randint(0, 3))
        prefill.add(source)
        if fault == "preempt":
            prefill.preempt.add(source.request_id)
        ends = {"abort prefill": (prefill, source), "abort decode": (decode, target)}
        abort_after = chance.randint(0, 6)
        while prefill.requests.get(source.request_id) is source and not source.is_finished:
            if abort_after == 0 and fault == "restart":
                prefill.restart()
            elif abort_after == 0 and fault in ends:
                server, request = ends[fault]
                server.abort(request)
            abort_after -= 1
            yield
        prefill.preempt.discard(source.request_id)
        if fault == "late":
            pulls_at_s = time.monotonic() + 2 * LEASE_TTL_S
            while time.monotonic() < pulls_at_s:
                yield
        if fault != "unclaimed" and not is_early:
            decode.add(target)
        if fault == "abort decode":
            yield from repeat(None, chance.randint(0, 10))
            decode.abort(target)
        while target.request_id in decode.requests:
            yield


@pytest.mark.parametrize(
    ("num_sources", "num_pullers", "transport"), [(1, 1, "shm"), (1, 1, "grpc"), (3, 1, "shm"), (1, 3, "grpc")]
)
def test_whatever_breaks_a_handoff_costs_a_computation_and_no_wrong_token(
    num_sources: int, num_pullers: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(f"{num_sources} {num_pullers} {transport}")
    wire = Wire(chance, monkeypatch)
    with serving(num_sources) as prefill, serving(num_pullers, transports=(transport,)) as decode:
        trial = Trial(chance, wire, prefill, decode)
        trial.run(NUM_FAULTS)
        assert prefill.counts["wrong"] + decode.counts["wrong"] == 0
        assert set(trial.faults) == set(FAULTS)
        assert decode.counts["pulled"] > 0
        assert decode.counts["recomputed"] > 0
        assert len(prefill.free) == len(decode.free) == NUM_BLOCKS
