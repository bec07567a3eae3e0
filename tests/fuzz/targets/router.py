"""Requests of clients to the router, and of its controller."""

import dataclasses
from collections.abc import Sequence

from google.protobuf.message import Message

from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import router_admin_pb2, sampling_pb2
from tests.fuzz.messages import Hints, Source, draw
from tests.fuzz.play import Step
from tests.fuzz.services import MAX_MODEL_LEN, NUM_BLOCKS, ROUTER
from tests.fuzz.target import CallTarget, timing
from tests.fuzz.world import World, set_workers_request

_GENERATE = "/kvrelay.v1.InferenceService/Generate"
_ENDLESS = ("RecordTraffic",)
_HINTS: Hints = {
    "model": ("fake", ""),
    "role": ("user", "system", "assistant"),
    "text": ("hello", "x" * 60, "x" * (MAX_MODEL_LEN - 9), "x" * MAX_MODEL_LEN, "x" * 64 * MAX_MODEL_LEN),
    "content": ("hello", "x" * 50),
    "ids": (1, 2, 255, 256, 257),
    "n": (1, 2, 5, 64, 65),
    "max_tokens": (1, 8, 40, MAX_MODEL_LEN, NUM_BLOCKS * 4),
    "min_tokens": (0, 1, 8, 40),
    "stop": ("e", "th", "\n", "x" * 256, "x" * 257),
    "stop_token_ids": (1, 101, 256, 257),
    "logprobs": (0, 1, 20, 21),
    "prompt_logprobs": (0, 1, 20, 21),
    "key": (0, 1, 101, 256, 257),
    "tokens": (b"", b"e\0\0\0", b"e\0\0\0" * 3, b"\1\1\0\0", b"e\0\0"),
    "fingerprint": ("", "fake-v1-4", "other"),
    "seed": (0, 1, 2**63),
    "worker_id": ("prefill-0", "decode-0", "decode-1", ""),
    "address": ("prefill-0:1", "decode-0:1", "nowhere:1", "", ":1", "a:b", "[::1]:5", "nowhere:99999", "a:١"),
    "window_s": (1.0, 60.0, 3600.0, 1e9),
    "duration_s": (0.0, 0.1, 1.0),
    "limit": (0, 1, 2**32 - 1),
}


def _generate() -> list[Message]:
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role="system", content="s"), pb.ChatMessage(role="user", content="u")]
    )
    few = sampling_pb2.SamplingParams(max_tokens=6, temperature=0)
    runs = sampling_pb2.SamplingParams(max_tokens=6, n=2, detokenize=False, ignore_eos=True)
    rich = sampling_pb2.SamplingParams(
        max_tokens=20, stop=["e"], logprobs=3, prompt_logprobs=1, logit_bias={101: 1.0}, seed=7, min_tokens=2
    )
    resumed = sampling_pb2.SamplingParams(max_tokens=12, seed=3, temperature=1.0)
    return [
        pb.GenerateRequest(text="hello", sampling=few),
        pb.GenerateRequest(text="x" * 80, sampling=runs),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=list(range(50))), sampling=rich, label="l", priority=1),
        pb.GenerateRequest(chat=chat, sampling=few, objective=pb.ServiceObjective(ttft_s=1.0, tpot_s=0.1)),
        pb.GenerateRequest(text="hello", sampling=runs, direct=True),
        pb.GenerateRequest(
            text="x" * 30,
            sampling=resumed,
            resume=pb.Resume(samples=[pb.ResumedSample(tokens=b"e\0\0\0t\0\0\0")], fingerprint="fake-v1-4"),
        ),
    ]


_CALLS: Sequence[tuple[str, Sequence[Message]]] = [
    (_GENERATE, _generate()),
    (_GENERATE, _generate()),
    (
        "/kvrelay.v1.InferenceService/Tokenize",
        [
            pb.TokenizeRequest(text="hello"),
            pb.TokenizeRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="u")])),
        ],
    ),
    (
        "/kvrelay.v1.InferenceService/Embed",
        [
            pb.EmbedRequest(text="hello", dimensions=4, label="l", objective=pb.ServiceObjective(ttft_s=30)),
            pb.EmbedRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), pooling=sampling_pb2.POOLING_MEAN, normalize=False),
        ],
    ),
    ("/kvrelay.v1.InferenceService/Explain", [pb.ExplainRequest(limit=5), pb.ExplainRequest(request_id="req-1")]),
    ("/kvrelay.v1.InferenceService/RecordTraffic", [pb.RecordTrafficRequest(duration_s=0.5)]),
    ("/kvrelay.v1.InferenceService/GetClusterStatus", [pb.GetClusterStatusRequest()]),
    ("/kvrelay.v1.InferenceService/ForgetTenant", [pb.ForgetTenantRequest(tenant="default", cache_salt="s")]),
    ("/kvrelay.v1.InferenceService/ListModels", [pb.ListModelsRequest()]),
]


def _client_step(source: Source) -> Step:
    method, templates = source.choose(_CALLS)
    message = draw(source, templates, _HINTS)
    step = Step(target=ROUTER, method=method, messages=(message,), **timing(source))
    if method.endswith(_ENDLESS):
        step = dataclasses.replace(step, is_endless=True, leaves_s=step.leaves_s or 2.0)
    return step


class RouterTarget(CallTarget):
    """Clients' requests."""

    name = "router"

    def step(self, world: World, source: Source) -> Step:
        """Return one client's call."""
        return _client_step(source)


class AdminTarget(CallTarget):
    """The controller's requests, beside one of a client."""

    name = "admin"

    def step(self, world: World, source: Source) -> Step:
        """Return a call of the controller, or, one time in four, of a client."""
        way = source.below(4)
        if way == 3:
            return _client_step(source)
        members = set_workers_request(world)
        draining = set_workers_request(world)
        draining.workers[1].draining = True
        templates: list[Message]
        if way == 2:
            method, templates = "GetDemand", [router_admin_pb2.GetDemandRequest(window_s=60.0)]
        else:
            method, templates = "SetWorkers", [members, draining, router_admin_pb2.SetWorkersRequest(leaving=True)]
        message = draw(source, templates, _HINTS)
        full_name = f"/kvrelay.v1.RouterAdminService/{method}"
        return Step(target=ROUTER, method=full_name, messages=(message,), **timing(source))

    async def restore(self, world: World) -> None:
        """Name the right members again."""
        await world.restore()
