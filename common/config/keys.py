"""Declares keys of serving.yaml: type, bounds, default, meaning and the need of a change, in one place.

    max_waiting: Annotated[int, Field(ge=1), Need.POOL] = 256
    \"\"\"Sequences accepted beyond that; more are refused.\"\"\"

The docstring is the key's meaning in docs/serving.md; `common.config.tables` writes the tables there.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from common.ports import MAX_PORT


class Need(StrEnum):
    """Steps that a change of a key needs while the cluster serves; the value describes them."""

    NOTHING = "nothing: processes that start later read it"
    COUNT = "more or fewer workers"
    POOL = "new workers of that pool, one after the other"
    PREFILL = "new prefill workers, one after the other"
    DECODE = "new decode workers, one after the other"
    WORKERS = "new workers of both pools, one after the other"
    ROUTERS = "new routers, one after the other"
    GENERATION = "a second set of workers, then new routers, one after the other; then the old workers go"
    RESTART = "another cluster: it cannot be changed while this one runs"


class Section(BaseModel):
    """Keys that belong together. Immutable; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _on_or_off(value: object) -> object:
    """Return YAML's booleans as the words `on` and `off`."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
DnsName = Annotated[str, Field(pattern=r"^(\*\.)?[A-Za-z0-9_:.-]{1,253}$")]
"""A DNS name or an address."""
Words = BeforeValidator(_on_or_off)
"""Validator of choices that include `on` or `off`, which YAML reads as booleans."""


def declared_keys(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, object, FieldInfo]]:
    """Yield every key below a section with its value and its declaration; `tenants` is one key."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from declared_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, field


def leaves(section: BaseModel) -> dict[str, object]:
    """Return the values of all keys below a section, in the order of the file."""
    return {key: value for key, value, _ in declared_keys(section)}


def needs_of(section: BaseModel) -> Mapping[str, Need]:
    """Return the need of each key. Raises ValueError for a key that does not declare exactly one."""
    pools = {"pools.prefill": Need.PREFILL, "pools.decode": Need.DECODE}
    found: dict[str, Need] = {}
    for key, _, field in declared_keys(section):
        declared = [each for each in field.metadata if isinstance(each, Need)]
        if len(declared) != 1:
            raise ValueError(f"{key} declares {len(declared)} needs; add one `Need` to its annotation")
        found[key] = pools[key.rpartition(".")[0]] if declared[0] is Need.POOL else declared[0]
    return found


def in_yaml(value: object) -> str:
    """Return a value of the configuration as the file writes it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple():
            return f"[{', '.join(map(str, value))}]"
        case _:
            return str(value)
