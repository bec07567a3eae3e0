"""Checks whether the model can be cut among the ranks of each pool, before a process is started. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path

from cluster.doctor.finding import DoctorFinding, failure, ok
from common.config import ServingConfig
from common.process import CannotStart
from engine.weights.config import UnsupportedModel
from engine.weights.segments import check_ranks_of


def refuse_ranks(config: ServingConfig, folder: Path) -> None:
    """Raise CannotStart, naming the pool, for a model in a folder that our engine cannot cut as configured."""
    if config.model.engine != "torch":
        return
    for name, pool in (("prefill", config.pools.prefill), ("decode", config.pools.decode)):
        try:
            check_ranks_of(folder, pool.tensor_parallel, is_quantized=config.model.quantization is not None)
        except UnsupportedModel as error:
            raise CannotStart(str(error), key=error.key.replace("*", name)) from error


def check_ranks(config: ServingConfig, folder: Path) -> Iterator[DoctorFinding]:
    """Yield whether the model can be cut, where a pool has ranks."""
    nums = {pool.tensor_parallel for pool in (config.pools.prefill, config.pools.decode)}
    if nums == {1}:
        return
    try:
        refuse_ranks(config, folder)
    except CannotStart as error:
        yield failure("ranks", f"{error.key}: {error}", f"correct {error.key}")
    else:
        yield ok("ranks", f"{' and '.join(map(str, sorted(nums)))} to a worker")
