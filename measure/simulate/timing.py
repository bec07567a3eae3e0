"""Times of simulated work, and timing models in files: fitted on real workers, replayed elsewhere.

{"prefill": {"constant_s": 0.004, "per_prefill_token_s": 8e-05, ...}, "decode": {...},
"max_step_tokens": 2048, "link": {"latency_s": 0.002, "bytes_per_s": 1e9}, "kv_bytes_per_token": 23040}

A model with window pages, or state pages, also has "windows": {"num_tokens": 512, "page_bytes": 245760}, where a window
of one token is a state.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.timing import MIN_SAMPLES, LinkModel, StepModel, StepShape, TimingModel
from engine.events import StepSample


class StepTimes(Protocol):
    """Seconds of one worker's engine steps. Pure functions.

    With a fixed number of sequences, a step that only decodes must be affine in its context tokens: then the end of the
    n-th next step of a batch is known without taking the steps one by one.
    """

    def step_s(self, shape: StepShape) -> float:
        """Return the time of one step with prompt tokens in it."""
        ...

    def decode_line(self, num_decodes: int) -> tuple[float, float]:
        """Return (seconds of a step that decodes so many sequences of no context, seconds more per context token)."""
        ...

    def floors(self) -> tuple[StepModel, ...]:
        """Return linear models, at least one, none of which exceeds the time of any step."""
        ...


class FittedTimes:
    """Step times of a timing model that was fitted to real runs."""

    def __init__(self, model: TimingModel) -> None:
        self.model = model

    def step_s(self, shape: StepShape) -> float:
        """See `StepTimes`."""
        return self.model.step_s(shape)

    def decode_line(self, num_decodes: int) -> tuple[float, float]:
        """See `StepTimes`."""
        return self.model.itl_s(num_decodes, 0), self.model.decode.per_context_token_s

    def floors(self) -> tuple[StepModel, ...]:
        """See `StepTimes`: the smaller weight of the two kinds of steps; only one of them has prompt tokens."""
        prefill, decode = self.model.prefill, self.model.decode
        floor = StepModel(
            constant_s=min(prefill.constant_s, decode.constant_s),
            per_prefill_token_s=prefill.per_prefill_token_s,
            per_prefill_pair_s=prefill.per_prefill_pair_s,
            per_decode_s=min(prefill.per_decode_s, decode.per_decode_s),
            per_context_token_s=min(prefill.per_context_token_s, decode.per_context_token_s),
        )
        return (floor,)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpeed:
    """Speed of a worker, and what it reports of it."""

    times: StepTimes
    timing: TimingModel | None = None
    """Timing model that the worker reports; None: the model that it fits to its own steps."""


class TimingFileError(Exception):
    """A timing file cannot be used; the message names file and field."""


class _Step(BaseModel):
    model_config = ConfigDict(extra="forbid")
    constant_s: float = Field(ge=0)
    per_prefill_token_s: float = Field(default=0, ge=0)
    per_prefill_pair_s: float = Field(default=0, ge=0)
    per_decode_s: float = Field(default=0, ge=0)
    per_context_token_s: float = Field(default=0, ge=0)
    num_samples: int = Field(default=MIN_SAMPLES, ge=0)
    """Steps of the fit. The default is as many as a router needs: with fewer it would predict by guesses."""


class _Link(BaseModel):
    model_config = ConfigDict(extra="forbid")
    latency_s: float = Field(ge=0)
    bytes_per_s: float = Field(gt=0)
    num_samples: int = Field(default=0, ge=0)


class WindowPageSize(BaseModel):
    """Pages of layers with a window, or of recurrent ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    num_tokens: int = Field(ge=1)
    """Tokens of the window; 1: the layers have states."""
    page_bytes: int = Field(ge=4)
    is_chunk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """What a model's pages take."""

    bytes_per_token: int
    """Those of blocks' own pages."""
    windows: WindowPageSize | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prefill: _Step
    decode: _Step
    max_step_tokens: int = Field(ge=1)
    link: _Link
    kv_bytes_per_token: int = Field(ge=1)
    windows: WindowPageSize | None = None


def read_timing(path: Path) -> tuple[TimingModel, KvSize]:
    """Return a file's timing model and the size of its KV. Raises TimingFileError, OSError."""
    try:
        file = _File.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise TimingFileError(f"{path}: {field + ': ' if field else ''}{first['msg']}") from None
    timing = TimingModel(
        prefill=StepModel(**file.prefill.model_dump()),
        decode=StepModel(**file.decode.model_dump()),
        max_step_tokens=file.max_step_tokens,
        links={None: LinkModel(**file.link.model_dump())},
    )
    return timing, KvSize(bytes_per_token=file.kv_bytes_per_token, windows=file.windows)


def write_timing(path: Path, timing: TimingModel, kv: KvSize) -> None:
    """Write a model, with its link to any other worker only. Raises OSError."""
    file = _File(
        prefill=_Step.model_validate(timing.prefill, from_attributes=True),
        decode=_Step.model_validate(timing.decode, from_attributes=True),
        max_step_tokens=timing.max_step_tokens,
        link=_Link.model_validate(timing.links[None], from_attributes=True),
        kv_bytes_per_token=kv.bytes_per_token,
        windows=kv.windows,
    )
    path.write_text(file.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class StepSegment:
    """Consecutive steps of one composition: decodes alone, or one step with other work in it."""

    start: int
    """Boundary before the first step."""
    start_s: float
    constant_s: float
    """Time of a step without context."""
    per_context_token_s: float
    num_sequences: int
    num_context_tokens: int
    """Context tokens of the first step."""
    is_pure: bool
    """Whether the steps hold nothing but decodes."""

    def end_s(self, boundary: int) -> float:
        """Return the time of a boundary."""
        n = boundary - self.start
        context = n * self.num_context_tokens + self.num_sequences * (n * (n - 1) // 2)
        return self.start_s + n * self.constant_s + context * self.per_context_token_s

    def mean_step(self, boundary: int, boundary_s: float) -> StepSample:
        """Return the mean of the steps up to a boundary, which came at `boundary_s`."""
        num_steps = boundary - self.start
        context = self.num_context_tokens + self.num_sequences * (num_steps - 1) // 2
        shape = StepShape(num_decodes=self.num_sequences, num_context_tokens=context)
        return StepSample(shape=shape, seconds=(boundary_s - self.start_s) / num_steps)

    def first_boundary_at(self, time_s: float) -> int:
        """Return the first boundary at or after a time."""
        square = self.per_context_token_s * self.num_sequences / 2
        linear = self.constant_s + self.per_context_token_s * self.num_context_tokens - square
        left_s = time_s - self.start_s
        root = math.sqrt(linear * linear + 4 * square * left_s)
        boundary = self.start + max(1, int(2 * left_s / (linear + root)))
        while self.end_s(boundary) < time_s:
            boundary += 1
        while boundary > self.start + 1 and self.end_s(boundary - 1) >= time_s:
            boundary -= 1
        return boundary
