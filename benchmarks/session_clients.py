"""Plays sessions of a coding agent through OpenAI's and Anthropic's clients, with retention by sessions and without.

    python -m benchmarks.session_clients sessions.jsonl.gz [--sessions 30] [--turns 6] [--blocks 80] [--json FILE]

Method. The first sessions of the file that are short enough are chats with the default model on 2P2D workers of one
thread, all at a time. Lengths are divided by 256, pauses by 10, at most 15 s. A turn that ended in a call of a tool in
the recording is forced to call one. Each worker has pages for `--blocks` blocks, less than all sessions need.

For each arm, `router.retention: sessions` and `age`, a cluster starts, plays the sessions once unmeasured, so that
routers learn, and then, with other texts, through each client in turn. The share of prompt tokens that were cached is
as the clients are told; TTFT counts from when a turn is due, completion from a session's begin to its end.
"""

import asyncio
import gzip
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anthropic import AnthropicError, AsyncAnthropic
from openai import AsyncOpenAI, OpenAIError

from benchmarks.agent_sessions import Scale
from benchmarks.clusters import running_doors
from benchmarks.command import command_line, terminal, write_figures
from benchmarks.figures import Figures, quantile
from common.clock import SystemClock
from common.errors import EngineFault
from measure.load.records import RequestRecord, ServerReport
from measure.load.sending import PreparedRequest, SessionText, send, until
from measure.load.session_figures import session_outcomes
from measure.load.targets.interface import ChunkSink, TargetAnswer, TargetRequest
from measure.workload.build import build_workload
from measure.workload.content import ContentWriter
from measure.workload.playing import Due
from measure.workload.recorded import chosen_sessions
from measure.workload.sessions import Content, Session
from measure.workload.spec import RecordedStreamSpec, WorkloadSpec

_SCALE = Scale(shrink=256, speed=10.0, max_pause_s=15.0, max_prompt=750)
_RAMP_S = 10.0
_TIMEOUT_S = 600.0
_NAME, _ABOUT = "run", "Run a step of the build."
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"step": {"enum": ["test", "build"]}},
    "required": ["step"],
    "additionalProperties": False,
}
_CALL_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A turn, as a client is to send it."""

    session: str
    messages: Sequence[Mapping[str, str]]
    max_tokens: int
    calls_tool: bool


Ask = Callable[[Asked, ChunkSink], Awaitable[TargetAnswer]]


async def ask_openai(client: AsyncOpenAI, asked: Asked, on_chunk: ChunkSink) -> TargetAnswer:
    """Send a chat, streamed."""
    tool = {"type": "function", "function": {"name": _NAME, "description": _ABOUT, "parameters": _SCHEMA}}
    choice = {"type": "function", "function": {"name": _NAME}}
    create: Any = client.chat.completions.create
    stream = await create(
        model="default",
        messages=asked.messages,
        max_tokens=asked.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        prompt_cache_key=asked.session,
        **({"tools": [tool], "tool_choice": choice} if asked.calls_tool else {}),
    )
    texts, usage = [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            calls = part.delta.tool_calls or ()
            text = (part.delta.content or "") + "".join(call.function.arguments or "" for call in calls)
            if text:
                on_chunk(1)
            texts.append(text)
    assert usage is not None, "it was asked for"
    return _answer(texts, usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens)


async def ask_anthropic(client: AsyncAnthropic, asked: Asked, on_chunk: ChunkSink) -> TargetAnswer:
    """Send a message, streamed."""
    tool = {"name": _NAME, "description": _ABOUT, "input_schema": _SCHEMA}
    choice = {"type": "tool", "name": _NAME}
    messages: Any = client.messages
    given = {"tools": [tool], "tool_choice": choice} if asked.calls_tool else {}
    texts = []
    async with messages.stream(
        model="default",
        messages=asked.messages,
        max_tokens=asked.max_tokens,
        metadata={"user_id": asked.session},
        extra_body={"temperature": 0},
        **given,
    ) as stream:
        async for event in stream:
            if event.type == "content_block_delta":
                on_chunk(1)
                texts.append(getattr(event.delta, "text", "") or getattr(event.delta, "partial_json", ""))
        usage = (await stream.get_final_message()).usage
    cached = usage.cache_read_input_tokens or 0
    num_prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
    return _answer(texts, num_prompt, usage.output_tokens, cached)


def _answer(texts: Sequence[str], num_prompt: int, num_output: int, num_cached: int | None) -> TargetAnswer:
    return TargetAnswer(
        text="".join(texts),
        token_ids=None,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        report=ServerReport(num_cached_tokens=num_cached or 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sessions, and which of their turns end in a call of a tool."""

    sessions: Sequence[Session]
    calls: frozenset[tuple[int, int]]
    """By index of the session, and turn."""


