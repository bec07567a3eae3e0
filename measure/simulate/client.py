"""Sends requests to a router, behind its front door, and notes what becomes of them."""

from common.block_hash import hash_blocks
from common.errors import KvrelayError, Overloaded, Refused
from common.ids import RequestId, mint_request_id
from common.lifecycle import LifeCycle
from common.sampling import SamplingParams
from kvrelay.v1 import inference_pb2
from measure.simulate.executor import Answer
from measure.simulate.loop import VirtualLoop
from measure.simulate.records import Arrival, RequestResult, SimSettings
from measure.simulate.token_log import TokenLog
from router.admission.terms import Terms
from router.admission.ticket import Ticket
from router.parts import RouterParts
from router.record import Job
from router.tenants import ANYBODY


class SimClient:
    """All clients of one router. Event loop only."""

    def __init__(
        self,
        router: RouterParts,
        loop: VirtualLoop,
        settings: SimSettings,
        answers: dict[RequestId, Answer],
        log: TokenLog,
    ) -> None:
        """`answers`: where the engines look up what to say."""
        self._router = router
        self._loop = loop
        self._settings = settings
        self._answers = answers
        self._log = log
        self.begin_s = 0.0
        """Virtual time that results call 0."""

    async def ask(self, arrival: Arrival, result: RequestResult) -> None:
        """Serve one request, and fill in its result."""
        router, settings = self._router, self._settings
        life = LifeCycle(mint_request_id(), router.clock)
        request_id = life.request_id
        self._answers[request_id] = Answer(arrival.num_output_tokens, arrival.answer)
        self._log.begin(request_id, arrival.kind)
        deadline_s = self._loop.time() + settings.timeout_s
        try:
            with (
                router.orchestrator.account(life, time_left_s=lambda: deadline_s - self._loop.time()),
                self._admit(arrival) as ticket,
            ):
                job = self._job(arrival, request_id)
                router.orchestrator.take_tokens(ticket, job)
                async with router.orchestrator.running(job, ticket, life, timeout_s=settings.timeout_s) as outbox:
                    while (message := await outbox.get()) is not None:
                        self._note(result, message)
                if outbox.error is not None:
                    raise outbox.error
        except KvrelayError as error:
            result.refusal = f"{type(error).__name__}: {error.message}"
        result.end_s = self._now_s()
        times = self._log.times(request_id)
        if times is not None:
            result.gap_sum_s = times.last_s - times.first_s
            result.gap_max_s = times.gap_max_s
        self._log.forget(request_id)
        del self._answers[request_id]

    def _now_s(self) -> float:
        return self._loop.time() - self.begin_s

    def _admit(self, arrival: Arrival) -> Ticket:
        """Return a place in line. Raises Overloaded."""
        settings = self._settings
        ttft_slo_s = settings.ttft_slo_s if arrival.ttft_slo_s is None else arrival.ttft_slo_s
        terms = Terms(priority=arrival.priority, ttft_slo_s=ttft_slo_s, itl_slo_s=settings.itl_slo_s)
        self._router.orchestrator.demand.note_arrival()
        admitted = self._router.admission.admit(settings.tenants.get(arrival.tenant, ANYBODY), terms)
        if isinstance(admitted, Refused):
            raise Overloaded(admitted.reason, retry_after_s=admitted.retry_after_s)
        return admitted

    def _job(self, arrival: Arrival, request_id: RequestId) -> Job:
        model = self._router.fleet.model
        assert model is not None, "the routers have met the workers"
        max_tokens = arrival.max_tokens or arrival.num_output_tokens
        return Job(
            request_id=request_id,
            prompt_token_ids=arrival.prompt,
            prompt_hashes=hash_blocks(arrival.prompt, root=model.root, block_size=model.block_size),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False),
            model=model,
        )

    def _note(self, result: RequestResult, message: inference_pb2.GenerateResponse) -> None:
        """Note what a message to the client tells."""
        match message.WhichOneof("event"):
            case "tokens":
                if result.first_token_s is None:
                    result.first_token_s = self._now_s()
            case "plan":
                plan = message.plan
                result.prefill_worker, result.decode_worker = plan.prefill_worker_id, plan.decode_worker_id
                if plan.attempt == 1:
                    result.predicted_cached_tokens = plan.predicted_cached_tokens
                    result.predicted_ttft_s = plan.predicted_ttft_s or None
                    result.predicted_itl_s = plan.predicted_itl_s or None
            case "completed":
                usage, transfer = message.completed.usage, message.completed.transfer
                result.num_output_tokens = usage.num_output_tokens
                result.num_cached_tokens = usage.num_cached_tokens
                result.num_pulled_tokens = usage.num_pulled_tokens
                result.num_decode_cached_tokens = usage.num_decode_cached_tokens
                result.transfer_bytes, result.transfer_exposed_s = transfer.kv_bytes, transfer.exposed_s
                result.num_attempts = message.completed.num_attempts
