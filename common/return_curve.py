"""What a turn of a session is worth to a cache after its end, as routers tell workers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnCurve:
    """Age at which an average turn is worth as much, by the time since a turn's end: `like_s[i]` until `ages_s[i]`."""

    like_s: tuple[float, ...]
    """The last one holds for good."""
    ages_s: tuple[float, ...]
    """Ascending; one fewer than `like_s`."""
