"""The `simulate` section of an experiment: what `--simulate` runs in place of real clusters."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from measure.experiment.shapes import Shape


class SimulateSpec(BaseModel):
    """What differs under a virtual clock. What is not said is as in the experiment itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "llama-70b"
    """A model of `measure.simulate.roofline`."""
    device: str = "h100-tp4"
    """What each worker runs on."""
    timing: Path | None = None
    """Timings fitted on real workers, in place of `model` and `device`; relative to the experiment's file."""
    shapes: tuple[Shape, ...] | None = None
    loads: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    repeats: Annotated[int, Field(ge=1)] | None = None
    min_requests: Annotated[int, Field(ge=1)] = 1
    """Cells at a low load last longer, until so many requests have come: virtual time costs nothing."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """What requests allow, which is all that a router knows of their answers; default: their lengths, as load tests
    say to real servers."""
    serving: dict[str, Any] = {}
    """Keys of serving.yaml with dots, and their values."""
