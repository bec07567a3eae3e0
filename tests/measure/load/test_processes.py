"""A generator process as its parent sees it."""

import os

from measure.load.processes import GeneratorProcess


async def test_generator_process_is_out_of_reach_of_the_terminals_interrupts() -> None:
    process = await GeneratorProcess.start(0)
    try:
        assert os.getpgid(process.pid) == process.pid != os.getpgrp()
    finally:
        process.kill()
        await process.wait()


async def test_kill_leaves_the_exit_code_to_whoever_asks_for_it() -> None:
    process = await GeneratorProcess.start(3)

    process.kill()

    assert await process.epitaph() == "generator process 3 was killed by signal 9"
