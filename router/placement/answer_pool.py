"""Which pool answers a request."""

import enum


class AnswerPool(enum.Enum):
    """Pool whose workers answer a request; the value is its name."""

    DECODE = "decode"
    """It generates."""
    PREFILL = "prefill"
    """It embeds: nothing is decoded."""
