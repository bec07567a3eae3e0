"""The clients of a walk: each asks one question and checks what comes of it."""

import asyncio
import random
from contextlib import suppress
from functools import partial

from common.block_hash import hash_blocks
from common.errors import CrashSuspected, InvalidRequest, KvrelayError, Overloaded, WorkerLost
from common.ids import RequestId, mint_request_id
from common.lifecycle import LifeCycle
from common.tokens import as_tokens
from kvrelay.client.direct import TailLost
from measure.simulate.chaos.oracles import AnswerCheck, Violation
from measure.simulate.chaos.poison import PoisonBook
from measure.simulate.chaos.questions import Question, QuestionBook
from measure.simulate.chaos.reading import Readers
from measure.simulate.chaos.routers import ChaosRouters, RouterGone
from measure.simulate.chaos.settings import MIN_QUIET_S, ChaosReport, ChaosSettings, FaultKind
from measure.simulate.client import admit
from router.fleet.decisions import CAPACITY
from router.parts import RouterParts
from router.record.record import Delivery, Job
from router.record.resumption import ResumedSample
from router.tenants import ANYBODY as HOUSE
from router.tenants import Tenant

FLOODER = Tenant(name="flooder", max_queued=30, max_concurrent=4)
"""A tenant whose requests fill its own places in line, and only these."""


