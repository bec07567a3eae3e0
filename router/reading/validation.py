"""Turns a client's message into a job. Every field is checked here, once; later code never reads the message."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from common.chat_template import Conversation
from common.errors import InvalidRequest, PromptTooLong
from common.ids import RequestId
from common.sampling import SamplingParams
from common.tokens import TokenArray, num_packed
from common.wire import check_bounds, sampling_from_proto, token_ids_from_proto
from kvrelay.v1 import inference_pb2, sampling_pb2
from router.fleet.facts import ModelFacts
from router.reading.cache_marks import MarkFinder, check_marks
from router.reading.codec import Codec
from router.reading.conversation import (
    NO_FORMATS,
    ChatFormats,
    answer_format,
    checked_format,
    num_chars_of,
    read_conversation,
    shaped,
)
from router.reading.fair_threads import FairThreads
from router.reading.token_cache import Encoded
from router.record.cache_use import PromptMark, prompt_marks
from router.record.embedding import read_form
from router.record.record import Delivery, Job
from router.record.resumption import read_resumed, render_time
from router.record.sessions import MAX_SESSION_CHARS
from router.tenants import Tenant

MAX_CHARS_PER_TOKEN = 64
"""Text with more characters than this for each token of the context is refused before it is tokenized."""
MAX_TOKEN_CHARS = 1024
"""Longest text of a single token of an answer that is resumed."""
DEFAULT_MAX_CHARS = 4 << 20
"""The same bound before a worker has reported the context length."""
MAX_WHOLE_LOGPROBS = 1 << 20
"""Most log-probabilities in an answer that is sent whole, about 100 MB of JSON, and in one whose limit is left out."""
MAX_PROMPT_LOGPROBS_BYTES = 8 << 20
"""Bound on the log-probabilities of a prompt, which go out in one message: gRPC packs and unpacks it within some 50 ms
of the event loop. Two for each of 131,072 tokens take 6 MiB."""
_NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""Parameters of a request that samples nothing."""
# Largest sizes on the wire.
_LOGPROB_BYTES = 13
_POSITION_BYTES = 8
_NUM_THREADS = 2
_CHARS_PER_TOKEN = 4
"""Characters whose tokenizing costs as much as turning a token into text."""

ClientMessage = inference_pb2.GenerateRequest | inference_pb2.EmbedRequest | inference_pb2.ChatPrompt
_Result = TypeVar("_Result")


