"""A submitted run as it goes on: its rounds, a line each, and why it ended."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from partitions.common.errors import NoAnswerError, RunFailedError
from server.deploy.control import Control, FlowerRun
from server.deploy.local.parts import last_lines
from server.deploy.local.record import state_root
from server.deploy.room.queue import INTERRUPTED, NO_HEARTBEAT
from server.results.reading import Tail
from server.results.reasons import merge_reasons

POLL_SECONDS = 0.5


# Time without an answer from the SuperLink: Docker, systemd, or an operator's `silofl up --resume` take less
SILENCE_SECONDS = 600.0


# What a round's line shows
OF_ROUND = {"strategy", "seed", "round", "rounds", "silos", "seconds", "bytes"}


class RunFollower:
    """Reader of the lines that a run adds to `progress.jsonl`; it prints them to stderr."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Skips the lines of the study's earlier runs.
        self.tail = Tail(path, path.stat().st_size if path.exists() else 0)
        self.error = ""
        self.round = 0
        # When the run was submitted, had its turn, and its server app had started
        self.stamps = {"submitted": time.monotonic()}
        self.bar: tqdm[Any] = tqdm(disable=True)  # of the silos within a round, on a terminal

    def read(self) -> None:
        """Print the rounds that were added since the last call."""
        for event in self.tail.events():
            self.within(event)
            self.stamp(event["event"])
            if event["event"] == "round" and event.keys() >= OF_ROUND:
                self.round = event["round"]
                print(round_line(event), file=sys.stderr, flush=True)
            elif event["event"] == "refused":
                print(f"refused: {event['message']}", file=sys.stderr, flush=True)
            elif event["event"] in ("note", "transfer", "stopped"):
                print(event["message"], file=sys.stderr, flush=True)
            elif event["event"] == "error":
                self.error = event["message"]

    def stamp(self, kind: str) -> None:
        """Note when the run had come so far; as its first round begins, print where the time went."""
        if kind in self.stamps or kind not in ("turn", "start", "begin"):
            return
        self.stamps[kind] = time.monotonic()
        if kind == "begin" and self.stamps.keys() >= {"turn", "start"}:
            submitted, turn, started, began = (
                self.stamps[name] for name in ("submitted", "turn", "start", "begin")
            )
            print(
                f"round 1 begins {began - submitted:.1f} s after the run was submitted: "
                f"queue {turn - submitted:.1f} s, start of the server app {started - turn:.1f} s, "
                f"data summaries {began - started:.1f} s",
                file=sys.stderr,
                flush=True,
            )

    def within(self, event: Mapping[str, Any]) -> None:
        """Show how many silos have answered in the round that goes on; every other event takes the bar away."""
        if event["event"] == "reply":
            self.bar.update()
            return
        self.bar.close()
        if event["event"] == "begin" and isinstance(event.get("silos"), dict):
            # disable=None: no bar where stderr is no terminal; delay: none for a short round
            options: dict[str, Any] = {
                "file": sys.stderr,
                "leave": False,
                "disable": None,
                "delay": 1,
                "unit": "silo",
            }
            self.bar = tqdm(
                total=len(event["silos"]), desc=f"round {event.get('number')}", **options
            )


def round_line(event: Mapping[str, Any]) -> str:
    """Return a line on a round: round, silos, mean score, seconds, bytes, rejected or bounded silos with reasons."""
    name = event["score"]
    value = event.get(name)
    score = f"{value:.4f}" if isinstance(value, int | float) else "-"
    line = (
        f"{event['strategy']} seed {event['seed']}  round {event['round']}/{event['rounds']}  "
        f"{event['silos']} silos  {name} {score}  {event['seconds']:.1f} s  {event['bytes'] / 1e6:.1f} MB"
    )
    for key, word in (("rejected", "without"), ("bounded", "bounds")):
        if reasons := "; ".join(merge_reasons(event.get(key, {}).items())):
            line += f"  {word} {reasons}"
    return line


