"""What may be wrong with a tier's bytes or files. A fault costs a block, or the tier: never a wrong byte."""

import enum


class FaultKind(enum.StrEnum):
    """Reason why a block was dropped, or not kept; by these the statistics count."""

    FLIPPED = "flipped"
    """The bytes of a block differ from those that were put."""
    TORN = "torn"
    """A process ended while it wrote the block."""
    CORRUPT = "corrupt"
    """A record of the index fails its check."""
    SWAPPED = "swapped"
    """A record lies in the place of another one."""
    DUPLICATE = "duplicate"
    """An older copy of a block, which could not be overwritten when it was dropped."""
    STALE = "stale"
    """Other weights, another dtype or layout, or another version of the format."""
    TRUNCATED = "truncated"
    """A file ends too early."""
    FULL = "full"
    """The file system has no space left."""
    IO_ERROR = "io_error"
    """The system refused to read or write."""
    VANISHED = "vanished"
    """The folder was removed or replaced."""
    SLOW = "slow"
    """A read or write took so long that computing is faster; its bytes are used."""


class TierFault(Exception):
    """A medium cannot keep or return a block. Never leaves this package."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def reason_of(error: Exception) -> str:
    """Return what an error says, without its number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
