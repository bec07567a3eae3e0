"""How long simulated work takes: what stands in for forward passes."""

from typing import Protocol

from common.timing import StepShape, TimingModel


class StepTimes(Protocol):
    """Seconds of one worker's engine steps. Pure functions.

    A step that only decodes must be an affine function of its context tokens as long as the number of sequences stays
    the same: then the end of the n-th next step of a batch is known without taking the steps one by one.
    """

    def step_s(self, shape: StepShape) -> float:
        """Return the time of one step with prompt tokens in it."""
        ...

    def decode_line(self, num_decodes: int) -> tuple[float, float]:
        """Return (seconds of a step that decodes so many sequences of no context, seconds more per context token)."""
        ...


class FittedTimes:
    """Steps of a worker whose timing model was fitted to real runs."""

    def __init__(self, model: TimingModel) -> None:
        self.model = model

    def step_s(self, shape: StepShape) -> float:
        """See `StepTimes`."""
        return self.model.step_s(shape)

    def decode_line(self, num_decodes: int) -> tuple[float, float]:
        """See `StepTimes`."""
        return self.model.itl_s(num_decodes, 0), self.model.decode.per_context_token_s
