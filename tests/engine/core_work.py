"""Random requests to a core, and what it must report for each of them."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from common.structured_outputs import structure_text
from engine.steps.group import Group
from tests.builders import Collector, expected_tokens
from tests.engine.beam_oracle import expected_beams

STOP_TOKEN = ord("e")  # one of the fake's letters


@dataclass(eq=False)
class Work:
    """A request and the known part of its answer."""

    group: Group
    collector: Collector
    kind: str
    """"add", "prefill", "embed" or "reserve"."""
    is_ended: bool = False
    """Whether it was cancelled."""
    ended_samples: set[int] = field(default_factory=set)
    first_index: int = 0
    """Index of the first token that this core generates."""
    _answers: dict[int, list[int]] = field(default_factory=dict)

    def answer(self, sample: int) -> list[int]:
        """Return the correct whole answer."""
        if sample not in self._answers:
            request = self.group.request
            if request.sampling.has_beams:
                self._answers = dict(enumerate(expected_beams(request)))
                return self._answers[sample]
            tokens = expected_tokens(request, sample=sample)
            stops = [i for i, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
            self._answers[sample] = tokens[: stops[0] + 1] if stops else tokens
        return self._answers[sample]

    def told(self, sample: int) -> list[int]:
        """Return the received tokens, which must be consecutive from the first one on."""
        outputs = [o for o in self.collector.outputs if o.sample_index == sample]
        assert [o.token_index for o in outputs] == list(range(self.first_index, self.first_index + len(outputs)))
        return [o.token_id for o in outputs]


STRUCTURES = [{"regex": "[a-d]{2,5}"}, {"regex": "[ab](cdef[gh])*"}]
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SAMPLING = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 9),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        "stop_token_ids": st.sampled_from([frozenset(), frozenset({STOP_TOKEN})]),
        "num_prompt_logprobs": st.sampled_from([None, None, 1]),
        "structured_outputs": st.sampled_from(["", "", *map(structure_text, STRUCTURES)]),
    }
).map(lambda sampling: sampling | {"ignore_eos": not sampling["structured_outputs"]})
