"""A target turns an input's bytes into actions on a world, and says which outcomes are findings."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from tests.fuzz.callers import with_proof, with_tickets
from tests.fuzz.messages import Source
from tests.fuzz.play import Step, play
from tests.fuzz.world import World


class Target(ABC):
    """One door."""

    name: ClassVar[str]

    @abstractmethod
    def prepare(self, world: World, data: bytes) -> Any:
        """Return what is to be done; its time does not count."""

    @abstractmethod
    async def play(self, world: World, plan: Any) -> list[str]:
        """Do it; return what is wrong with how it went, each as "kind: text"."""

    async def restore(self, world: World) -> None:  # noqa: B027 - most have nothing to undo
        """Undo what an input may rightly have changed."""

    def seeds(self) -> Sequence[bytes]:
        """Return inputs to begin with."""
        return [bytes([i, j]) for i in range(16) for j in range(4)]


class CallTarget(Target):
    """A door that is called: an input is one call or a few."""

    max_steps: ClassVar[int] = 3

    @abstractmethod
    def step(self, world: World, source: Source) -> Step:
        """Return one call."""

    def prepare(self, world: World, data: bytes) -> list[Step]:
        """Return the calls."""
        source = Source(data)
        steps = [self.step(world, source) for _ in range(1 + source.below(self.max_steps))]
        return [with_tickets(with_proof(step, source), source) for step in steps]

    async def play(self, world: World, plan: Any) -> list[str]:
        """Make the calls."""
        return await play(world, plan)


_STARTS_S = (0.0, 0.0, 0.0, 0.001, 0.02, 1.0)
_LEAVES_S = (None, None, None, None, 0.0, 0.002, 0.01, 0.05, 0.3, 5.0)


def timing(source: Source) -> dict[str, Any]:
    """Return when a call begins and whether its client leaves."""
    return {"starts_s": source.choose(_STARTS_S), "leaves_s": source.choose(_LEAVES_S)}
