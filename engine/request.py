"""Requests as the services hand them to an engine."""

import enum
import math
from dataclasses import dataclass, field

from common.block_hash import BlockHashes
from common.chat.parsing import AnswerFormatLike
from common.ids import HashRoot, RequestId
from common.pooling import Pooling
from common.sampling import SamplingParams
from common.tokens import TokenArray, as_tokens
from engine.beams import BeamSnapshot
from engine.cache_marks import CacheMarks
from engine.text.grammar import Grammar


class Retention(enum.Enum):
    """Time that the pages of a finished sequence stay cached."""

    KEEP = "keep"
    """Until their turn in the usual order (`common/eviction.py`)."""
    BRIEF = "brief"
    """Evicted before all others, unless they were reused: another worker keeps these blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request as a worker receives it. With `output_token_ids` it resumes another worker's answer (then n is 1)."""

    request_id: RequestId
    prompt_token_ids: TokenArray
    sampling: SamplingParams
    hash_root: HashRoot
    block_hashes: BlockHashes
    """Hashes of the full blocks of prompt + output tokens."""
    output_token_ids: TokenArray = field(default_factory=lambda: as_tokens(()))
    first_sample_index: int = 0
    tpot_slo_s: float = math.inf
    """Objective for the mean gap between the tokens of its answer."""
    retention: Retention = Retention.KEEP
    cache_marks: CacheMarks | None = None
    """Blocks of its prompt that are to stay cached; None: its tenant pins nothing here."""
    grammar: Grammar | None = None
    """Grammar that its answers follow."""
    pooling: Pooling | None = None
    """Set when it is answered by an embedding of its prompt, and samples nothing."""
    beams: BeamSnapshot | None = None
    """Beam search that it continues."""
    answer_format: AnswerFormatLike | None = None
    """How its answers are written, where stop strings are compared with their content alone; None: with all text."""
    must_repeat: bool = False
    """Whether another engine that continues it has to draw tokens again which its client may have already."""
