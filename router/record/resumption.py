"""Answers that another router began: what the client has of them, checked before this router goes on."""

from dataclasses import dataclass

from common.errors import InvalidRequest, WorkerLost
from common.sampling import SamplingParams
from common.tokens import TokenArray, num_packed
from common.wire import unpack_tokens
from kvrelay.v1 import inference_pb2
from router.fleet.facts import ModelFacts

MAX_RENDER_AGE_S = 86_400
"""Most seconds between the rendering of a resumed chat and now; covers an answer and two clocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedSample:
    """Tokens of a sample that another router has delivered, as the client claims; checked to be tokens, no more."""

    token_ids: TokenArray
    is_finished: bool
    text: str = ""
    """The text that came with them, where the answer is parsed."""


def read_resumed(
    message: inference_pb2.GenerateRequest, sampling: SamplingParams, model: ModelFacts
) -> tuple[ResumedSample, ...]:
    """Return the samples that another router began. Raises InvalidRequest, or WorkerLost if it had another model."""
    resume = message.resume
    if resume.fingerprint and resume.fingerprint != model.fingerprint:
        raise WorkerLost(f"the workers of the model that began this answer ({resume.fingerprint[:64]}) are gone")
    if len(resume.samples) > sampling.n:
        raise InvalidRequest(f"{len(resume.samples)} samples; sampling.n is {sampling.n}", field="resume.samples")
    samples = []
    for position, sample in enumerate(resume.samples):
        field = f"resume.samples[{position}]"
        num_tokens = num_packed(sample.tokens)
        if num_tokens > sampling.max_tokens or (num_tokens == sampling.max_tokens and not sample.is_finished):
            raise InvalidRequest(
                f"{num_tokens} tokens leave none of the {sampling.max_tokens} of max_tokens", field=f"{field}.tokens"
            )
        tokens = unpack_tokens(sample.tokens, vocab_size=model.vocab_size, field=f"{field}.tokens")
        if sample.is_finished and not tokens:
            raise InvalidRequest("the sample has an end but no token", field=f"{field}.is_finished")
        text = sample.text if message.chat.parse_answer else ""
        samples.append(ResumedSample(token_ids=tokens, is_finished=sample.is_finished, text=text))
    if any(sample.token_ids for sample in samples) and not message.sampling.HasField("seed"):
        raise InvalidRequest("an answer is resumed with the seed from Accepted", field="sampling.seed")
    return tuple(samples)


def render_time(resume: inference_pb2.Resume, *, now_unix_s: int) -> int:
    """Return the time, in seconds, as of which a request's chat is rendered, here and wherever it is resumed.

    Raises InvalidRequest.
    """
    given_unix_s = resume.rendered_unix_s
    if not given_unix_s:
        if any(sample.tokens for sample in resume.samples):
            raise InvalidRequest("a chat is resumed with the time from Accepted", field="resume.rendered_unix_s")
        return now_unix_s
    if abs(given_unix_s - now_unix_s) > MAX_RENDER_AGE_S:
        raise InvalidRequest(
            f"{given_unix_s} is more than {MAX_RENDER_AGE_S} s away from {now_unix_s}, the time here",
            field="resume.rendered_unix_s",
        )
    return given_unix_s
