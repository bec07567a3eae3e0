"""A vLLM that runs for a worker: its client, the pipes of its reports, the staged blocks, and facts about its model."""

import os
from dataclasses import dataclass, field

from engine.options import CheckpointInfo
from engine.vllm.client import VllmClient
from engine.vllm.errands import Report, ReportReader
from engine.vllm.staging import StagedStore


@dataclass(slots=True)
class Pipes:
    """Pipes by which the processes of a vLLM report to this one: its scheduler's first, then one for each rank."""

    reading: tuple[int, ...]
    writing: tuple[int, ...]
    """Ends that the processes open anew by their numbers."""
    _readers: tuple[ReportReader, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._readers = tuple(ReportReader() for _ in self.reading)

    @classmethod
    def open(cls, num_ranks: int) -> "Pipes":
        """Make the pipes."""
        ends = [os.pipe2(os.O_CLOEXEC) for _ in range(1 + num_ranks)]
        return cls(tuple(reading for reading, _ in ends), tuple(writing for _, writing in ends))

    def take(self, idx: int, *, waits: bool = False) -> list[Report]:
        """Return the reports that one pipe has whole now; with `waits`, the next ones that come.

        Raises EOFError when its process is gone.
        """
        os.set_blocking(self.reading[idx], waits)
        reports: list[Report] = []
        while not (waits and reports):
            try:
                data = os.read(self.reading[idx], 1 << 16)
            except BlockingIOError:
                break
            if not data:
                raise EOFError
            reports += self._readers[idx].feed(data)
        return reports

    def seal(self) -> None:
        """Close the ends that the processes have opened: from now on a pipe ends with its process."""
        for fd in self.writing:
            os.close(fd)
        self.writing = ()

    def close(self) -> None:
        """Close the pipes."""
        self.seal()
        for fd in self.reading:
            os.close(fd)
        self.reading = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningVllm:
    """A vLLM that runs, and its model as workers describe it."""

    client: VllmClient
    pipes: Pipes
    kv: StagedStore
    num_blocks: int
    """Pages of vLLM that requests can have."""
    num_ranks: int
    info: CheckpointInfo
    compiles_steps: bool = True
    exact_resume: bool = False
    hidden_size: int = 0
    """It computes no embeddings."""
    floors: None = None

    @property
    def model_name(self) -> str:
        """Name under which clients ask for the model."""
        return self.info.name

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.info.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer."""
        return self.info.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.info.eos_token_ids
