"""Timing models in files: fitted on real workers, replayed elsewhere.

{"prefill": {"constant_s": 0.004, "per_prefill_token_s": 8e-05, ...}, "decode": {...},
 "max_step_tokens": 2048, "link": {"latency_s": 0.002, "bytes_per_s": 1e9}, "kv_bytes_per_token": 23040}
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.timing import LinkModel, StepModel, TimingModel


class TimingFileError(Exception):
    """A file of timings cannot be used; the message names file and field."""


class _Step(BaseModel):
    model_config = ConfigDict(extra="forbid")
    constant_s: float = Field(ge=0)
    per_prefill_token_s: float = Field(default=0, ge=0)
    per_prefill_pair_s: float = Field(default=0, ge=0)
    per_decode_s: float = Field(default=0, ge=0)
    per_context_token_s: float = Field(default=0, ge=0)
    num_samples: int = Field(default=0, ge=0)


class _Link(BaseModel):
    model_config = ConfigDict(extra="forbid")
    latency_s: float = Field(ge=0)
    bytes_per_s: float = Field(gt=0)
    num_samples: int = Field(default=0, ge=0)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prefill: _Step
    decode: _Step
    max_step_tokens: int = Field(ge=1)
    link: _Link
    kv_bytes_per_token: int = Field(ge=1)


def read_timing(path: Path) -> tuple[TimingModel, int]:
    """Return the model in a file and the KV bytes of one token. Raises TimingFileError, OSError."""
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
    return timing, file.kv_bytes_per_token


def write_timing(path: Path, timing: TimingModel, *, kv_bytes_per_token: int) -> None:
    """Write a model; of its links only the one to any other worker. Raises OSError."""
    file = _File(
        prefill=_Step.model_validate(timing.prefill, from_attributes=True),
        decode=_Step.model_validate(timing.decode, from_attributes=True),
        max_step_tokens=timing.max_step_tokens,
        link=_Link.model_validate(timing.links[None], from_attributes=True),
        kv_bytes_per_token=kv_bytes_per_token,
    )
    path.write_text(file.model_dump_json(indent=2) + "\n", encoding="utf-8")