def plan_of(path: Path, *, num_sessions: int, num_turns: int, seed: int) -> Plan:
    """Return the first sessions that are short enough. Raises TraceError, WorkloadError, OSError."""
    spec = _SCALE.first_sessions(path, num_sessions=num_sessions, num_turns=num_turns)
    stream = RecordedStreamSpec(name="agents", sessions=spec, concurrency=num_sessions, ramp_s=_RAMP_S)
    (built,) = build_workload(WorkloadSpec(content=Content.CHAT, seed=seed, streams=(stream,))).streams
    sessions = list(built.sessions)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        stops = {each["session"]: [turn["stop"] for turn in each["requests"]] for each in map(json.loads, lines)}
    recorded = zip(sessions, chosen_sessions(spec), strict=True)
    calls = {(session.index, turn) for session, each in recorded for turn in _calls(stops[each.name], session)}
    return Plan(sessions=sessions, calls=frozenset(calls))


def _calls(stops: Sequence[str], session: Session) -> list[int]:
    return [turn for turn in range(len(session.turns)) if stops[turn] == "tool_use"]


async def play(plan: Plan, ask: Ask, *, seed: int) -> list[RequestRecord]:
    """Play all sessions and return their requests."""
    clock, writer, records = SystemClock(), ContentWriter(seed=seed), list[RequestRecord]()
    origin_s = clock.monotonic()

    async def one(text: SessionText, due: Due, tasks: asyncio.TaskGroup) -> None:
        session = text.play.session
        num_tokens, prompt = text.ask(due.turn)
        calls_tool = (session.index, due.turn) in plan.calls
        num_wanted = session.turns[due.turn].num_output_tokens
        asked = Asked(
            session=f"session {session.index} of {seed}",
            messages=[{"role": each.role, "content": each.content} for each in prompt],  # type: ignore[union-attr]
            max_tokens=_CALL_TOKENS if calls_tool else num_wanted,
            calls_tool=calls_tool,
        )

        async def call(on_chunk: ChunkSink) -> TargetAnswer:
            try:
                return await ask(asked, on_chunk)
            except (OpenAIError, AnthropicError) as error:
                raise EngineFault(f"{type(error).__name__}: {error}") from None

        target = TargetRequest(
            prompt=prompt,
            num_prompt_tokens=num_tokens,
            num_output_tokens=num_wanted,
            seed=0,
            timeout_s=_TIMEOUT_S,
        )
        request = PreparedRequest(session=session, turn=due.turn, asked=target, call=call)
        await until(origin_s + due.due_s, clock)
        record, answer = await send(request, due_s=due.due_s, clock=clock, origin_s=origin_s)
        records.append(record)
        if answer is None:
            text.play.failed()
            return
        for each in text.answered(due.turn, answer, record):
            tasks.create_task(one(text, each, tasks))

    async with asyncio.TaskGroup() as tasks:
        for session in plan.sessions:
            text = SessionText(session, Content.CHAT, writer)
            for due in text.play.begin(session.start_s):
                tasks.create_task(one(text, due, tasks))
    return records


