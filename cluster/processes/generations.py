"""Which processes of a cluster work together. Pure.

A *generation* are those whose configurations agree in the model, its formats, the block size and the longest sequence:
their workers can exchange KV and take over each other's answers. There are two of them while `changeover` runs, else
one. A router is told the workers of its own generation only.
"""

from cluster.processes.plan import ProcessSpec
from common.config import NEEDS, Need, ServingConfig, leaves

Generation = tuple[object, ...]


class Generations:
    """Tells the generation of a process. Not thread-safe."""

    def __init__(self, config: ServingConfig) -> None:
        """`config` is that of processes whose spec has none."""
        self._config = config
        self._known: dict[int, tuple[ServingConfig, Generation]] = {}
        """By id; holds each configuration, so that an id stays its own."""

    def of(self, spec: ProcessSpec) -> Generation:
        """Return what is equal for processes of one generation, and for no others."""
        config = spec.config or self._config
        if id(config) not in self._known:
            self._known[id(config)] = (config, generation(config))
        return self._known[id(config)][1]


def generation(config: ServingConfig) -> Generation:
    """Return the values of the keys that make a generation."""
    return tuple(value for key, value in leaves(config).items() if NEEDS[key] is Need.GENERATION)
