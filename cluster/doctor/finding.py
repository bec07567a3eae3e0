"""What a check found."""

import enum
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How it looks."""

    OK = "ok"
    WARNING = "warning"
    """It works, but slower or less safely than it could."""
    FAILURE = "failure"
    """It will not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One checked thing."""

    subject: str
    """What was looked at: "model files", "decode-0" …"""
    verdict: Verdict
    detail: str
    """What was seen."""
    advice: str = ""
    """What to do; empty when all is well."""


def ok(subject: str, detail: str) -> Finding:
    """Return that all is well."""
    return Finding(subject=subject, verdict=Verdict.OK, detail=detail)


def warning(subject: str, detail: str, advice: str) -> Finding:
    """Return something that could be better."""
    return Finding(subject=subject, verdict=Verdict.WARNING, detail=detail, advice=advice)


def failure(subject: str, detail: str, advice: str) -> Finding:
    """Return something that has to be mended."""
    return Finding(subject=subject, verdict=Verdict.FAILURE, detail=detail, advice=advice)
