"""Load target for our own gRPC API."""

from contextlib import suppress
from dataclasses import asdict

from common.errors import AccessDenied, EngineFault, UnknownModel
from kvrelay.client import AsyncClient, AsyncGenerationStream, SamplingOptions
from kvrelay.client.chat import ChatMessage
from kvrelay.client.events import Accepted, Completed, PlanChosen, Token, TokenRun
from kvrelay.client.requests import Prompt, ServiceTerms
from kvrelay.client.status import WorkerView
from measure.load.records import PoolSample, ServerReport, WorkerSample
from measure.load.targets.interface import ChunkSink, PreparedCall, TargetAnswer, TargetInfo, TargetRequest, TargetSpec

_UNARY_TIMEOUT_S = 10.0


class GrpcTarget:
    """A kvrelay cluster, through its Python client; a `Target`.

    Prompts of token ids are answered with token ids (`detokenize=False`), the cheapest way for client and router; text
    and chats are answered with text. Greedy. Each message is one piece of the answer.
    """

    def __init__(self, spec: TargetSpec, address: str) -> None:
        self.spec = spec
        self._client = AsyncClient(address, api_key=spec.api_key, direct=spec.direct, tls=spec.tls)
        self._model = spec.model or ""

    @property
    def name(self) -> str:
        """Kind and address."""
        how = "kvrelay gRPC, direct," if self.spec.direct else "kvrelay gRPC"
        return f"{how} at {','.join(self._client.addresses)}"

    async def describe(self) -> TargetInfo:
        """Ask for models and workers. Raises Unreachable or another KvrelayError."""
        models = await self._client.models(timeout_s=_UNARY_TIMEOUT_S)
        if not models:
            raise UnknownModel(f"{self.name} serves no model")
        model = next((one for one in models if one.name == self._model), models[0])
        num_workers: dict[str, int] = {}
        with suppress(AccessDenied):  # tenants may not see the cluster
            for worker in (await self._client.status(timeout_s=_UNARY_TIMEOUT_S)).workers:
                num_workers[worker.role] = num_workers.get(worker.role, 0) + 1
        return TargetInfo(
            system="kvrelay",
            model=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            num_workers=num_workers,
            takes_objectives=True,
        )

    def prepare(self, request: TargetRequest) -> PreparedCall:
        """Return a call of `Generate`."""
        prompt = request.prompt
        wants_text = isinstance(prompt, str) or isinstance(prompt[0] if prompt else None, ChatMessage)
        sampling = SamplingOptions(
            max_tokens=request.num_output_tokens,
            ignore_eos=True,
            temperature=0.0,
            seed=request.seed,
            detokenize=wants_text,
        )
        terms = None
        if request.ttft_slo_s is not None or request.tpot_slo_s is not None:
            terms = ServiceTerms(ttft_s=request.ttft_slo_s, tpot_s=request.tpot_slo_s)

        async def call(on_chunk: ChunkSink) -> TargetAnswer:
            return await self._call(prompt, sampling, terms, request.timeout_s, on_chunk)

        return call

    async def _call(
        self,
        prompt: Prompt,
        sampling: SamplingOptions,
        terms: ServiceTerms | None,
        timeout_s: float,
        on_chunk: ChunkSink,
    ) -> TargetAnswer:
        answer = _Answer()
        async with self._client.stream(
            prompt, model=self._model, timeout_s=timeout_s, terms=terms, **sampling
        ) as stream:
            await answer.read(stream, on_chunk)
        return answer.build()

    async def sample(self, at_s: float) -> PoolSample | None:
        """Return the state of the router and its workers. Raises KvrelayError."""
        status = await self._client.status(timeout_s=_UNARY_TIMEOUT_S)
        return PoolSample(
            at_s=at_s,
            num_queued=status.router.num_queued,
            workers=tuple(sample for view in status.workers if (sample := _worker_sample(view)) is not None),
        )

    async def aclose(self) -> None:
        """Close the channel."""
        await self._client.aclose()


class _Answer:
    """Collects the events of one answer."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._accepted: Accepted | None = None
        self._plan: PlanChosen | None = None
        self._completed: Completed | None = None

    async def read(self, stream: AsyncGenerationStream, on_chunk: ChunkSink) -> None:
        """Read the stream to its end. Raises KvrelayError."""
        while batch := await stream.next_batch():
            num_before = len(self._token_ids)
            for event in batch:
                match event:
                    case TokenRun():
                        self._token_ids.extend(event.token_ids)
                    case Token():
                        self._token_ids.append(event.token_id)
                        self._texts.append(event.text)
                    case Accepted():
                        self._accepted = event
                    case PlanChosen():
                        self._plan = event
                    case Completed():
                        self._completed = event
            if num_tokens := len(self._token_ids) - num_before:
                on_chunk(num_tokens)

    def build(self) -> TargetAnswer:
        """Return the answer. Raises EngineFault when the server omitted a part of it."""
        accepted, plan, completed = self._accepted, self._plan, self._completed
        if accepted is None or plan is None or completed is None:
            raise EngineFault("the server completed an answer without sending accepted, plan and completed")
        return TargetAnswer(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            num_prompt_tokens=accepted.num_prompt_tokens,
            num_output_tokens=completed.usage.num_output_tokens,
            report=ServerReport.of({"request_id": accepted.request_id, "plans": [asdict(plan)], **asdict(completed)}),
        )


def _worker_sample(view: WorkerView) -> WorkerSample | None:
    if view.status is None:
        return None
    load = view.status.load
    return WorkerSample(
        worker_id=view.worker_id,
        role=view.role,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_blocks=load.num_blocks,
        num_used_blocks=view.status.num_used_blocks,
        num_cached_blocks=view.status.num_cached_blocks,
        num_computed_tokens=view.status.num_computed_tokens,
        num_cached_tokens=view.status.num_cached_tokens,
        busy_s=view.status.busy_s,
    )
