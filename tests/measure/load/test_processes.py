"""A generator process as seen by its parent."""

import os

from measure.load.processes import GeneratorProcess


async def test_generator_process_does_not_get_the_terminals_ctrl_c() -> None:
    process = await GeneratorProcess.start(0)
    try:
        assert os.getpgid(process.pid) == process.pid != os.getpgrp()
    finally:
        process.kill()
        await process.wait()


async def test_kill_keeps_the_exit_code_for_the_description() -> None:
    process = await GeneratorProcess.start(3)

    process.kill()

    assert await process.epitaph() == "generator process 3 was killed by signal 9"
