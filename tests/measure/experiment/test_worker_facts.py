"""Facts that an experiment asks of a worker."""

import pytest

from common.errors import EngineFault
from common.trust.identity import Role
from measure.experiment.worker_facts import ask_worker
from tests.router.fakes import DECODE, FakeWorker
from tests.trust import reach_as


async def test_worker_without_timing_is_a_fault_that_names_it() -> None:
    worker = FakeWorker("d0", DECODE)
    await worker.start()
    try:
        with pytest.raises(EngineFault, match=f"{worker.address} reports no timing"):
            await ask_worker(worker.address, reach_as(Role.OPERATOR).worker)
    finally:
        await worker.die()
