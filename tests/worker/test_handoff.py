"""The handoff between real services over real gRPC: same answers as one process, nothing left behind."""

import asyncio

import grpc
import pytest

from common.errors import EngineFault, HandoffGone, InvalidRequest, Overloaded, WorkerLost
from common.ids import mint_handoff_id
from common.wire import pack_tokens
from engine.core import EngineCore
from engine.fake_pages import FakeWindow
from engine.request import EngineRequest
from kvrelay.v1 import worker_pb2
from tests.builders import BLOCK_SIZE, make_request
from tests.worker.calls import Answer, error_of, messages, spec_of, until_prefilled
from tests.worker.cluster import executor_of, held_steps, running_pair, stop_lease_clock, until_empty

LENGTHS = sorted({1, *(BLOCK_SIZE * k + d for k in (1, 8, 16) for d in (-1, 0, 1)), 200})

WINDOW = {"window": FakeWindow(num_tokens=10, num_pages=80)}
STATE = {"window": FakeWindow(num_tokens=1, num_pages=80, is_state=True)}
CHUNKS = {"window": FakeWindow(num_tokens=10, num_pages=80, is_chunk=True)}


@pytest.mark.parametrize("window", [{}, WINDOW, STATE, CHUNKS], ids=["", "window", "state", "chunks"])
@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_handoff_at_every_boundary_equals_oracle_cold_and_cached(
    transport: str, window: dict[str, FakeWindow]
) -> None:
    async with running_pair(transports=[transport], prefill=window, decode=window) as pair:
        for length in LENGTHS:
            request = make_request(range(length), max_tokens=9, ignore_eos=True)
            cold = await pair.generate(request)
            warm = await pair.generate(request)
            assert warm.num_decode_cached == length // BLOCK_SIZE * BLOCK_SIZE
            assert cold.transfer is not None
            assert worker_pb2.KvTransport.Name(cold.transfer.transport) == f"KV_TRANSPORT_{transport.upper()}"
            assert warm.transfer is not None
            assert warm.transfer.num_blocks == (1 if length % BLOCK_SIZE else 0), "only the tail moves again"


async def test_handoff_when_hosts_differ_falls_back_from_shm_to_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.pull.host_id", lambda: "another host")
    async with running_pair(transports=["shm", "grpc"]) as pair:
        answer = await pair.generate(make_request(range(30), ignore_eos=True))
        assert answer.transfer is not None
        assert answer.transfer.transport == worker_pb2.KV_TRANSPORT_GRPC


async def test_n_samples_are_handed_over_once_and_equal_single_samples() -> None:
    async with running_pair() as pair:
        answer = await pair.generate(make_request(range(21), n=4, temperature=1.0, seed=5, max_tokens=12))
        assert sorted(answer.tokens) == [0, 1, 2, 3]
        assert answer.transfer is not None
        assert answer.transfer.num_blocks == 6


async def test_concurrent_handoffs_in_a_tiny_decode_pool_preempt_and_equal_oracle() -> None:
    async with running_pair(decode={"num_blocks": 40}) as pair:
        requests = [make_request([i % 3] * (5 + i), max_tokens=30, ignore_eos=True) for i in range(12)]

        async def serve(request: EngineRequest) -> Answer:
            while True:
                try:
                    return await pair.generate(request)
                except Overloaded:
                    await asyncio.sleep(0)

        await asyncio.gather(*(serve(request) for request in requests))


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_handoff_moves_window_pages_only_of_blocks_that_the_answer_reads(transport: str) -> None:
    async with running_pair(transports=[transport], prefill=WINDOW, decode=WINDOW) as pair:
        answer = await pair.generate(make_request([i % 251 for i in range(400)], max_tokens=20, ignore_eos=True))
        block_bytes = pair.decode.runtime.executor.kv.shape.block_bytes
        assert answer.transfer is not None
        assert answer.transfer.num_blocks == 100
        assert answer.transfer.kv_bytes == (100 + 3) * block_bytes, "and those of the last 10 tokens"


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_handoff_moves_the_state_behind_the_prompt_and_the_last_snapshot(transport: str) -> None:
    async with running_pair(transports=[transport], prefill=STATE, decode=STATE) as pair:
        answer = await pair.generate(make_request([i % 251 for i in range(402)], max_tokens=20, ignore_eos=True))
        shape = pair.decode.runtime.executor.kv.shape
        assert answer.transfer is not None
        assert answer.transfer.kv_bytes == 101 * shape.block_bytes + 2 * shape.window_page_bytes


