"""Sections of serving.yaml that concern the whole cluster: encryption, the planner, and traces."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from common.config.keys import DnsName, Need, Port, Section, Words
from common.trust.identity import INTERNAL_SUFFIX

_MAX_TLS_NAME_CHARS = 1400
"""Characters of all names together; with the host's own names they fit a certificate (`authority.MAX_NAME_BYTES`)."""


class TlsConfig(Section):
    """Encryption of the cluster's connections; docs/security.md."""

    mode: Annotated[Literal["auto", "on", "off", "files"], Words, Need.RESTART] = "auto"
    """`auto`: TLS when `router.host` is not a loopback address, or in a Ray cluster that is joined; `on`: always;
    `off`: never; `files`: like `on`, but doors show the certificate of the files below instead of the cluster's own."""
    insecure: Annotated[bool, Need.RESTART] = False
    """With `off`: serve other hosts without TLS anyway. Prompts, answers and API keys can be read on the way."""
    certificate: Annotated[Path | None, Need.RESTART] = None
    """With `files`: the doors' certificate chain in PEM, leaf first, at this path on every host. Read again when it
    changes."""
    key: Annotated[Path | None, Need.RESTART] = None
    """With `files`: its private key."""
    names: Annotated[tuple[DnsName, ...], Field(max_length=32), Need.RESTART] = ()
    """Further DNS names and addresses in the doors' certificates, such as those of a load balancer; at most 32, and
    1,400 characters together."""
    lifetime_s: Annotated[float, Field(ge=5, le=30 * 86_400), Need.RESTART] = 86_400.0
    """Seconds for which certificates of processes are valid, 5 or more; they are renewed after two thirds of it."""

    @model_validator(mode="after")
    def _files(self) -> "TlsConfig":
        is_named = self.certificate is not None and self.key is not None
        if (self.mode == "files") is not is_named or (self.certificate is None) is not (self.key is None):
            raise ValueError("certificate and key belong to mode: files, which needs both")
        if self.insecure and self.mode != "off":
            raise ValueError("insecure belongs to mode: off")
        for name in self.names:
            if name.lower().rstrip(".").endswith(INTERNAL_SUFFIX):
                raise ValueError(f"names: {name} is a name of processes inside the cluster; leave it out")
        if (num_chars := sum(map(len, self.names))) > _MAX_TLS_NAME_CHARS:
            raise ValueError(f"names: {num_chars} characters together; at most {_MAX_TLS_NAME_CHARS} fit a certificate")
        return self


class PlannerConfig(Section):
    """Pools that follow their load."""

    mode: Annotated[Literal["off", "advise", "act"], Words, Need.RESTART] = "off"
    """`off`: no plans; `advise`: `kvrelay plan` shows plans, nothing is changed; `act`: plans are carried out."""
    interval_s: Annotated[float, Field(ge=0.1, le=3600), Need.RESTART] = 10.0
    """Seconds from plan to plan."""
    window_s: Annotated[float, Field(ge=1, le=120), Need.RESTART] = 10.0
    """Seconds of past requests that each plan counts."""
    attainment: Annotated[float, Field(gt=0, lt=1), Need.RESTART] = 0.9
    """Target for the share of requests that meet both objectives of `slo`, among those that would on an idle
    cluster."""
    min_prefill: Annotated[int, Field(ge=1, le=1024), Need.RESTART] = 1
    """Fewest prefill workers."""
    max_prefill: Annotated[int, Field(ge=1, le=1024), Need.RESTART] = 16
    """Most prefill workers."""
    min_decode: Annotated[int, Field(ge=1, le=1024), Need.RESTART] = 1
    """Fewest decode workers."""
    max_decode: Annotated[int, Field(ge=1, le=1024), Need.RESTART] = 16
    """Most decode workers."""
    max_workers: Annotated[int, Field(ge=2, le=2048), Need.RESTART] = 32
    """Most workers of both pools together; if the load needs more, they are split so as to carry the most requests."""
    max_utilization: Annotated[float, Field(gt=0, lt=1), Need.RESTART] = 0.85
    """Largest share of a prefill worker's time that plans fill."""
    stable_s: Annotated[float, Field(ge=0), Need.RESTART] = 60.0
    """Seconds for which a smaller pool must have been enough before it shrinks; at least what a start and a drain took
    together."""
    cooldown_s: Annotated[float, Field(ge=0), Need.RESTART] = 30.0
    """Seconds after any change in which no pool shrinks."""
    grace_s: Annotated[float, Field(gt=0, le=3600), Need.RESTART] = 30.0
    """Seconds in which a worker that leaves may give its requests away."""
    metrics_port: Annotated[Port | None, Need.RESTART] = None
    """Prometheus port of present and wanted sizes, on `router.host`; 0 picks a free one, `null` turns it off."""

    @model_validator(mode="after")
    def _limits(self) -> "PlannerConfig":
        for pool in ("prefill", "decode"):
            least, most = getattr(self, f"min_{pool}"), getattr(self, f"max_{pool}")
            if least > most:
                raise ValueError(f"min_{pool}: {least} is more than max_{pool}: {most}")
        if self.min_prefill + self.min_decode > self.max_workers:
            raise ValueError(f"max_workers: {self.max_workers} is less than min_prefill and min_decode together")
        return self


class TracingConfig(Section):
    """OpenTelemetry traces of requests; docs/tracing.md."""

    endpoint: Annotated[str | None, Field(pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$"), Need.RESTART] = None
    """Collector that takes traces as OTLP over HTTP, such as `http://127.0.0.1:4318`; every router and worker sends
    its own. `null`: no traces, and none of it is loaded. Needs `pip install 'kvrelay[otel]'`."""
    sample_rate: Annotated[float, Field(ge=0, le=1), Need.ROUTERS] = 0.01
    """Share of the requests that are traced, chosen at the door."""
    client_traces_per_min: Annotated[int, Field(ge=0), Need.ROUTERS] = 60
    """Requests of each tenant that are traced because their client's `traceparent` asks for it; beyond it they are
    chosen like all others. `0`: none."""
