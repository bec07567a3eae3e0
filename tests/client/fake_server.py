"""A scripted InferenceService on a free port, in threads of the test's own process."""

import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from common.errors import KvrelayError, to_status
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc, worker_pb2
from tests.client.messages import (
    accepted,
    completed,
    remote_decision,
    remote_plan,
    running_decision,
    tokens,
    worker_view,
)

LIMIT_S = 60.0


@dataclass(frozen=True)
class Hold:
    """A step of a script: say nothing until the client goes away."""


@dataclass(frozen=True)
class Drop:
    """A step of a script: drop the call without a status of the router's own."""


Step = pb.GenerateResponse | KvrelayError | Hold | Drop


def hello_world() -> list[Step]:
    return [accepted(), remote_plan(), tokens(["Hello"]), tokens([" world"], first_index=1, last="stop"), completed()]


class FakeInference(inference_pb2_grpc.InferenceServiceServicer):
    """Plays `script` to every Generate call and remembers what it was asked."""

    def __init__(self) -> None:
        self.script: list[Step] = hello_world()
        self.first_script: list[Step] = []
        """Played once, to the next call, unless it is empty."""
        self.unary_error: KvrelayError | None = None
        self.generate_requests: list[pb.GenerateRequest] = []
        self.explain_requests: list[pb.ExplainRequest] = []
        self.forget_requests: list[pb.ForgetTenantRequest] = []
        self.forgotten = pb.ForgetTenantResponse()
        self.decisions = [remote_decision(), running_decision()]
        self.traffic: list[pb.RecordTrafficResponse] = []
        """Messages after the beginning of a recording, which then ends unless `goes_on_recording`."""
        self.goes_on_recording = False
        self.record_requests: list[pb.RecordTrafficRequest] = []
        self.embed_requests: list[pb.EmbedRequest] = []
        self.tokenize_requests: list[pb.TokenizeRequest] = []
        self.time_remaining_s: float | None = None
        self.authorization: str | None = None
        self.asked = threading.Event()
        """Set when a Generate call has come."""
        self.client_left = threading.Event()
        """Set when a call ended before its script did."""

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.generate_requests.append(request)
        self.time_remaining_s = context.time_remaining()
        self.authorization = dict(context.invocation_metadata()).get("authorization")
        call_is_over = threading.Event()
        played: list[Step] = []

        def on_end() -> None:
            call_is_over.set()
            if len(played) < len(script):
                self.client_left.set()

        script = list(self.first_script or self.script)
        self.first_script = []
        if not context.add_callback(on_end):  # the client has left already
            on_end()
        self.asked.set()
        for step in script:
            match step:
                case Hold():
                    assert call_is_over.wait(LIMIT_S), "the client never left"
                    return
                case Drop():
                    context.cancel()
                    return
                case KvrelayError():
                    played.append(step)
                    _abort(context, step)
                case pb.GenerateResponse():
                    played.append(step)
                    yield step

    def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        self.embed_requests.append(request)
        self._maybe_abort(context)
        plan = pb.PlanChosen(kind=pb.PLAN_KIND_PREFILL, prefill_worker_id="prefill-0", attempt=1)
        completed = pb.Completed(usage=pb.Usage(num_prompt_tokens=3), num_attempts=1)
        completed.timings.ttft_s = completed.timings.e2e_s = 0.5
        return pb.EmbedResponse(
            request_id="req-e",
            embedding=struct.pack("<2f", 0.5, -1.0),
            model="tiny",
            fingerprint="f00d",
            completed=completed,
            plans=[plan],
        )

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.tokenize_requests.append(request)
        self._maybe_abort(context)
        words = request.text.split() if request.WhichOneof("input") == "text" else ["a", "b"]
        return pb.TokenizeResponse(token_ids=range(1, len(words) + 1), pieces=words)

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        self._maybe_abort(context)
        model = pb.ModelInfo(name="tiny", max_model_len=2048, vocab_size=512, fingerprint="f00d")
        return pb.ListModelsResponse(models=[model])

    def GetClusterStatus(self, request: pb.GetClusterStatusRequest, context: Any) -> pb.GetClusterStatusResponse:
        self._maybe_abort(context)
        return pb.GetClusterStatusResponse(
            router=pb.RouterStatus(
                policy="predictive",
                num_queued=4,
                num_active=2,
                num_completed=11,
                num_failed=1,
                alarms=["no_updates: p0 is silent"],
                refusals=[pb.TenantRefusals(tenant="batch", cause="slo", num_refused=7)],
                tenants=[
                    pb.TenantUsage(tenant="batch", num_queued=4, router_s=1.25, num_set_back=3, num_pinned_tokens=512)
                ],
                http_port=8000,
            ),
            workers=[
                worker_view("prefill-0", worker_pb2.WORKER_ROLE_PREFILL),
                worker_view("decode-0", worker_pb2.WORKER_ROLE_DECODE, state="lost"),
            ],
        )

    def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        self.explain_requests.append(request)
        self._maybe_abort(context)
        return pb.ExplainResponse(decisions=self.decisions)

    def Diagnose(self, request: pb.DiagnoseRequest, context: Any) -> pb.DiagnoseResponse:
        self._maybe_abort(context)
        if request.request_id:
            part = pb.Finding(text="prefill: 2 s, usually 0.1 s")
            return pb.DiagnoseResponse(headline=f"{request.request_id}: 3 s in all", findings=[part])
        wait = pb.Finding(
            cause="prefill", pool="prefill", lost_s=1.5, text="prompts wait 1.5 s", changes=["a prefill worker more: …"]
        )
        gap = pb.Finding(cause="decode", pool="decode", lost_s=0.5, text="a gap is 20 ms")
        walls = [
            pb.PoolWalls(pool=pool, window_s=60.0, covered_s=60.0, busy=0.5, memory=0.4, waiting=0.45, binds="waiting")
            for pool in ("prefill", "decode")
        ]
        tenants = [
            pb.TenantWaits(tenant="batch", num_waiting=4, longest_wait_s=8.0, mostly_for="the pace of answers"),
            pb.TenantWaits(tenant="chat", num_answered=2, mean_wait_s=1.5, mostly_for="the pace of answers"),
        ]
        return pb.DiagnoseResponse(
            headline=f"requests of {request.window_s:g} s",
            findings=[wait, gap],
            walls=walls,
            waiting="4 requests wait in line",
            tenants=tenants,
        )

    def ForgetTenant(self, request: pb.ForgetTenantRequest, context: Any) -> pb.ForgetTenantResponse:
        self._maybe_abort(context)
        self.forget_requests.append(request)
        return self.forgotten

    def RecordTraffic(self, request: pb.RecordTrafficRequest, context: Any) -> Iterator[pb.RecordTrafficResponse]:
        self.record_requests.append(request)
        self._maybe_abort(context)
        call_is_over = threading.Event()
        context.add_callback(call_is_over.set)
        yield pb.RecordTrafficResponse()
        yield from self.traffic
        if self.goes_on_recording:
            call_is_over.wait(LIMIT_S)

    def _maybe_abort(self, context: Any) -> None:
        if self.unary_error is not None:
            _abort(context, self.unary_error)


def _abort(context: Any, error: KvrelayError) -> NoReturn:
    code, message, trailing = to_status(error)
    context.set_trailing_metadata(trailing)
    context.abort(code, message)
    raise AssertionError("abort raises")


@contextmanager
def serving(fake: FakeInference) -> Iterator[str]:
    """Serve `fake`; yields its address."""
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=[("grpc.max_receive_message_length", 1 << 20)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait(LIMIT_S)
