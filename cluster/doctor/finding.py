"""The result of a check."""

import enum
from dataclasses import dataclass


class Health(enum.StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It works, but slowly or unsafely."""
    FAILURE = "failure"
    """It does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """The result of one check."""

    subject: str
    """The thing checked: "model files", "decode-0" …"""
    verdict: Health
    detail: str
    advice: str = ""
    """Advice for an operator; empty if all is well."""


def ok(subject: str, detail: str) -> DoctorFinding:
    """Return a finding without a problem."""
    return DoctorFinding(subject=subject, verdict=Health.OK, detail=detail)


def warning(subject: str, detail: str, advice: str) -> DoctorFinding:
    """Return a finding that should be improved."""
    return DoctorFinding(subject=subject, verdict=Health.WARNING, detail=detail, advice=advice)


def failure(subject: str, detail: str, advice: str) -> DoctorFinding:
    """Return a finding that must be fixed."""
    return DoctorFinding(subject=subject, verdict=Health.FAILURE, detail=detail, advice=advice)