async def test_samples_of_a_recurrent_model_are_handed_over_once_and_equal_single_samples() -> None:
    async with running_pair(prefill=STATE, decode=STATE) as pair:
        for length in (20, 21):
            answer = await pair.generate(make_request(range(length), n=4, temperature=1.0, seed=5, max_tokens=12))
            assert sorted(answer.tokens) == [0, 1, 2, 3]


async def test_beam_search_over_a_recurrent_model_is_refused_by_name() -> None:
    async with running_pair(prefill=STATE, decode=STATE) as pair:
        with pytest.raises(InvalidRequest, match="recurrent layers") as caught:
            await pair.generate(make_request(range(9), n=2, use_beam_search=True, max_tokens=4))
        assert caught.value.field == "use_beam_search"
        await until_empty(pair.decode)


async def test_takeover_in_the_middle_continues_with_the_same_tokens_and_text() -> None:
    async with running_pair() as pair:
        request = make_request(b"resume me", temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
        whole = await pair.generate(request)
        known = whole.tokens[0][:13]
        rest_request = make_request(b"resume me", output=known, temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
        tokens, text = [], ""
        handoff_id = mint_handoff_id()
        decode = pair.open_decode(rest_request, handoff_id)
        await decode.read()
        async for message in pair.open_prefill(rest_request, handoff_id):
            tokens.extend(message.finished.first_tokens)
        async for message in messages(decode):
            tokens.extend(message.tokens.tokens)
        text = "".join(token.text for token in tokens)
        assert [token.token_index for token in tokens] == list(range(13, 30))
        assert [token.token_id for token in tokens] == whole.tokens[0][13:]
        assert whole.text[0].endswith(text)


@pytest.mark.parametrize("closed", ["decode", "prefill"])
async def test_end_of_one_call_of_a_handoff_ends_the_other_one_at_once(closed: str) -> None:
    async with running_pair(prefill={"max_step_tokens": 16}) as pair:
        with held_steps(pair.prefill) as steps:
            request = make_request([i % 256 for i in range(480)], max_tokens=4)
            handoff_id = mint_handoff_id()
            decode = pair.open_decode(request, handoff_id)
            await decode.read()
            prefill = pair.open_prefill(request, handoff_id)
            steps.let_go(2)
            await prefill.read()
            ended, other = (decode, prefill) if closed == "decode" else (prefill, decode)
            ended.cancel()
            assert isinstance(await error_of(other), HandoffGone)


async def test_decode_call_whose_prefill_worker_moves_ends_with_worker_lost() -> None:
    async with running_pair(prefill={"step_s": 0.05, "max_step_tokens": 16}, decode={"num_blocks": 256}) as pair:
        decode = pair.open_decode(make_request([i % 256 for i in range(480)], max_tokens=4), mint_handoff_id())
        await decode.read()
        moved = pair.handoff(mint_handoff_id())
        moved.prefill_address = "127.0.0.1:1"  # the channel to the old address is closed
        late = pair.open_decode_of(spec_of(make_request(range(20))), handoff=moved)
        assert isinstance(await error_of(late), WorkerLost)
        async with asyncio.timeout(60):
            assert isinstance(await error_of(decode), WorkerLost)


async def test_handoff_without_a_puller_expires_and_is_counted() -> None:
    async with running_pair(prefill={"lease_ttl_s": 0.2}) as pair:
        clock = stop_lease_clock(pair.prefill)
        request = make_request(range(20))
        prefill = pair.open_prefill(request, mint_handoff_id())
        await until_prefilled(prefill)
        assert pair.prefill.runtime.handoffs.num_leases == 1
        clock.advance(0.3)
        await until_empty(pair.prefill)
        assert await prefill.read() is grpc.aio.EOF
        assert pair.prefill.runtime.handoffs.num_expired == 1


async def test_router_that_closes_a_prefill_frees_its_pages_though_no_puller_has_come() -> None:
    async with running_pair() as pair:
        prefill = pair.open_prefill(make_request(range(20)), mint_handoff_id())
        await until_prefilled(prefill)
        assert pair.prefill.runtime.handoffs.num_leases == 1
        prefill.cancel()
        await until_empty(pair.prefill)
        assert pair.prefill.runtime.handoffs.num_expired == 0


async def test_fetch_without_a_prefill_expires_and_frees_the_reservation() -> None:
    async with running_pair(prefill={"lease_ttl_s": 0.2}) as pair:
        decode = pair.open_decode(make_request(range(20)), mint_handoff_id())
        assert isinstance(await error_of(decode), HandoffGone)


async def test_spec_with_a_block_hash_for_a_root_or_unknown_tokens_is_refused_by_field() -> None:
    async with running_pair() as pair:
        request = make_request(range(20))
        block_as_root, unknown_token = spec_of(request), spec_of(request)
        block_as_root.hash_root = request.block_hashes[0]
        unknown_token.prompt_tokens = pack_tokens([1, 2, 3, 10**6, *range(16)])
        cases = {"sequence.hash_root": block_as_root, "sequence.prompt_tokens": unknown_token}
        for field, bad in cases.items():
            error = await error_of(pair.open_decode_of(bad))
            assert isinstance(error, InvalidRequest)
            assert error.field == field


async def test_stop_string_across_tokens_ends_the_sample_and_never_leaks() -> None:
    async with running_pair() as pair:
        free = await pair.generate(make_request(b"stop here", max_tokens=40, ignore_eos=True))
        stop = free.text[0][10:13]
        answer = await pair.generate(make_request(b"stop here", max_tokens=40, ignore_eos=True, stop=(stop,)))
        assert answer.text[0] == free.text[0][: free.text[0].index(stop)]


async def test_error_with_a_very_long_message_keeps_its_class() -> None:
    async with running_pair() as pair:
        broken = executor_of(pair.decode)

        def launch(_batch: object) -> list[object]:
            raise RuntimeError("x" * 100_000)

        broken.launch = launch  # type: ignore[method-assign,assignment]
        error = await error_of(pair.open_decode(make_request(range(20)), None))
        assert isinstance(error, EngineFault)
        assert error.message.startswith("engine step failed: RuntimeError: xxx")


async def test_worker_whose_engine_thread_dies_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: asyncio.Queue[int] = asyncio.Queue()
    monkeypatch.setattr("worker.runtime.os._exit", statuses.put_nowait)
    async with running_pair(ends_empty=False) as pair:

        def broken(_core: EngineCore) -> None:
            raise AssertionError("block 3: ref_cnt -1")

        monkeypatch.setattr(EngineCore, "begin_step", broken)
        call = pair.open_decode(make_request(range(20)), None)
        async with asyncio.timeout(60):
            assert await statuses.get() == 70
        call.cancel()


@pytest.mark.parametrize("num_prompt_tokens", [15, 16, 17])
async def test_beams_start_on_handed_over_pages_and_equal_the_oracle(num_prompt_tokens: int) -> None:
    request = make_request(range(num_prompt_tokens), n=4, use_beam_search=True, max_tokens=10)
    async with running_pair() as pair:
        for _ in range(2):  # the second time both have the prompt in their caches
            await pair.generate(request)
        await pair.generate_locally(request)


@pytest.mark.parametrize("is_handed_over", [True, False])
async def test_a_search_goes_on_from_the_state_that_its_worker_has_told(is_handed_over: bool) -> None:
    request = make_request(range(9), n=3, use_beam_search=True, ignore_eos=True, max_tokens=50)
    async with running_pair() as pair:
        told = [m.beams async for m in messages(pair.open_decode(request, None)) if m.HasField("beams")]
        assert [len(state.live[0].tokens) // 4 for state in told] == [32]
        spec = spec_of(request)
        spec.beams.CopyFrom(told[0])
        handoff_id, answer = mint_handoff_id(), Answer()
        handoff = pair.handoff(handoff_id) if is_handed_over else None
        call = pair.open_decode_of(spec, handoff=handoff)
        if is_handed_over:
            await call.read()
            async for _message in pair.open_prefill(request, handoff_id):
                pass
        async for message in messages(call):
            for token in message.tokens.tokens:
                answer.take(token)
        answer.checked(request)
        load = await pair.decode.runtime.engine.call(lambda core: core.load())
        assert load.num_preemptions == 0
