"""Numbers and tables for people."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvrelay.client import ClusterStatus, Forecast, Generation, PlanChosen, RouterStatus, WorkerView

_GAP = 3  # one space of padding on both sides, and the line


class SplitTable:
    """Rows of text under headers. The first column names the row and is repeated in every part."""

    def __init__(
        self, headers: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int, title: str | None = None
    ) -> None:
        """The first `num_left` columns are words, aligned left; the others are numbers, aligned right.

        A row may end early.
        """
        self._headers = headers
        self._rows = [[*row, *[""] * (len(headers) - len(row))] for row in rows]
        self._num_left = num_left
        self._title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as few tables as the width allows, an empty line between them."""
        title = self._title
        for number, columns in enumerate(self._parts(options.max_width)):
            if number:
                yield ""
            yield self._table(columns, title)
            title = None

    def _parts(self, max_width: int) -> Iterator[list[int]]:
        widths = [max(map(cell_len, column)) + _GAP for column in zip(self._headers, *self._rows, strict=True)]
        part, width = [0], widths[0]
        for index in range(1, len(widths)):
            if len(part) > 1 and width + widths[index] > max_width:
                yield part
                part, width = [0], widths[0]
            part.append(index)
            width += widths[index]
        yield part

    def _table(self, columns: Sequence[int], title: str | None) -> Table:
        table = Table(title=title, title_justify="left", show_edge=False)
        for index in columns:
            table.add_column(self._headers[index], justify="left" if index < self._num_left else "right")
        for row in self._rows:
            table.add_row(*(row[index] for index in columns))
        return table


_KIB = 1024


def seconds(value_s: float | None) -> str:
    """Return a duration with a unit that suits it; "–" for None."""
    if value_s is None:
        return "–"
    if value_s < 1:
        return f"{value_s * 1000:.1f} ms" if value_s < 0.1 else f"{value_s * 1000:.0f} ms"
    if value_s < 120:
        return f"{value_s:.2f} s"
    minutes, rest_s = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s"


def forecast_text(forecast: Forecast | None) -> str:
    """Return a forecast with its interval; "–" for None."""
    if forecast is None or forecast.low_s is None or forecast.high_s is None:
        return seconds(None if forecast is None else forecast.expected_s)
    return f"{seconds(forecast.expected_s)} ({seconds(forecast.low_s)} to {seconds(forecast.high_s)})"


def byte_count(value: int) -> str:
    """Return a size in binary units."""
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < _KIB or unit == "GiB":
            break
        size /= _KIB
    return f"{value} B" if unit == "B" else f"{size:.1f} {unit}"


def plan_text(plan: PlanChosen) -> str:
    """Return which workers serve the request."""
    workers = [worker for worker in (plan.prefill_worker_id, plan.decode_worker_id) if worker]
    return f"{plan.kind.value} {' → '.join(workers)}"


def throughput(num_tokens: int, elapsed_s: float) -> str:
    """Return the total of a run."""
    rate = f"{num_tokens / elapsed_s:.1f}" if elapsed_s > 0 else "–"
    return f"{num_tokens} tokens in {elapsed_s:.2f} s · {rate} tokens/s"


def stats_lines(generation: Generation, *, elapsed_s: float) -> list[str]:
    """Return what a request cost. `elapsed_s` is the client's own time from sending to the last token."""
    usage, timings, transfer = generation.usage, generation.timings, generation.transfer
    lines = [f"request   {generation.request_id}"]
    for plan in generation.plans:
        lines += [f"plan      {plan_text(plan)}", f"          {plan.reason}"]
    lines.append(
        f"tokens    prompt {usage.num_prompt_tokens} · cached {usage.num_cached_tokens}"
        f" (on decode {usage.num_decode_cached_tokens}) · output {usage.num_output_tokens}"
    )
    if usage.num_drafted_tokens:
        lines.append(f"drafts    {usage.num_accepted_tokens} of {usage.num_drafted_tokens} tokens right")
    if transfer.transport is not None:
        lines.append(
            f"KV        {byte_count(transfer.kv_bytes)} handed over in {transfer.num_blocks} blocks"
            f" by {transfer.transport} · {seconds(timings.transfer_exposed_s)} not hidden by prefill"
        )
    else:
        lines.append("KV        0 B handed over")
    lines.append(
        f"time      queue {seconds(timings.queue_s)} · prefill {seconds(timings.prefill_s)}"
        f" · transfer {seconds(timings.transfer_s)}"
    )
    lines.append(
        f"latency   TTFT {seconds(timings.ttft_s)} · TPOT {seconds(timings.tpot_s)}"
        f" · largest gap {seconds(timings.max_itl_s)}"
    )
    lines.append(f"total     {throughput(usage.num_output_tokens, elapsed_s)} · seed {generation.seed}")
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """One finished request of the demo."""

    title: str
    generation: Generation


def summary_table(rows: Sequence[SummaryRow]) -> RenderableType:
    """Return a table with one line per request."""
    numbers = ("prompt", "cached", "output", "KV moved", "queue", "prefill", "transfer", "TTFT", "TPOT")
    return SplitTable(
        ("request", "plan", *numbers), map(_summary_cells, rows), num_left=2, title="What each request cost"
    )


