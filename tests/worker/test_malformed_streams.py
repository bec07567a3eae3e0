"""Messages of a stream that are no valid protobuf: refused as the caller's fault, and nothing is left behind."""

from typing import Any

import pytest

from common.errors import InvalidRequest
from tests.trust import as_router, as_worker
from tests.worker.cluster import error_of, running_pair

TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    "method", ["/kvrelay.v1.DecodeService/DecodeMany", "/kvrelay.v1.KvTransferService/FetchBlocks"]
)
@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x04\x0a\x02\xff\xfe"], ids=["garbage", "invalid UTF-8"])
async def test_malformed_message_on_a_stream_is_the_callers_fault(method: str, raw: bytes) -> None:
    async with running_pair() as pair:
        is_pull = method.endswith("FetchBlocks")
        decode = pair.decode
        channel: Any = as_worker(decode.kv_address, "prefill-0") if is_pull else as_router(decode.address)
        async with channel:
            call = channel.stream_stream(method)(timeout=TIMEOUT_S)
            await call.write(raw)
            error = await error_of(call)
        assert isinstance(error, InvalidRequest), error
        assert error.field == "message"
