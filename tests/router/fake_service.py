"""The gRPC side of a scripted worker, and the fake model whose tokens it sends."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import numpy.typing as npt
import xxhash

from common.block_hash import BlockHashes, hash_probe, hash_root
from common.kv_events import KvEvents, encode_events
from common.rpc import error_boundary
from common.structured import TaskTracker
from common.token_batches import runs_of
from common.tokens import tokens_from_bytes
from common.wire import pack_floats
from decode_worker.shared_stream import Outlet, SharedStream
from kvrelay.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
    sequence_pb2,
    worker_pb2,
    worker_pb2_grpc,
)

if TYPE_CHECKING:
    from tests.router.fake_worker import FakeWorker

VOCAB_SIZE = 256
HIDDEN_SIZE = 6

Context = grpc.aio.ServicerContext[Any, Any]


def next_token(tokens: Sequence[int], sample_index: int) -> int:
    """Return the next token of the fake model: a hash of everything before it."""
    return xxhash.xxh3_64_intdigest(bytes(tokens), seed=sample_index) % VOCAB_SIZE


def hidden_of(prompt: Sequence[int], pooling: int) -> npt.NDArray[np.float32]:
    """Return the pooled hidden states of the fake model."""
    seed = xxhash.xxh3_64_intdigest(bytes(prompt), seed=pooling)
    return np.random.default_rng(seed).standard_normal(HIDDEN_SIZE, np.float32)


def add_worker_service(worker: "FakeWorker", server: grpc.aio.Server) -> list[str]:
    """Serve a scripted worker on a server."""
    service = _WorkerService(worker)  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(service, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(service, server)
    return []


class _WorkerService(
    worker_pb2_grpc.WorkerServiceServicer,
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
):
    def __init__(self, worker: "FakeWorker") -> None:
        self._worker = worker

    async def DescribeWorker(
        self, request: worker_pb2.DescribeWorkerRequest, context: Context
    ) -> worker_pb2.DescribeWorkerResponse:
        worker, shape = self._worker, self._worker.shape
        await worker.gates.reach("describe")
        root = hash_root(model_fingerprint=shape.fingerprint)
        return worker_pb2.DescribeWorkerResponse(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            role=worker.role,
            layout=worker_pb2.KvLayout(block_size=shape.block_size, fingerprint=shape.fingerprint),
            num_blocks=shape.num_blocks,
            max_model_len=shape.max_model_len,
            vocab_size=shape.vocab_size,
            model_name=shape.model_name,
            hash_probe=shape.probe or hash_probe(root, shape.block_size),
            tokenizer_probe=shape.text.tokenizer,
            template_probe=shape.text.template,
            kv_port=worker.port,
            direct_port=worker.port,
            hidden_size=shape.hidden_size,
            exact_resume=shape.exact_resume,
        )

    async def WatchWorker(self, request: worker_pb2.WatchWorkerRequest, context: Context) -> None:  # type: ignore[override]
        worker = self._worker
        worker.num_watches += 1
        updates: asyncio.Queue[tuple[int, KvEvents]] = asyncio.Queue()
        updates.put_nowait((0, KvEvents(stored=BlockHashes.of(worker.blocks), is_snapshot=True)))
        worker.watchers.append(updates)
        seq = 0
        try:
            while True:
                lost, events = 0, KvEvents()
                with suppress(TimeoutError):
                    async with asyncio.timeout(request.heartbeat_s or None):
                        lost, events = await updates.get()
                seq += lost
                update = worker_pb2.WatchWorkerResponse(
                    epoch=worker.epoch,
                    seq=seq,
                    kv_events=encode_events(events) if events else b"",
                    load=worker.report,
                    timing=worker.timing,
                    overdue=worker.is_overdue,
                )
                await worker.gates.reach("update")
                await context.write(update)
                seq += 1
        finally:
            worker.watchers.remove(updates)

    async def GetWorkerStatus(
        self, request: worker_pb2.GetWorkerStatusRequest, context: Context
    ) -> worker_pb2.GetWorkerStatusResponse:
        await self._worker.gates.reach("status")
        status = worker_pb2.WorkerStatus(load=self._worker.report, epoch=self._worker.epoch)
        return worker_pb2.GetWorkerStatusResponse(status=status)

    async def ForgetBlocks(
        self, request: worker_pb2.ForgetBlocksRequest, context: Context
    ) -> worker_pb2.ForgetBlocksResponse:
        async with error_boundary(context, "ForgetBlocks"):
            await self._worker.reach("forget")
            self._worker.forgotten.append(request.hash_root)
        return worker_pb2.ForgetBlocksResponse(num_tier_blocks=7, num_page_blocks=3)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:  # type: ignore[override]
        worker = self._worker
        async with error_boundary(context, "Prefill"):
            with worker.accepting(request):
                await worker.reach("prefill")
                started = prefill_pb2.PrefillStarted(
                    num_cached_tokens=worker.num_cached_tokens,
                    num_pulled_tokens=worker.num_pulled_tokens,
                    compile_s=worker.compile_s,
                )
                await context.write(prefill_pb2.PrefillResponse(started=started))
                await worker.reach("first_token")
                if request.sequence.pooling:
                    await worker.swallow(request.sequence)
                    prompt = tokens_from_bytes(request.sequence.prompt_tokens).tolist()
                    vector = worker.embedding or pack_floats(hidden_of(prompt, request.sequence.pooling))
                    finished = prefill_pb2.PrefillFinished(embedding=vector, prefill_s=0.25)
                else:
                    finished = prefill_pb2.PrefillFinished(
                        first_tokens=next(_steps(request.sequence)),
                        prompt_logprobs=_prompt_logprobs(request.sequence),
                        prefill_s=0.25,
                    )
                await context.write(prefill_pb2.PrefillResponse(finished=finished))
                await worker.reach("prefill_end")

    async def DecodeMany(  # type: ignore[override]
        self, request_iterator: AsyncIterator[decode_pb2.DecodeManyRequest], context: Context
    ) -> None:
        self._worker.num_streams += 1
        async with error_boundary(context, "DecodeMany"):
            await SharedStream(self._decode, TaskTracker()).run(request_iterator, context.write)

    async def _decode(self, request: decode_pb2.DecodeRequest, outlet: Outlet) -> None:
        worker = self._worker
        with worker.accepting(request):
            await worker.reach("reserve")
            reserved = decode_pb2.Reserved(num_cached_tokens=worker.num_cached_tokens, compile_s=worker.compile_s)
            outlet.put(decode_pb2.DecodeResponse(reserved=reserved))
            steps = _steps(request.sequence)
            if request.HasField("handoff"):
                await worker.reach("fetch")
                next(steps)  # the first tokens came with the manifest
                stats = worker_pb2.TransferStats(num_blocks=2, kv_bytes=100, transfer_s=0.5, exposed_s=0.125)
                outlet.put(decode_pb2.DecodeResponse(transferred=stats))
            else:
                await worker.reach("local_prefill")
                await worker.swallow(request.sequence)
                local = decode_pb2.LocalPrefillStarted(
                    num_cached_tokens=worker.num_cached_tokens, num_pulled_tokens=worker.num_pulled_tokens
                )
                outlet.put(decode_pb2.DecodeResponse(prefill_started=local))
            await self._stream(steps, request.sequence, outlet)

    async def _stream(
        self, steps: Iterator[list[sampling_pb2.SampleToken]], sequence: sequence_pb2.SequenceSpec, outlet: Outlet
    ) -> None:
        worker = self._worker
        prompt_logprobs = _prompt_logprobs(sequence)
        if worker.beams is not None:
            outlet.put(decode_pb2.DecodeResponse(beams=worker.beams))
        for tokens in itertools.islice(steps, worker.num_skipped_steps, None):
            await worker.reach(f"token {tokens[0].token_index}")
            batch = decode_pb2.TokenBatch(prompt_logprobs=prompt_logprobs, prefill_s=0.25)
            if sequence.sampling.detokenize:
                batch.tokens.extend(tokens)
            else:
                batch.runs.extend(runs_of(tokens))
            outlet.put(decode_pb2.DecodeResponse(tokens=batch))


def _prompt_logprobs(sequence: sequence_pb2.SequenceSpec) -> list[sampling_pb2.PositionLogprobs]:
    if not sequence.sampling.HasField("prompt_logprobs"):
        return []
    chosen = [sampling_pb2.TokenLogprob(token_id=token) for token in tokens_from_bytes(sequence.prompt_tokens)]
    return [sampling_pb2.PositionLogprobs(chosen=token) for token in chosen]


def _steps(sequence: sequence_pb2.SequenceSpec) -> Iterator[list[sampling_pb2.SampleToken]]:
    """Yield the tokens of each step: one for every sample that has not ended."""
    first = sequence.first_sample_index
    samples = [_tokens(sequence, sample_index) for sample_index in range(first, first + sequence.sampling.n)]
    for step in itertools.zip_longest(*samples):
        yield [token for token in step if token is not None]


def _tokens(sequence: sequence_pb2.SequenceSpec, sample_index: int) -> Iterator[sampling_pb2.SampleToken]:
    """Yield the tokens of one sample, to `max_tokens` or the first of `stop_token_ids`."""
    sampling, reason = sequence.sampling, sampling_pb2.FINISH_REASON_UNSPECIFIED
    tokens = tokens_from_bytes(sequence.prompt_tokens + sequence.output_tokens).tolist()
    for token_index in range(len(sequence.output_tokens) // 4, sampling.max_tokens):
        tokens.append(next_token(tokens, sample_index))
        if tokens[-1] in sampling.stop_token_ids:
            reason = sampling_pb2.FINISH_REASON_STOP
        elif token_index + 1 == sampling.max_tokens:
            reason = sampling_pb2.FINISH_REASON_LENGTH
        yield sampling_pb2.SampleToken(
            sample_index=sample_index, token_index=token_index, token_id=tokens[-1], finish_reason=reason
        )
        if reason:
            return
