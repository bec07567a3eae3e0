"""Finds out, with requests of two tokens, what an OpenAI-compatible server takes."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from common.errors import InvalidRequest, KvrelayError, Unreachable
from kvrelay.client.records import ChatMessage
from measure.load.targets.interface import Feature, TargetAnswer, TargetRequest

USUAL_VOCAB = 32_000
"""Nearly all vocabularies are larger."""
_LEAST_VOCAB = 125
_EXTRAS = (Feature.IGNORE_EOS, Feature.MIN_TOKENS, Feature.TOKEN_IDS)
_TIMEOUT_S = 120.0
"""A server's first request may have to compile something."""
_TEXT = "Hello"
_CHAT = (ChatMessage(role="user", content=_TEXT),)

Send = Callable[[TargetRequest, Sequence[Feature]], Awaitable[TargetAnswer]]
"""Sends a request with the extras named. Raises KvrelayError."""


async def find_features(send: Send, *, takes_report: bool) -> tuple[Feature, ...]:
    """Return the extras that the server takes: all, those without token ids, or none. Raises KvrelayError.

    Asks for a chat where text cannot be completed.
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
    raise refusal or InvalidRequest("the server takes neither text nor chats")


async def find_small_vocab(send: Send) -> int | None:
    """Return how many token ids can be used for sure, when that is less than usual; None when it is not.

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
            return None  # it takes no token ids at all
        return num_tokens if num_tokens < USUAL_VOCAB else None
    return None


def _request(prompt: Any) -> TargetRequest:
    return TargetRequest(
        prompt=prompt, num_prompt_tokens=1, num_output_tokens=2, seed=0, timeout_s=_TIMEOUT_S, wants_token_ids=True
    )