class RequestReader:
    """Reads and checks clients' messages, on threads that tenants share fairly. Event loop only."""

    def __init__(
        self,
        codec: Codec,
        *,
        default_max_tokens: int | None = None,
        model_defaults: Mapping[str, float] = MappingProxyType({}),
        formats: ChatFormats = NO_FORMATS,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """`default_max_tokens`: limit where a request has none; None: what its prompt leaves of the context.

        `model_defaults`: sampling that the model's makers recommend. `formats`: the markup of the model's answers.

        `unix_s` returns the time of day, which templates may write.
        """
        self.codec = codec
        self._threads = FairThreads(_NUM_THREADS, name="read")
        self._formats = formats
        self._unix_s = unix_s
        self._defaults = sampling_pb2.SamplingParams(max_tokens=default_max_tokens)
        for name, value in model_defaults.items():
            setattr(self._defaults, name, value)

    async def read(
        self, message: inference_pb2.GenerateRequest, *, request_id: RequestId, model: ModelFacts, tenant: Tenant
    ) -> Job:
        """Return the job, read on a thread when it is the tenant's turn. Raises RequestError that names the field."""
        # A mark may take one more rendering.
        num_chars = message.ByteSize() * (1 + len(message.cache_marks))
        return await self.run(partial(self._read, message, request_id, model), tenant=tenant, num_chars=num_chars)

    async def read_embedding(
        self, message: inference_pb2.EmbedRequest, *, request_id: RequestId, model: ModelFacts, tenant: Tenant
    ) -> Job:
        """Return the job of a request for an embedding. Raises RequestError that names the field."""
        return await self._run(partial(self._read_embedding, message, request_id, model), message, tenant)

    async def encode_text(self, text: str, model: ModelFacts | None, *, tenant: Tenant) -> TokenArray:
        """Tokenize plain text. Raises PromptTooLong for text that no context could hold."""
        _check_chars(len(text), model, field="text")
        return await self.run(partial(self.codec.encode_now, text), tenant=tenant, num_chars=len(text))

    async def encode_chat(self, chat: inference_pb2.ChatPrompt, model: ModelFacts | None, *, tenant: Tenant) -> Encoded:
        """Render a conversation as of now and tokenize it. Raises RequestError."""

        def encode() -> Encoded:
            conversation, now_unix_s = _conversation(chat, model, self._formats), int(self._unix_s())
            return self.codec.encode_chat_now(conversation, rendered_unix_s=now_unix_s)

        return await self._run(encode, chat, tenant)

    async def decode(self, token_ids: Sequence[int], *, tenant: Tenant) -> str:
        """Return the text of consecutive ids."""
        num_chars = _CHARS_PER_TOKEN * len(token_ids)
        return await self.run(partial(self.codec.decode, token_ids), tenant=tenant, num_chars=num_chars)

    async def pieces(self, token_ids: Sequence[int], *, tenant: Tenant) -> tuple[str, ...]:
        """Return the text of each id separately."""
        num_chars = _CHARS_PER_TOKEN * len(token_ids)
        return await self.run(partial(self.codec.decode_pieces, token_ids), tenant=tenant, num_chars=num_chars)

    async def run(self, work: Callable[[], _Result], *, tenant: Tenant, num_chars: int) -> _Result:
        """Run work whose cost is that of encoding so many characters: on a thread unless it takes less than the way."""
        if num_chars <= self.codec.inline_chars:
            return work()
        return await self._threads.run(work, tenant=tenant, num_chars=num_chars)

    def close(self) -> None:
        """Stop the threads; nothing can be read any more."""
        self._threads.close()

    async def _run(self, work: Callable[[], _Result], message: ClientMessage, tenant: Tenant) -> _Result:
        return await self.run(work, tenant=tenant, num_chars=message.ByteSize())

    def _read(self, message: inference_pb2.GenerateRequest, request_id: RequestId, model: ModelFacts) -> Job:
        """Return the job. Any thread. Raises RequestError that names the field."""
        check_bounds(message)
        check_marks(message)
        model.check_name(message.model)
        conversation = rendered_unix_s = None
        if message.HasField("chat"):
            conversation = _conversation(message.chat, model, self._formats)
            rendered_unix_s = render_time(message.resume, now_unix_s=int(self._unix_s()))
            encoded = self.codec.encode_chat_now(
                conversation,
                rendered_unix_s=rendered_unix_s,
                scope=model.root,  # tenants' roots differ
            )
            encoded = _cut(encoded, message)
            _check_prompt(len(encoded.token_ids), model.max_model_len)
        else:
            encoded = self._prompt(message, model)
        prompt = encoded.token_ids
        if not prompt:
            raise InvalidRequest("the prompt is empty", field="prompt")
        defaults, answer = self._defaults_for(message), None
        sampling = self._sampling(message, defaults, len(prompt), model)
        if not message.sampling.HasField("max_tokens"):
            defaults.max_tokens = sampling.max_tokens
        if conversation is not None:
            _check_parsing(message, sampling)
            answer = self._answer_format(message, conversation, encoded.prompt_end)
            sampling = shaped(sampling, message.chat, conversation.tools, answer, self._formats)
            sampling.validate(vocab_size=model.vocab_size)
        resumed = read_resumed(message, sampling, model) if message.HasField("resume") else ()
        return Job(
            delivery=Delivery.DIRECT if message.direct else Delivery.ROUTER,
            request_id=request_id,
            prompt_token_ids=prompt,
            prompt_hashes=encoded.hashes(root=model.root, block_size=model.block_size),
            sampling=sampling,
            defaults=defaults,
            model=model,
            rendered_unix_s=rendered_unix_s or 0,
            answer_format=answer,
            is_parsed=message.chat.parse_answer,
            marks=self._marks(message, conversation, encoded, rendered_unix_s or 0, model),
            session_name=message.session_id[:MAX_SESSION_CHARS],
            resumed=resumed,
        )

    def _marks(
        self,
        message: inference_pb2.GenerateRequest,
        conversation: Conversation | None,
        encoded: Encoded,
        rendered_unix_s: int,
        model: ModelFacts,
    ) -> tuple[PromptMark, ...]:
        """Return the prefixes of a prompt that are to stay cached; of one that is cut at its front, all or nothing."""
        if not message.cache_marks:
            return ()
        finder = MarkFinder(self.codec, message, encoded)
        if conversation is None or encoded.is_cut:
            given = finder.in_prompt()
        else:
            given = finder.in_chat(
                conversation, self._formats, partial(self.codec.render, rendered_unix_s=rendered_unix_s)
            )
        num_prompt_tokens = len(encoded.token_ids)
        return tuple(prompt_marks(given, num_prompt_tokens=num_prompt_tokens, block_size=model.block_size))

    def _read_embedding(self, message: inference_pb2.EmbedRequest, request_id: RequestId, model: ModelFacts) -> Job:
        """Return the job of a request for an embedding. Any thread. Raises RequestError that names the field."""
        check_bounds(message)
        model.check_name(message.model)
        form = read_form(message, model)
        encoded = self._prompt(message, model)
        prompt = encoded.token_ids
        if not prompt:
            raise InvalidRequest("the prompt is empty", field="prompt")
        num_blocks = -(-len(prompt) // model.block_size)
        if num_blocks > model.max_prefill_blocks:
            raise PromptTooLong(
                f"{len(prompt)} prompt tokens need {num_blocks} KV pages;"
                f" the largest prefill worker has {model.max_prefill_blocks}",
                field="prompt",
            )
        return Job(
            request_id=request_id,
            prompt_token_ids=prompt,
            prompt_hashes=encoded.hashes(root=model.root, block_size=model.block_size),
            sampling=_NO_SAMPLING,
            model=model,
            embedding=form,
        )

    def _prompt(
        self, message: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest, model: ModelFacts
    ) -> Encoded:
        """Return a prompt that is not a conversation. Raises RequestError."""
        longest = model.max_model_len if isinstance(message, inference_pb2.GenerateRequest) else model.context_length
        match message.WhichOneof("prompt"):
            case "text":
                _check_chars(len(message.text), model, field="text")
                encoded = Encoded(self.codec.encode_now(message.text))
            case "token_ids":
                num_tokens = len(message.token_ids.ids)
                _check_prompt(min(num_tokens, message.truncate_prompt_tokens or num_tokens), longest)
                encoded = Encoded(
                    token_ids_from_proto(message.token_ids.ids, vocab_size=model.vocab_size, field="token_ids")
                )
            case _:
                raise InvalidRequest("one of text, token_ids and chat must be set", field="prompt")
        encoded = _cut(encoded, message)
        _check_prompt(len(encoded.token_ids), longest)
        return encoded

    def _answer_format(
        self, message: inference_pb2.GenerateRequest, conversation: Conversation, prompt_end: str
    ) -> inference_pb2.AnswerFormat:
        """Return how the answer to a chat is written: as the router that began it wrote, or in this one's way."""
        if message.resume.HasField("answer_format"):
            return checked_format(message.resume.answer_format)
        return answer_format(message.chat, conversation, self._formats, prompt_end=prompt_end)

    def _defaults_for(self, message: inference_pb2.GenerateRequest) -> sampling_pb2.SamplingParams:
        """Return this server's values of the fields that are left out.

        An answer that another router began goes on with that router's defaults; beams take none of the model's.
        """
        chosen = sampling_pb2.SamplingParams()
        is_begun = any(sample.tokens for sample in message.resume.samples)
        taken = {descriptor.name for descriptor, _ in message.sampling.ListFields()}
        for descriptor, value in self._defaults.ListFields():
            is_models = descriptor.name != "max_tokens"
            if descriptor.name in taken or (is_models and (is_begun or message.sampling.use_beam_search)):
                continue
            setattr(chosen, descriptor.name, value)
        return chosen

    def _sampling(
        self,
        message: inference_pb2.GenerateRequest,
        defaults: sampling_pb2.SamplingParams,
        num_prompt_tokens: int,
        model: ModelFacts,
    ) -> SamplingParams:
        whole = sampling_pb2.SamplingParams()
        whole.CopyFrom(message.sampling)
        whole.MergeFrom(defaults)
        sampling = sampling_from_proto(whole, default_seed=secrets.randbits(63))
        sampling.validate(vocab_size=model.vocab_size)
        _check_prompt_logprobs(num_prompt_tokens, sampling)
        max_tokens = min(sampling.max_tokens, _room(num_prompt_tokens, sampling, model))
        if sampling.num_logprobs is not None and not message.sampling.HasField("max_tokens"):
            max_tokens = min(max_tokens, MAX_WHOLE_LOGPROBS // (sampling.n * (1 + sampling.num_logprobs)))
        return replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))


def _conversation(chat: inference_pb2.ChatPrompt, model: ModelFacts | None, formats: ChatFormats) -> Conversation:
    """Return what the template renders. Raises RequestError."""
    check_bounds(chat, field="chat")
    # A template adds some text to each message, so empty messages count as well.
    _check_chars(sum(num_chars_of(message) + 1 for message in chat.messages), model, field="chat.messages")
    return read_conversation(chat, formats)


def _cut(encoded: Encoded, message: inference_pb2.GenerateRequest | inference_pb2.EmbedRequest) -> Encoded:
    """Return the end of a prompt that a request wants to keep. Raises InvalidRequest."""
    if not message.HasField("truncate_prompt_tokens"):
        return encoded
    num_kept = message.truncate_prompt_tokens
    if not num_kept:
        raise InvalidRequest("truncate_prompt_tokens is 0: no token would be left", field="truncate_prompt_tokens")
    if len(encoded.token_ids) <= num_kept:
        return encoded
    return Encoded(encoded.token_ids[-num_kept:], prompt_end=encoded.prompt_end, is_cut=True)


def _check_parsing(message: inference_pb2.GenerateRequest, sampling: SamplingParams) -> None:
    """Raise InvalidRequest when the answer is to be parsed and cannot be."""
    if not message.chat.parse_answer:
        return
    if message.direct:
        raise InvalidRequest("tokens that come straight from a worker are not parsed", field="chat.parse_answer")
    if not sampling.detokenize:
        raise InvalidRequest("text is parsed: detokenize must be true", field="chat.parse_answer")
    for position, sample in enumerate(message.resume.samples):
        num_tokens, field = num_packed(sample.tokens), f"resume.samples[{position}].text"
        if num_tokens and not sample.HasField("text"):
            raise InvalidRequest("an answer that is parsed is resumed with its text", field=field)
        most = MAX_TOKEN_CHARS + MAX_CHARS_PER_TOKEN * num_tokens
        if len(sample.text) > most:
            raise InvalidRequest(f"{len(sample.text)} characters; {num_tokens} tokens have at most {most}", field=field)


def _check_prompt(num_tokens: int, longest: int) -> None:
    """Raise PromptTooLong unless prompt and one more token are at most `longest` tokens."""
    if num_tokens + 1 > longest:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens; at most {longest - 1} are taken, so that one token can follow",
            field="prompt",
        )


