"""Small workloads."""

from collections.abc import Sequence

from measure.workload.sessions import Content, Segment, Session, Stream, Turn, Workload


def session(
    index: int,
    *,
    start_s: float = 0.0,
    turns: int = 1,
    think_s: float = 0.0,
    tokens: int = 4,
    num_output_tokens: int = 2,
    kind: str = "chat",
) -> Session:
    """Return a session whose turns each add a segment of their own."""
    return Session(
        index=index,
        kind=kind,
        start_s=start_s,
        turns=tuple(
            Turn(
                segments=(Segment(content=1000 * index + turn, num_tokens=tokens),),
                num_output_tokens=num_output_tokens,
                think_s=think_s if turn else 0.0,
            )
            for turn in range(turns)
        ),
    )


def workload(
    *streams: Stream,
    duration_s: float = 10.0,
    max_requests: int | None = None,
    content: Content = Content.TOKENS,
) -> Workload:
    return Workload(
        name="test", content=content, streams=streams, duration_s=duration_s, seed=1, max_requests=max_requests
    )


def open_loop(starts_s: Sequence[float], *, turns: int = 1, first_index: int = 0) -> Stream:
    sessions = [session(first_index + i, start_s=start_s, turns=turns) for i, start_s in enumerate(starts_s)]
    return Stream(kind="chat", sessions=sessions)


def closed_loop(num_sessions: int, concurrency: int, *, turns: int = 1, first_index: int = 0) -> Stream:
    sessions = [session(first_index + i, turns=turns) for i in range(num_sessions)]
    return Stream(kind="chat", sessions=sessions, concurrency=concurrency)
