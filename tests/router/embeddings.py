"""Requests for the embedding of a fixed prompt, and the vectors that answer them."""

from typing import Any

import numpy as np
import pytest

from common.wire import unpack_floats
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import sampling_pb2
from tests.router.fake_service import HIDDEN_SIZE, hidden_of
from tests.router.fake_worker import PREFILL, FakeWorker
from tests.router.fakes import prompt_of

LAST, MEAN = sampling_pb2.POOLING_LAST, sampling_pb2.POOLING_MEAN


def embedding_of(num_tokens: int = 10, **fields: Any) -> pb.EmbedRequest:
    """Return a request for the embedding of a fixed prompt."""
    return pb.EmbedRequest(token_ids=pb.TokenIds(ids=prompt_of(num_tokens)), **fields)


def vector_of(response: pb.EmbedResponse) -> list[float]:
    values: list[float] = unpack_floats(response.embedding).tolist()
    return values


def unit(prompt: int | list[int] = 10, pooling: int = LAST, dimensions: int = HIDDEN_SIZE) -> Any:
    """Return the normalized embedding of a prompt, or of the fixed one with so many tokens."""
    tokens = prompt_of(prompt) if isinstance(prompt, int) else prompt
    vector = hidden_of(tokens, pooling)[:dimensions].astype(np.float64)
    return pytest.approx((vector / np.linalg.norm(vector)).tolist(), abs=1e-6)


def prefill_pool(count: int = 2) -> list[FakeWorker]:
    return [FakeWorker(f"p{number}", PREFILL) for number in range(count)]
