"""A study's file with no settings of its own, for tests that are of something else than its text."""

from __future__ import annotations

TEXT = """\
kind = "silofl study 1"
name = "heart"
purpose = "{purpose}"
contact = "{contact}"
results = "r"
retention = "t"
start = 2026-01-01
end = 2099-12-31
apps = ["{app}"]
participants = {participants}
step = {step}
metrics = [{metrics}]
[settings]
[limits]
runs = {runs}
rounds = 9
evaluations = 9
messages = 99
bytes = {bytes}
days = {days}
"""
ORDINARY = {
    "purpose": "p",
    "contact": "c",
    "app": "0" * 64,
    "participants": 3,
    "step": 1.0,
    "metrics": '"loss"',
}
LIMITS = {"runs": 3, "bytes": 100_000, "days": 3}


def study_text(**changes: object) -> str:
    """The text with other words or numbers by name."""
    assert changes.keys() <= ORDINARY.keys() | LIMITS.keys()
    return TEXT.format(**{**ORDINARY, **LIMITS, **changes})


# Of a draft
TEXTS = dict.fromkeys(("purpose", "contact", "results", "retention"), "a text")
