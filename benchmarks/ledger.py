"""A private message's time at a hospital's ledger, by its length: `python -m benchmarks.ledger FOLDER`."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from client.protocol.chain import LARGEST, START, chain_line, digest
from client.protocol.policy import Policy
from client.site.budget.accounting import DataFile, MessageCost
from client.site.budget.ledger import Ledger, Release, in_ledger
from client.site.record import DATA_FILE, Record

SIZES, MESSAGES = (100, 10_000, 100_000), 30
COST = MessageCost("record", 200, 0.1, 1.5, 10, 1e-5)


def write_ledger(state: Path, lines: int) -> DataFile:
    """Write a ledger of so many lines, a charge and a reply in turns, 400 lines a run; return its data file.

    The files are there before the record, which takes the lines over as it is opened.
    """
    shutil.rmtree(state, ignore_errors=True)
    shutil.rmtree(state.with_name(f"{state.name}.head"), ignore_errors=True)
    with Record(state).write() as db:
        db.execute(DATA_FILE, ("a", "a", "", 200, None, "", ""))
    (state / "budget").mkdir()
    previous, files = START, [bytearray()]
    for number in range(1, lines + 1):
        run: dict[str, Any] = {
            "time": "2026-01-01T00:00:00Z",
            "silo": "a",
            "run-id": f"{number // 400}",
            "run": "r",
        }
        run |= {"round": number % 200, "message": digest(str((number + 1) // 2).encode())}
        noise = {"noise": 1.5 + number // 400 % 3, "data": "a"}
        charge = {"kind": "charge", **COST.fields, **noise}
        more = charge if number % 2 else {"kind": "sent", "reply": digest(str(number).encode())}
        text, previous = chain_line({"line": number, "previous": previous, **run, **more})
        if len(files[-1]) >= LARGEST:
            files.append(bytearray())
        files[-1] += text + b"\n"
    for number, content in enumerate(files, 1):
        (state / "budget" / f"budget-{number:06d}.jsonl").write_bytes(content)
    (state / "budget" / "head.json").write_text(
        json.dumps({"line": lines, "hash": previous}) + "\n"
    )
    return DataFile("a", "a", "", 200, None, ())


def message_ms(state: Path, data: DataFile) -> float:
    """Return the median milliseconds of a message: its check, its charge, its reply's note, and the run's cost."""
    ledger, seconds = Ledger(state), []
    with ledger.open():
        pass  # verified whole, once
    for number in range(1, MESSAGES + 1):
        release = Release(f"new {number}", "a", "new", "r", number, data, COST)
        start = time.perf_counter()
        ledger.charge(release, Policy(), number - 1)
        in_ledger(state, "new", "a")
        ledger.note_reply(release, f"reply {number}", Policy())
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


if __name__ == "__main__":
    for size in SIZES:
        folder = Path(sys.argv[1]) / f"ledger-{size}"
        print(
            f"{size:>7,} lines: {message_ms(folder, write_ledger(folder, size)):.1f} ms a message",
            flush=True,
        )
        shutil.rmtree(folder)
