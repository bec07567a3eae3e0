"""One process that fuzzes one target: with atheris, by coverage, else by chance. It fails with its first finding.

With atheris the process ends inside it, as libFuzzer does. The input is left in a file `found-…`.
"""

import importlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fuzz.inputs import mutate, read_inputs

_INSTRUMENTED = ("common", "router", "worker", "decode_worker", "prefill_worker", "kv_tiers", "kv_transfer", "engine")
_OPTIONS = ("-max_len=2048", "-timeout=600", "-rss_limit_mb=8192", "-report_slow_units=600", "-artifact_prefix=found-")
_SLOWNESS = 10.0
"""Instrumented code takes at most about so many times as long."""


class Found(Exception):
    """An input shows something whenever it is tried."""


def main(name: str, seconds: int, seed: int, corpus: str) -> None:
    """Fuzz. Raises Found."""
    atheris: Any = None
    with suppress(ImportError):
        atheris = importlib.import_module("atheris")
        with atheris.instrument_imports(include=list(_INSTRUMENTED)):
            importlib.import_module("tests.fuzz.targets.catalog")
    from tests.fuzz.runner import MAX_LOOP_S, Runner
    from tests.fuzz.targets.catalog import TARGETS

    target = TARGETS[name]()
    with Runner(target, max_loop_s=MAX_LOOP_S * (1 if atheris is None else _SLOWNESS)).running() as runner:

        def try_one(data: bytes) -> None:
            if runner.try_input(data) and (found := runner.try_again(data)):
                Path(f"found-{name}").write_bytes(data)
                raise Found("\n".join([f"the input is in found-{name}", *map(str, found)]))

        for data in target.seeds():
            try_one(data)
        if atheris is None:
            _fuzz_by_chance(try_one, [*target.seeds(), *read_inputs(Path(corpus))], seconds=seconds, seed=seed)
        else:
            atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", f"-seed={seed}", *_OPTIONS, corpus], try_one)
            atheris.Fuzz()


def _fuzz_by_chance(try_one: Callable[[bytes], None], inputs: Sequence[bytes], *, seconds: float, seed: int) -> None:
    """Try inputs, and then changed ones, until the time is up."""
    draw, ends_s, num_tried = random.Random(seed), time.monotonic() + seconds, len(inputs)
    for data in inputs:
        try_one(data)
    while time.monotonic() < ends_s:
        try_one(mutate(draw, inputs))
        num_tried += 1
    sys.stderr.write(f"{num_tried} inputs by chance: atheris, which would choose them by coverage, is not installed\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
