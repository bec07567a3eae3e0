"""Embeddings as clients ask for them: the checked request, and the vector that it gets."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.errors import InvalidRequest
from common.pooling import Pooling, pooling_from_proto
from kvrelay.v1 import inference_pb2
from router.fleet.facts import ModelFacts

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingForm:
    """How a prompt's hidden states become the vector for the client."""

    pooling: Pooling
    is_normalized: bool = True
    num_dimensions: int | None = None
    """Leading values to keep; None: all."""

    def apply(self, pooled: Floats) -> Floats:
        """Return the vector for the client: cut, then scaled to length 1; zeros stay zeros."""
        vector = pooled[: self.num_dimensions].astype(np.float64)
        length = np.linalg.norm(vector) if self.is_normalized else 1.0
        return (vector / length if length else vector).astype(np.float32)


def read_form(message: inference_pb2.EmbedRequest, model: ModelFacts) -> EmbeddingForm:
    """Return the form that a request asks for. Raises InvalidRequest that names the field."""
    if not model.hidden_size:
        raise InvalidRequest(f"cannot embed: the workers give no hidden states of model {model.name}", field="model")
    num_dimensions = message.dimensions if message.HasField("dimensions") else None
    if num_dimensions is not None and not 1 <= num_dimensions <= model.hidden_size:
        raise InvalidRequest(
            f"dimensions is {num_dimensions}; allowed are 1 to {model.hidden_size}", field="dimensions"
        )
    return EmbeddingForm(
        pooling=pooling_from_proto(message.pooling, field="pooling") or Pooling.LAST,
        is_normalized=message.normalize if message.HasField("normalize") else True,
        num_dimensions=num_dimensions,
    )
