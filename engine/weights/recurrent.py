"""Recurrent layers: what every kind of them has in common."""

from typing import Protocol


class RecurrentConfig(Protocol):
    """A kind of recurrent layers of a decoder."""

    @property
    def layers(self) -> frozenset[int]:
        """Layers of this kind; all others have attention."""
        ...

    @property
    def state_size(self) -> int:
        """Values of a layer's state, float32, those of its convolution included."""
        ...