def _check_chars(num_chars: int, model: ModelFacts | None, *, field: str) -> None:
    most = DEFAULT_MAX_CHARS if model is None else MAX_CHARS_PER_TOKEN * model.max_model_len
    if num_chars > most:
        raise PromptTooLong(f"the text has {num_chars} characters; at most {most} are taken", field=field)


def _check_prompt_logprobs(num_prompt_tokens: int, sampling: SamplingParams) -> None:
    if sampling.num_prompt_logprobs is None:
        return
    num_bytes = num_prompt_tokens * (_POSITION_BYTES + _LOGPROB_BYTES * (1 + sampling.num_prompt_logprobs))
    if num_bytes > MAX_PROMPT_LOGPROBS_BYTES:
        raise InvalidRequest(
            f"{sampling.num_prompt_logprobs} for each of {num_prompt_tokens} tokens do not fit in one message:"
            " ask for fewer, or send a shorter prompt",
            field="sampling.prompt_logprobs",
        )


def _room(num_prompt_tokens: int, sampling: SamplingParams, model: ModelFacts) -> int:
    """Return the most tokens of an answer, such that each sample alone, or all beams together, fit to their end.

    Raises PromptTooLong when not even the first tokens of all samples fit.
    """
    num_shared = num_prompt_tokens // model.block_size
    num_own = model.max_decode_blocks - num_shared  # pages of a sample, behind those of the prompt
    if num_own < sampling.n:
        raise PromptTooLong(
            f"{num_prompt_tokens} prompt tokens and {sampling.n} answers need {num_shared + sampling.n} KV pages;"
            f" the largest decode worker has {model.max_decode_blocks}",
            field="sampling.n",
        )
    if sampling.has_beams:  # no beam can go on without the others
        num_own //= sampling.n
    return min(model.max_model_len, (num_shared + num_own) * model.block_size) - num_prompt_tokens
