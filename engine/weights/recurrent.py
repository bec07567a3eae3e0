"""Recurrent layers: what every kind of them has in common."""

from typing import Protocol


class RecurrentConfig(Protocol):
    """A kind of recurrent layers of a decoder.

    A layer's projections are those of attention: one of the hidden state, `LayerWeights.qkv`, and one of the results,
    `LayerWeights.output`. Some values of the first go through a causal convolution, each value through one of its own.
    """

    @property
    def layers(self) -> frozenset[int]:
        """Layers of this kind; all others have attention."""
        ...

    @property
    def state_size(self) -> int:
        """Values of a layer's state, float32: the convolution's last inputs, [kernel_size - 1, num_channels], first."""
        ...

    @property
    def module(self) -> str:
        """Name in a checkpoint, below the layer's."""
        ...

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        """Names of the projections that `LayerWeights.qkv` joins, with their rows."""
        ...

    @property
    def output(self) -> str:
        """Name of the projection of the results."""
        ...

    @property
    def output_size(self) -> int:
        """Values of a token that it takes."""
        ...

    @property
    def has_bias(self) -> bool:
        """Whether these projections have a bias."""
        ...

    @property
    def num_channels(self) -> int:
        """Values of a token that go through the convolution."""
        ...

    @property
    def kernel_size(self) -> int:
        """Inputs of a value of the convolution: a token's own, and those of the tokens before it."""
        ...

    @property
    def has_convolution_bias(self) -> bool:
        """Whether the convolution has a bias."""
        ...

    @property
    def num_heads(self) -> int:
        """Heads with a decay, and with a state, of their own."""
        ...

    @property
    def has_skip(self) -> bool:
        """Whether a head adds its inputs, times a factor, to its results."""
        ...

    @property
    def norm_size(self) -> int:
        """Weights of the norm of the results."""
        ...
