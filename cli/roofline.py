"""`kvrelay roofline`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import typer
from rich.console import Group, RenderableType

from cli.console import err, out, print_wide
from cli.options import JsonOption, options_from_dataclasses
from cli.render import SplitTable, seconds
from cli.target import ConnectionOptions
from kvrelay.client import DeviceReport, LinkRate, StepTotals, TimingReport, WorkerView

_TIMEOUT_S = 10.0
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT = 1024
_WINDOW_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step: what is in it, and how long it takes."""

    name: str
    num_bytes: float
    num_flops: float
    taken_s: float

    def against(self, device: DeviceReport) -> "_Bounded":
        """Return how near it is to the bounds of a device."""
        memory_s, compute_s = self.num_bytes / device.read_bytes_per_s, self.num_flops / device.flops_per_s
        return _Bounded(
            step=self.name,
            memory_s=memory_s,
            arithmetic_s=compute_s,
            bound="memory" if memory_s >= compute_s else "arithmetic",
            taken_s=self.taken_s,
            share_of_bound=max(memory_s, compute_s) / self.taken_s if self.taken_s else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounded:
    """A step beside the bounds of its worker's device; a row of the table."""

    step: str
    memory_s: float
    arithmetic_s: float
    bound: str
    taken_s: float
    share_of_bound: float

    def cells(self) -> list[str]:
        """Return the row."""
        times = seconds(self.memory_s), seconds(self.arithmetic_s), self.bound, seconds(self.taken_s)
        return [self.step, *times, f"{self.share_of_bound:.0%}"]


@options_from_dataclasses
def roofline(*, connection: ConnectionOptions, as_json: JsonOption = False) -> None:
    """Show how near the steps of each worker are to the bounds of its memory and its arithmetic.

    A step is bound by memory while reading weights and KV takes longer than its arithmetic; the batch at which that
    changes is the ridge. Both rates are the best that workers of a host measured on as many cores. Times are those of
    the fitted timing model, in the last row of the steps of the last hour. The line above the table shows how fast
    each transport moved KV on this host at the start, and how fast pulls have been since.
    """
    with connection.client(timeout_s=_TIMEOUT_S) as client:
        workers = client.status().workers
    shown = [worker for worker in workers if worker.status is not None and worker.status.device is not None]
    if not shown:
        err.print("no worker has measured its device: only native architectures are counted")
        raise typer.Exit(1)
    if as_json:
        typer.echo(json.dumps([_record(worker, shown) for worker in shown], indent=2))
        return
    for worker in shown:
        print_wide(_view(worker, shown))
        out.print()


def _of_host(worker: WorkerView, others: Sequence[WorkerView]) -> DeviceReport:
    """Return a worker's device with the highest rates that workers of its host measured on as many cores.

    Each measures as it starts, some while others use the memory. A GPU, which has no cores here, is not shared.
    """
    device = _device(worker)
    host, _, _ = worker.address.rpartition(":")
    like = [_device(other) for other in others if other.address.rpartition(":")[0] == host]
    like = [each for each in like if each.num_cores and each.num_cores == device.num_cores] or [device]
    return replace(
        device,
        read_bytes_per_s=max(each.read_bytes_per_s for each in like),
        flops_per_s=max(each.flops_per_s for each in like),
    )


def _device(worker: WorkerView) -> DeviceReport:
    assert worker.status is not None
    assert worker.status.device is not None
    return worker.status.device


def _view(worker: WorkerView, others: Sequence[WorkerView]) -> RenderableType:
    assert worker.status is not None
    device = _of_host(worker, others)
    ridge = device.weight_bytes / device.read_bytes_per_s * device.flops_per_s
    headline = (
        f"{worker.worker_id}: memory {device.read_bytes_per_s / 1e9:.1f} GB/s, arithmetic"
        f" {device.flops_per_s / 1e12:.2f} TFLOP/s, weights {device.weight_bytes / 2**20:.0f} MiB,"
        f" KV {device.kv_bytes_per_token / 1024:.1f} KiB a token; above"
        f" {ridge / (device.layer_flops + device.head_flops):.1f} rows a step is bound by arithmetic"
    )
    links = _links(worker.status.link_rates)
    rows = (each.cells() for each in _steps(worker, device))
    return Group(
        headline,
        *([f"KV pulled by {links}"] if links else []),
        SplitTable(("step", "memory", "arithmetic", "bound", "taken", "of the bound"), rows, num_left=1),
    )


def _record(worker: WorkerView, others: Sequence[WorkerView]) -> dict[str, object]:
    assert worker.status is not None
    device = _of_host(worker, others)
    return {
        "worker_id": worker.worker_id,
        "device": asdict(device),
        "link_rates": [asdict(each) for each in worker.status.link_rates],
        "steps": [asdict(each) for each in _steps(worker, device)],
    }


def _steps(worker: WorkerView, device: DeviceReport) -> list[_Bounded]:
    """Return the steps of a worker beside the bounds of `device`."""
    assert worker.status is not None
    measured = _measured_steps(_device(worker), worker.status.recent_steps)
    return [each.against(device) for each in (*_model_steps(device, worker.timing), *measured)]


def _links(rates: Sequence[LinkRate]) -> str:
    """Return what each transport can move, and what pulls by it reach."""
    lines = []
    for rate in rates:
        parts = []
        if rate.most_bytes_per_s:
            parts.append(f"{rate.most_bytes_per_s / 1e9:.2g} GB/s between pages of this host")
        if rate.bytes_per_s:
            parts.append(f"{rate.bytes_per_s / 1e9:.2g} GB/s from {rate.peer_worker_id} ({rate.num_pulls} pulls)")
        lines.append(f"{rate.transport} {', '.join(parts)}")
    return "; ".join(lines)


def _model_steps(device: DeviceReport, timing: TimingReport) -> Iterator[_Step]:
    """Yield decode steps of several batches and a full prefill step, as the fitted model times them."""
    decode, prefill, chunk = timing.decode, timing.prefill, timing.max_step_tokens
    if decode.num_samples:
        for batch in _BATCHES:
            context = batch * _CONTEXT
            yield _Step(
                name=f"decode {batch}, {_CONTEXT} tokens each",
                num_bytes=device.weight_bytes + context * device.kv_bytes_per_token,
                num_flops=batch * (device.layer_flops + device.head_flops) + context * device.pair_flops,
                taken_s=decode.constant_s + batch * decode.per_decode_s + context * decode.per_context_token_s,
            )
    if prefill.num_samples:
        pairs = chunk * (chunk + 1) // 2
        yield _Step(
            name=f"prefill {chunk}",
            num_bytes=device.weight_bytes,
            num_flops=chunk * device.layer_flops + device.head_flops + pairs * device.pair_flops,
            taken_s=prefill.constant_s + chunk * prefill.per_prefill_token_s + pairs * prefill.per_prefill_pair_s,
        )


def _measured_steps(device: DeviceReport, recent: Sequence[StepTotals]) -> Iterator[_Step]:
    """Yield the mean steps of the last hour."""
    for steps in recent:
        if steps.window_s != _WINDOW_S:
            continue
        kinds = (
            ("decode", steps.num_decode_steps, steps.decode_memory_s, steps.decode_compute_s, steps.decode_s),
            ("prefill", steps.num_prefill_steps, steps.prefill_memory_s, steps.prefill_compute_s, steps.prefill_s),
        )
        for kind, count, memory_s, compute_s, taken_s in kinds:
            if count:
                yield _Step(
                    name=f"{kind}, mean of {count} measured",
                    num_bytes=memory_s / count * device.read_bytes_per_s,
                    num_flops=compute_s / count * device.flops_per_s,
                    taken_s=taken_s / count,
                )
