"""Probes an OpenAI-compatible server for extensions and vocabulary, with requests of two tokens."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from common.errors import InvalidRequest, KvrelayError, Unreachable
from kvrelay.client.records import ChatMessage
from measure.load.targets.interface import Feature, TargetAnswer, TargetRequest

USUAL_VOCAB = 32_000
"""Vocabulary size that nearly all models exceed."""
_LEAST_VOCAB = 125
_EXTRAS = (Feature.IGNORE_EOS, Feature.MIN_TOKENS, Feature.TOKEN_IDS)
_TIMEOUT_S = 120.0
"""The first request may compile kernels."""
_TEXT = "Hello"
_CHAT = (ChatMessage(role="user", content=_TEXT),)

Send = Callable[[TargetRequest, Sequence[Feature]], Awaitable[TargetAnswer]]
"""Sends a request with the given extensions. Raises KvrelayError."""


async def find_features(send: Send, *, takes_report: bool) -> tuple[Feature, ...]:
    """Return the extensions of the server: all, all but token ids, or none. Raises KvrelayError.

    Sends a chat where the server cannot complete text.
    """
    ours = (Feature.REPORT,) if takes_report else ()
    refusal: KvrelayError | None = None
    for features in ((*_EXTRAS, *ours), (*_EXTRAS[:2], *ours), ()):
        for prompt in (_TEXT, _CHAT):
            try:
                answer = await send(_request(prompt), features)
            except Unreachable:
                raise
            except KvrelayError as error:
                refusal = error
                continue
            has_ids = answer.token_ids is not None
            return tuple(one for one in features if has_ids or one is not Feature.TOKEN_IDS)
    raise refusal or InvalidRequest("the server accepts neither text nor chats")


async def find_small_vocab(send: Send) -> int | None:
    """Return a number of token ids that the vocabulary has for certain, where it is below `USUAL_VOCAB`; else None.

    Raises Unreachable.
    """
    num_tokens = USUAL_VOCAB
    while num_tokens >= _LEAST_VOCAB:
        try:
            await send(_request((num_tokens - 1,)), ())
        except Unreachable:
            raise
        except InvalidRequest:
            num_tokens //= 2
            continue
        except KvrelayError:
            return None  # no token ids at all
        return num_tokens if num_tokens < USUAL_VOCAB else None
    return None


def _request(prompt: Any) -> TargetRequest:
    return TargetRequest(
        prompt=prompt, num_prompt_tokens=1, num_output_tokens=2, seed=0, timeout_s=_TIMEOUT_S, wants_token_ids=True
    )
