"""Pool shapes as people write them: "2P1D", "3 aggregated", or a mapping that says more."""

import re
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_DISAGGREGATED = re.compile(r"(\d+)\s*[pP]\s*(\d+)\s*[dD]")
_AGGREGATED = re.compile(r"(\d+)\s+aggregated")
Count = Annotated[int, Field(ge=1, le=1024)]


class Shape(BaseModel):
    """How many workers of which kind, and what else is special about them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    """Default: "2P1D" or "3 aggregated"."""
    prefill: Count | None = None
    """Workers of the prefill pool; with `decode`."""
    decode: Count | None = None
    workers: Count | None = None
    """Aggregated workers, in place of the two pools."""
    threads: Count | None = None
    """CPU threads of each worker."""
    serving: dict[str, Any] = {}
    """Keys of serving.yaml with dots, such as `pools.max_step_tokens`, and their values for this shape."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, raw: object) -> object:
        if not isinstance(raw, str):
            return raw
        if match := _DISAGGREGATED.fullmatch(raw.strip()):
            return {"prefill": int(match[1]), "decode": int(match[2])}
        if match := _AGGREGATED.fullmatch(raw.strip()):
            return {"workers": int(match[1])}
        raise ValueError(f"{raw!r} is no pool shape; say 2P1D, or 3 aggregated")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        pools = (self.prefill, self.decode)
        if self.workers is None and None in pools:
            raise ValueError("say both prefill and decode, or workers for an aggregated shape")
        if self.workers is not None and pools != (None, None):
            raise ValueError("workers are aggregated ones: there is neither prefill nor decode beside them")
        return self

    @property
    def num_prefill(self) -> int:
        """Workers of the prefill pool; 0: aggregated."""
        return self.prefill or 0

    @property
    def num_decode(self) -> int:
        """Workers that write answers."""
        return self.workers or self.decode or 0

    @property
    def num_workers(self) -> int:
        """Workers of both kinds."""
        return self.num_prefill + self.num_decode

    @property
    def title(self) -> str:
        """What it is called."""
        return self.name or (f"{self.prefill}P{self.decode}D" if self.num_prefill else f"{self.workers} aggregated")
