"""Counters of the runs and messages that this site has answered, kept in its state directory across processes.

A run or message counts before it is answered, so it also counts if its process is killed. The server assigns a run's
number, so it can start new runs at will; only ``runs-per-day`` limits that.
Standard library only, as in policy.py.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .policy import Policy

RUNS = "runs-by-day"  # in the state directory: a line per run, with its day
MESSAGES = "messages"  # in the state directory: a file per run, with a line per message: its kind, its silo
COUNTED = {"train": "max_rounds", "evaluate": "max_evaluations"}  # rule for a kind of message, besides `max_messages`


def count_run(policy: Policy, state: Any, run: str) -> str:
    """Note this run as one of today's; return why it is not allowed, or an empty text. A run counts once."""
    if not policy.runs_per_day:
        return ""
    rule, today = policy.line("runs_per_day"), time.strftime("%Y-%m-%d", time.gmtime())

    def entry(lines: list[list[str]]) -> tuple[str, str]:
        runs = {line[1] for line in lines if len(line) == 2 and line[0] == today}
        if run in runs:
            return "", ""
        if len(runs) >= policy.runs_per_day:
            return "", f"its policy has {rule}, and this is run {len(runs) + 1} of {today}"
        return f"{today} {run}", ""

    return noted(state, RUNS, rule, entry)


def count_message(policy: Policy, state: Any, run: str, silo: str, kind: str) -> str:
    """Note a message of this run to this silo; return why it is not allowed, or an empty text."""
    rules = [COUNTED[kind], "max_messages"] if kind in COUNTED else ["max_messages"]
    limits = {name: limit for name in rules if (limit := getattr(policy, name))}
    if not limits:
        return ""

    def entry(lines: list[list[str]]) -> tuple[str, str]:
        own = [words[0] for words in lines if words[1:] == silo.split()]
        counts = dict.fromkeys(rules, own.count(kind)) | {"max_messages": len(own)}
        for name, limit in limits.items():
            if counts[name] >= limit:
                return ("", f"its policy has {policy.line(name)}, and this is number {counts[name] + 1} of run {run}")
        return f"{kind} {silo}", ""

    return noted(state, f"{MESSAGES}/{run}", policy.line(next(iter(limits))), entry)


def noted(state: Any, name: str, rule: str, entry: Callable[[list[list[str]]], tuple[str, str]]) -> str:
    """Append to a file of the state directory the line that ``entry`` makes from its lines' words: (line, fault).

    Returns the fault, or why nothing can be counted; empty if there is neither.
    """
    if not state:
        return f"its policy has {rule}, and this silo no state-dir to count in"
    path = Path(state) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            text = file.read()
            line, fault = entry([line.split() for line in text.splitlines()])
            if line:
                cut_off = text and not text.endswith("\n")  # by a crash
                file.write("\n" * bool(cut_off) + f"{line}\n")
                file.flush()
                os.fsync(file.fileno())
            return fault
    except OSError as error:
        return f"its policy has {rule}, which cannot be counted: {error.strerror}"