def note(figures: Figures, door: str, arm: str, records: Sequence[RequestRecord]) -> None:
    """Add the figures of one play."""
    ended = [each for each in records if each.is_complete]
    follow_ups = [each.ttft_s for each in ended if each.turn and each.ttft_s is not None]
    outcomes = [each for each in session_outcomes(records) if each.is_complete]
    found = sum(each.server.num_cached_tokens or 0 for each in ended)
    figures.add(
        "sessions",
        door,
        arm,
        cached_percent=100 * found / sum(each.num_prompt_tokens for each in ended),
        TTFT_p50_s=quantile(follow_ups, 0.5),
        TTFT_p90_s=quantile(follow_ups, 0.9),
        completion_p50_s=quantile([each.end_s - each.begin_s for each in outcomes], 0.5),
        completion_p90_s=quantile([each.end_s - each.begin_s for each in outcomes], 0.9),
        complete=len(outcomes),
        failures=len(records) - len(ended),
    )


async def measure(url: str, plans: Sequence[Plan], arm: str, figures: Figures) -> None:
    """Play the sessions unmeasured, then through each client."""
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_S) as openai,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=_TIMEOUT_S) as anthropic,
    ):
        asks: dict[str, Ask] = {
            "first": lambda asked, on_chunk: ask_openai(openai, asked, on_chunk),
            "OpenAI": lambda asked, on_chunk: ask_openai(openai, asked, on_chunk),
            "Anthropic": lambda asked, on_chunk: ask_anthropic(anthropic, asked, on_chunk),
        }
        for seed, (door, ask) in enumerate(asks.items()):
            records = await play(plans[seed], ask, seed=seed)
            note(figures, door, arm, records)
            for error in {each.error for each in records if each.error}:
                terminal(stderr=True).print(f"{arm}, {door}: {error}")


def main() -> int:
    """Measure and print."""
    parser = command_line("session_clients", __doc__)
    parser.add_argument("trace", type=Path, help="recorded sessions, packed")
    parser.add_argument("--sessions", type=int, default=30)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=80, help="pages of each worker, of 16 tokens")
    parser.add_argument("--arms", nargs="+", default=["sessions", "age"])
    args, console, figures = parser.parse_args(), terminal(stderr=True), Figures()
    plans = [plan_of(args.trace, num_sessions=args.sessions, num_turns=args.turns, seed=seed) for seed in range(3)]
    sizes = [max(each.prompt_lengths()) for each in plans[0].sessions]
    kept = sum(turn.beginning.num_tokens for each in plans[0].sessions for turn in each.turns if turn.beginning)
    asked = sum(sum(each.prompt_lengths()) for each in plans[0].sessions)
    num_requests = sum(len(each.turns) for each in plans[0].sessions)
    console.print(
        f"{num_requests} requests, {len(plans[0].calls)} call tools; last prompts {sum(sizes)} tokens, the longest"
        f" {max(sizes)}; with infinite pages {100 * kept / asked:.1f} % are cached"
    )
    pool = {"count": 2, "threads": 1, "num_blocks": args.blocks, "kv_memory_gib": "auto"}
    for arm in args.arms:
        router = {"retention": arm, "queue_timeout_s": _TIMEOUT_S, "shed": "none"}
        doors = running_doors(
            launcher="local",
            console=console,
            model={"max_model_len": args.blocks * 16},
            pools={"prefill": pool, "decode": pool},
            router=router,
        )
        with doors as (info, _config):
            asyncio.run(measure(f"http://{info.http_address}", plans, arm, figures))
        figures.show(console)
    write_figures(args.json, figures, method="benchmarks/session_clients.py", sessions=args.sessions, turns=args.turns)
    figures.show(terminal())
    return 0


if __name__ == "__main__":
    sys.exit(main())