class Clients:
    """All clients of all routers. Event loop only."""

    def __init__(
        self,
        draw: random.Random,
        settings: ChaosSettings,
        book: QuestionBook,
        poisons: PoisonBook,
        routers: ChaosRouters,
        readers: Readers,
    ) -> None:
        """Outcomes and broken invariants go into the report of the readers' audit."""
        self._draw = draw
        self._settings = settings
        self._book = book
        self._poisons = poisons
        self._routers = routers
        self._readers = readers
        self._audit = readers.audit
        self._report = readers.audit.report
        self._unlucky_prompts: set[bytes] = set()
        """Prompts of innocent requests that were refused after many deaths; routers remember them for a while."""

    @property
    def report(self) -> ChaosReport:
        """Report of the walk."""
        return self._report

    @property
    def serve_poison(self) -> bool:
        """Whether a poison request runs."""
        return self._poisons.quiet_s == 0.0

    async def ask_once(self, router: RouterParts) -> None:
        """Ask one question; some clients cancel, some questions are poison."""
        is_poison, patience_s = self._draws_poison(), None
        question = self._book.fresh() if is_poison else self._book.draw()
        check = AnswerCheck(question)
        life = LifeCycle(mint_request_id(), router.clock)
        if is_poison:
            token_index = self._draw.randrange(len(question.answers[0]))
            self._poisons.add(life.request_id, token_index, num_tokens=lambda: check.num_tokens)
        elif self._draw.random() < self._settings.cancelled_share:
            patience_s = self._draw.expovariate(1 / self._settings.patience_s)
        try:
            async with asyncio.timeout(patience_s):
                outcome = await self._ask(question, check, router, life, HOUSE)
        except TimeoutError:
            outcome = "cancelled"
        finally:
            if is_poison:
                self._poisons.end(life.request_id)
        self._report.outcomes[outcome] += 1

    async def flood(self, router: RouterParts) -> None:
        """Ask many questions at once as a tenant who may run few of them; their clients leave one after the other."""

        async def ask() -> None:
            self._report.num_flooding += 1
            question = self._book.draw()
            check, life = AnswerCheck(question), LifeCycle(mint_request_id(), router.clock)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._draw.expovariate(1 / self._settings.patience_s)):
                    await self._ask(question, check, router, life, FLOODER)

        # A list, not a group, which would cancel its tasks in any order.
        tasks = [asyncio.create_task(ask()) for _ in range(self._settings.num_flooding)]
        try:
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            task.result()

    def _draws_poison(self) -> bool:
        settings = self._settings
        if FaultKind.POISON not in settings.faults or self._poisons.quiet_s < MIN_QUIET_S:
            return False
        return self._draw.random() < 1 / (settings.poison_gap_s * settings.rate_per_s)

    async def _ask(
        self, question: Question, check: AnswerCheck, router: RouterParts, life: LifeCycle, tenant: Tenant
    ) -> str:
        """Return the outcome of a request; note a broken invariant."""
        life.end_within(self._settings.timeout_s)
        error: KvrelayError | None = None
        delivery, attempt = self._readers.draw_delivery(), life
        try:
            while True:
                work = partial(self._attempt, check, router, attempt, tenant, delivery)
                try:
                    await self._routers.attempt(router, work)
                    break
                except TailLost:
                    self._report.num_lost_tails += 1
                except RouterGone:
                    self._report.num_lost_routers += 1
                    router = self._routers.for_client(self._report.num_lost_routers)
                attempt = LifeCycle(mint_request_id(), router.clock, deadline_s=life.deadline_s)
            check.end_well()
        except KvrelayError as caught:
            check.end_badly()
            error = caught
        except Violation as violation:
            self._report.violations.append(f"{life.request_id}: {violation}")
            return "wrong"
        is_poison = self._poisons.is_poison(life.request_id)
        if tenant is FLOODER and isinstance(error, Overloaded):
            wrong = ""
        elif is_poison:
            wrong = self._wrong_end_of_poison(life.request_id, error, router)
        else:
            wrong = self._wrong_end(question, attempt, error, router)
        if wrong:
            self._report.violations.append(f"{life.request_id} {wrong}")
        return "complete" if error is None else type(error).__name__

    async def _attempt(
        self,
        check: AnswerCheck,
        router: RouterParts,
        life: LifeCycle,
        tenant: Tenant,
        delivery: Delivery,
    ) -> None:
        """Ask for what the client has not got yet. Raises KvrelayError, and TailLost to be asked again."""
        question = check.question
        with (
            router.orchestrator.calls.account(life),
            admit(router, tenant) as ticket,
            self._audit.following(router, life.request_id, check, ticket, is_direct=delivery is Delivery.DIRECT),
        ):
            model = await router.fleet.wait_for_model(timeout_s=self._settings.timeout_s)
            job = Job(
                request_id=life.request_id,
                prompt_token_ids=question.prompt,
                prompt_hashes=hash_blocks(question.prompt, root=model.root, block_size=model.block_size),
                sampling=question.sampling,
                model=model,
                delivery=delivery,
                resumed=tuple(
                    ResumedSample(token_ids=as_tokens(sample.token_ids), is_finished=sample.is_finished)
                    for sample in check.so_far()
                ),
            )
            async with router.orchestrator.running(job, ticket, life) as served:
                await self._readers.read(served.outbox, job, check, life, tenant)
            if served.outbox.error is not None:
                raise served.outbox.error

    def _wrong_end(self, question: Question, life: LifeCycle, error: KvrelayError | None, router: RouterParts) -> str:
        """Return why an innocent request should not have ended so; empty if it should."""
        if error is None or self._settings.may_fail:
            return ""
        # A call that is opened twice is refused; HTTP/2 never repeats a message, so no router sends it again.
        if isinstance(error, InvalidRequest) and FaultKind.REPEATED in self._settings.faults:
            return ""
        if isinstance(error, CrashSuspected):
            max_lost, prompt = router.config.max_lost_workers, bytes(question.prompt)
            attempts = router.chooser.decisions.latest(tenant=HOUSE.name, limit=CAPACITY, request_id=life.request_id)
            if prompt in self._unlucky_prompts or self._poisons.may_be_bad_luck(attempts, max_lost=max_lost):
                self._unlucky_prompts.add(prompt)
                return ""
        return f"is innocent and has failed: {error!r}"

    def _wrong_end_of_poison(self, request_id: RequestId, error: KvrelayError | None, router: RouterParts) -> str:
        others = self._settings.faults - {FaultKind.POISON}
        if isinstance(error, InvalidRequest) and FaultKind.REPEATED in others:
            return ""  # as an innocent one
        if isinstance(error, WorkerLost) and others:
            return ""  # with workers that it lost otherwise, it had `max_attempts` first
        if not isinstance(error, CrashSuspected):
            return f"is poison and ended with {error!r}"
        num_deaths = self._poisons.num_deaths(request_id)
        # A request whose last worker has never answered gets one more.
        attempts = router.chooser.decisions.latest(tenant=HOUSE.name, limit=CAPACITY, request_id=request_id)
        is_in_doubt = self._poisons.ended_at_once(request_id, attempts)
        is_too_many = num_deaths > router.config.max_lost_workers + is_in_doubt
        return f"is poison and has ended {num_deaths} workers in a row" if is_too_many else ""
