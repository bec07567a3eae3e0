"""`/v1/messages/count_tokens`: the length of a conversation's prompt."""

from router.front_door import FrontDoor
from router.http.anthropic.calls import conversation_of
from router.http.anthropic.schema import CountTokensBody
from router.http.exchange import Exchange
from router.http.generation import BODY_TIMEOUT_S
from router.http.inquiries import served_model
from router.http.strict import parse_body


class TokenCounter:
    """Handler; sends a whole response or raises KvrelayError."""

    def __init__(self, door: FrontDoor) -> None:
        self._door = door

    async def __call__(self, exchange: Exchange) -> None:
        """Count the tokens of a conversation as `/v1/messages` would; nothing is generated."""
        tenant = self._door.identify(exchange.metadata)
        body = parse_body(CountTokensBody, await exchange.body(timeout_s=BODY_TIMEOUT_S))
        conversation = conversation_of(body)
        model = served_model(self._door, body.model)
        with self._door.tokenizing(tenant):
            encoded = await self._door.reader.encode_chat(conversation, model, tenant=tenant)
        exchange.finish_json({"input_tokens": len(encoded.token_ids)})