def _summary_cells(row: SummaryRow) -> list[str]:
    usage, timings = row.generation.usage, row.generation.timings
    return [
        row.title,
        plan_text(row.generation.plan),
        str(usage.num_prompt_tokens),
        str(usage.num_cached_tokens),
        str(usage.num_output_tokens),
        byte_count(row.generation.transfer.kv_bytes),
        seconds(timings.queue_s),
        seconds(timings.prefill_s),
        seconds(timings.transfer_s),
        seconds(timings.ttft_s),
        seconds(timings.tpot_s),
    ]


def openai_url(address: str, router: RouterStatus) -> str:
    """Return what OpenAI's clients take as their base URL."""
    scheme = "https" if router.is_encrypted else "http"
    return f"{scheme}://{address.rpartition(':')[0]}:{router.http_port}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRouter:
    """A router's view of the cluster, or the reason why there is none."""

    address: str
    status: ClusterStatus | None
    waiting: str = ""
    """What its queued requests wait for; empty when there are none."""
    error: str = ""


def status_view(routers: Sequence[AskedRouter]) -> RenderableType:
    """Return some lines for each router, and the table of workers as the first one that answers sees them."""
    parts: list[RenderableType] = []
    for asked in routers:
        if asked.status is None:
            parts.append(Text(f"router {asked.address} is DOWN: {asked.error}", style="bold red"))
        else:
            parts.extend(_router_lines(asked.status.router, address=asked.address, waiting=asked.waiting))
    status = next((asked.status for asked in routers if asked.status is not None), None)
    return Group(*parts, "", _worker_table(status.workers)) if status is not None else Group(*parts)


def _router_lines(router: RouterStatus, *, address: str, waiting: str) -> list[RenderableType]:
    http = f" · {openai_url(address, router)}" if router.http_port else ""
    lines = (
        f"router {address}{http} · policy {router.policy}\n"
        f"requests: {router.num_queued} queued, {router.num_active} active · {router.num_completed} completed,"
        f" {router.num_cancelled} cancelled, {router.num_failed} failed, {router.num_rejected} rejected\n"
        f"{router.num_refused} refused at the door · {router.num_replans} replans, {router.num_moves} moves ·"
        f" held: {router.num_bookings} bookings, {router.num_request_tasks} tasks ·"
        f" prefix index: {router.num_index_blocks} blocks"
    )
    if waiting:
        lines += f"\n{waiting}"
    if router.refusals:
        lines += "\nrefused: " + ", ".join(
            f"{each.num_refused} of {each.tenant} ({each.cause})" for each in router.refusals
        )
    for each in router.tenants:
        lines += (
            f"\ntenant {each.tenant}: {each.num_queued} queued, {each.num_active} active · tokens"
            f" {each.num_prompt_tokens} computed, {each.num_cached_tokens} cached, {each.num_output_tokens} answered\n"
            f"  router {each.router_s:.1f} s, compiling {each.compile_s:.1f} s"
        )
        if each.num_set_back:
            lines += f" · {each.num_set_back} answers set back for other tenants"
        if each.num_arriving_bytes or each.num_unsent_entries:
            lines += f" · waiting: {each.num_arriving_bytes} bytes to be read, {each.num_unsent_entries} to be sent"
        if each.num_pinned_tokens or each.num_refused_pin_tokens:
            lines += f"\n  {each.num_pinned_tokens} tokens pinned now, pins of {each.num_refused_pin_tokens} refused"
    return [lines, *(Text(f"ALARM {text}", style="bold red") for text in router.alarms)]


def _worker_table(workers: Sequence[WorkerView]) -> RenderableType:
    counts = (
        "run",
        "wait",
        "pages used",
        "cached",
        "total",
        "window pages",
        "in tiers",
        "leases",
        "reserved",
        "tasks",
        "preempted",
    )
    headers = ("worker", "state", *counts, "prefix hits", "drafts right", "KV in", "KV out", "up", "pid")
    rows = ([worker.worker_id, _worker_state(worker), *_worker_cells(worker)] for worker in workers)
    return SplitTable(headers, rows, num_left=2)


def _worker_state(worker: WorkerView) -> str:
    notes = [f"slow ×{worker.slowness:.1f}"] if worker.slowness else []
    if (num_failed := round(worker.num_failed_attempts)) > 0:
        notes.append(f"{num_failed} failed")
    if worker.status is not None and worker.status.num_ranks > 1:
        notes.append(f"{worker.status.num_ranks} ranks")
    if worker.exact_resume is False:
        notes.append("no exact resume")
    return ", ".join([worker.state, *notes])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _worker_cells(worker: WorkerView) -> list[str]:
    status = worker.status
    if status is None:
        return []
    num_prompt_tokens = status.num_cached_tokens + status.num_computed_tokens
    hits = _share(status.num_cached_tokens, num_prompt_tokens)
    right = _share(status.num_accepted_tokens, status.num_drafted_tokens)
    load = status.load
    counts = (
        load.num_running,
        load.num_waiting,
        status.num_used_blocks,
        status.num_cached_blocks,
        load.num_blocks,
        f"{load.num_promised_window_pages} of {load.num_window_pages}" if load.num_window_pages else "–",
        f"{load.num_tier_blocks} of {load.max_tier_blocks}" if load.max_tier_blocks else "–",
        status.num_leases,
        status.num_reservations,
        status.num_request_tasks,
        status.num_preemptions,
    )
    return [
        *(str(count) for count in counts),
        hits,
        right,
        byte_count(status.kv_bytes_received),
        byte_count(status.kv_bytes_sent),
        seconds(status.uptime_s),
        str(status.pid),
    ]
