"""A client that handles its direct streams itself, and the request that it sends."""

from typing import Any

import grpc
import pytest

from common.errors import KvrelayError, from_rpc_error
from common.rpc import client_channel
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.e2e.in_process import System

PROMPT = list(range(40))
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 150, "ignore_eos": True}
LOCAL: dict[str, Any] = {"local_prefill_max_tokens": 64}
ENGINE: dict[str, Any] = {"num_blocks": 512}


class Manual:
    """A client that handles its streams itself."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._channels = [client_channel(system.address)]
        self._router: Any = inference_pb2_grpc.InferenceServiceStub(self._channels[0])
        self.call: Any = None

    async def open(self, **sampling: Any) -> inference_pb2.DirectGrant:
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT), direct=True)
        for name, value in {**SAMPLING, **sampling}.items():
            setattr(request.sampling, name, value)
        self.call = self._router.Generate(request, timeout=60)
        while not (message := await self.call.read()).HasField("direct"):
            pass
        grant: inference_pb2.DirectGrant = message.direct
        return grant

    def stream(self, grant: inference_pb2.DirectGrant, *num_received: int) -> Any:
        self._channels.append(client_channel(grant.address))
        stub: Any = decode_pb2_grpc.DirectServiceStub(self._channels[-1])
        return stub.StreamTokens(decode_pb2.StreamTokensRequest(capability=grant.capability, num_received=num_received))

    async def aclose(self) -> None:
        for channel in self._channels:
            await channel.close()


async def read_tokens(stream: Any, at_least: int) -> list[tuple[int, int]]:
    """Read until so many tokens have come, or to the end; (index, id)."""
    seen: list[tuple[int, int]] = []
    while len(seen) < at_least and (message := await stream.read()) is not grpc.aio.EOF:
        seen += [(token.token_index, token.token_id) for token in message.tokens.tokens]
    return seen


async def error_of(stream: Any) -> KvrelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await stream.read() is not grpc.aio.EOF:
            pass
    return from_rpc_error(caught.value)