def follow(control: Control, run_id: int, progress: RunFollower, name: str = "") -> None:
    """Wait for the end of a Flower run. Raises RunFailedError with the reason unless it completed.

    Raises NoAnswerError if the server does not answer for ``SILENCE_SECONDS``.
    ``name``: of the run; a part of it has another number once it was interrupted.
    """
    answered = time.monotonic()
    silent, waits, now = False, "", None
    while True:
        progress.read()
        try:
            now = current(control, run_id, name, now)
            if silent:
                print("the server answers again", file=sys.stderr, flush=True)
            run_id, answered, silent = now.run_id, time.monotonic(), False
        except ConnectionError as error:
            if time.monotonic() - answered > SILENCE_SECONDS:
                raise NoAnswerError(
                    f"run {name or run_id} is not followed any more, after round {progress.round}: {error}, for "
                    f"{SILENCE_SECONDS:g} s; it may go on: `silofl runs` lists it, and `silofl watch "
                    f"{progress.path.parent}` follows it"
                ) from None
            if not silent:
                print(
                    f"{error}; waiting for it, up to {SILENCE_SECONDS:g} s: the run may go on",
                    file=sys.stderr,
                    flush=True,
                )
            silent = True
            time.sleep(POLL_SECONDS)
            continue
        if now.finished:
            break
        if not now.status.startswith("pending"):
            progress.stamp("turn")
        if now.details != waits and (waits := now.details):
            print(f"waits: {waits} in the queue", file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)
    progress.read()
    if now.status == "finished:completed":
        return
    if now.status == "finished:stopped":
        raise RunFailedError(
            f"run {name or run_id} was stopped after round {progress.round}; "
            f"continue with {resume_command(progress.path.parent)}"
        )
    raise RunFailedError(
        f"run {name or run_id} failed after round {progress.round}: "
        f"{reason_of(control, run_id, progress, now.details)}"
    )


def current(control: Control, run_id: int, name: str, before: FlowerRun | None) -> FlowerRun:
    """Return a Flower run as it is, or the one that goes on with what it began. ``before``: at the last look.

    Raises ConnectionError.
    """
    try:
        run = control.run(run_id)
        if not run.finished or run.status == "finished:completed":
            return run
    except ConnectionError:
        if before is None:
            raise
        run = before
    for other in control.runs():
        same = all(other.settings.get(k) == run.settings.get(k) for k in ("strategy", "seed"))
        if same and other.name == name != "" and other.details != INTERRUPTED:
            return other
    if run is before:
        raise ConnectionError(
            f"the server has no run {name or run_id}: `silofl up --resume` goes on with it"
        )
    return run


def reason_of(control: Control, run_id: int, progress: RunFollower, details: str) -> str:
    """Return why a run failed: the server app's error, else Flower's details, else the end of the log."""
    if progress.error:
        return plain_reason(progress.error)
    lines: list[str] = []
    with contextlib.suppress(ConnectionError):
        lines = [line.strip() for line in control.log(run_id).splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
    if errors and errors[-1].partition(": ")[2] not in details:
        details = f"{details} ({errors[-1]})"
    if details in (NO_HEARTBEAT, INTERRUPTED):
        details = "the server app ended without a word (killed, or out of memory: give the server more)"
        details += "; `silofl up --resume` goes on with the run"
    if not details and lines:
        details = lines[-1]
    log = state_root() / control.connection.name / "logs" / "superlink.log"
    if not details and log.exists():
        details = " | ".join(last_lines(log, 3))
    return plain_reason(details) or "the SuperLink gives no reason"


def resume_command(out: Path) -> str:
    """Return the command that continues the run in a directory."""
    return f"silofl run --config {out / 'config.toml'} --out {out} --set resume=true"


def plain_reason(reason: str) -> str:
    """Return a reason in one line, with Flower's `<class 'a.B'>:<'text'>` replaced by `B: text`."""
    text = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*?)'>", r"\1: \2", reason, flags=re.DOTALL)
    return " ".join(text.split())
