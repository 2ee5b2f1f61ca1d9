"""The site's own log of everything that left it: a hash chain of lines (`chain.py`), one per message.

    STATE_DIR/audit/audit-000001.jsonl  audit-000002.jsonl ...    a line per message, in JSON
    STATE_DIR/audit/head.json                                     number and hash of the last line

A line is on the disk before its message leaves. If it cannot be written, the message does not leave.

Every line has the SHA-256 of its run's settings (`settings`). The first line of a run in each file also has:

* the settings themselves (`run-config`),
* the values of the applied rules (`rules`),
* the versions of the tools (`versions`).

The next line after a change of one of them has them again. The run's other lines refer to that line (`settings-line`).

Limit: a person with write access here can rewrite the whole log. To detect that, keep the last hash elsewhere:
`silofl audit` prints it, and `--seen HASH` searches for it.

Standard library only: the process that runs the app loads this file (see `private.py`).
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...protocol import chain
from ...protocol.chain import EVERY, Chain, ChainVerdict, canonical, digest
from ...protocol.parsed import SiteError
from .message_rules import OWN_MODEL

LARGEST_SETTINGS = 1 << 18  # bytes of a run's settings; a run with more gets no reply
MOST_RUNS = 16  # runs whose settings' lines are noted; another run's settings are written again
ONCE = ("run-config", "rules", "versions")  # fields that are equal in many lines of a run


class Log(Chain):
    """The log in one folder, for a process that writes to it."""

    kind = "audit"
    required = EVERY.union(
        (
            "silo",
            "asked-by",
            "run-id",
            "run",
            "round",
            "asked",
            "method",
            "app",
            "settings",
            "rule",
            "bytes",
            "sent",
        )
    )

    def __init__(self, folder: Path, record: Mapping[str, Any] | None = None) -> None:
        """``record``: what `head.json` notes of the record that is written together with the log (`../record.py`)."""
        super().__init__(folder)
        self.record = {} if record is None else {"record": record}

    def complete(
        self, entry: Mapping[str, Any], number: int, file: str
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return the entry with its run's settings, or a reference to their line in this file; and the places to note.

        Raises SiteError if a run has more settings than the log allows.
        """
        noted = noted_settings(self.folder)
        lines = noted["lines"] if noted["file"] == file else {}
        if "run-config" in entry:
            if (size := len(canonical(entry["run-config"]))) > LARGEST_SETTINGS:
                raise SiteError(
                    f"the run has {size} bytes of settings, and the log keeps at most {LARGEST_SETTINGS}"
                )
            once = {key: entry[key] for key in ONCE if key in entry}
            run = f"{entry['run-id']} {digest(canonical(once))}"
            if run in lines:
                entry = {k: v for k, v in entry.items() if k not in ONCE} | {
                    "settings-line": lines[run]
                }
            else:
                lines = dict([*lines.items(), (run, number)][-MOST_RUNS:])
        return entry, {"settings": {"file": file, "lines": lines}, **self.record}


def noted_settings(folder: Path) -> dict[str, Any]:
    """Return the file and its lines with the settings of recent runs, from `head.json`; a hint to avoid repetitions."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads((folder / "head.json").read_text())["settings"]
        lines = {str(run): int(line) for run, line in dict(noted["lines"]).items()}
        return {"file": str(noted["file"]), "lines": lines}
    return {"file": "", "lines": {}}


def log_files(folder: Path) -> list[Path]:
    """Return the log's files, the oldest first."""
    return chain.chain_files(folder, Log.kind)


def verify_log(folder: Path, first: int = 1) -> ChainVerdict:
    """Read the log and verify its chain from line `first` on; earlier lines may be kept elsewhere."""
    verdict = Log(folder).verify(first)
    # Otherwise the line with the settings may be the changed or missing one
    if not verdict.faults:
        _check_settings(verdict, first)
    return verdict


def settings_by_line(entries: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the settings of each line's run, by line number. Lines of earlier versions have none."""
    by_line: dict[int, Mapping[str, Any]] = {}
    for entry in entries:
        settings = entry.get("run-config", by_line.get(entry.get("settings-line", 0)))
        if settings is not None and digest(canonical(settings)) == entry["settings"]:
            by_line[entry["line"]] = settings
    return by_line


def _check_settings(verdict: ChainVerdict, first: int) -> None:
    """Check that every line has its run's settings, or refers to a line that has them."""
    known = settings_by_line(verdict.entries)
    for entry in verdict.entries:
        where = entry.get("settings-line", entry["line"] if "run-config" in entry else 0)
        if where >= first and entry["line"] not in known:
            verdict.faults.append(
                f"line {entry['line']}: line {where} does not have the settings of its run"
            )


# --- what a line is ---------------------------------------------------------------------------------------


def kind_of(entry: Mapping[str, Any]) -> str:
    """Return what left with a line: "model" for a training reply, "survey" or "own model"; empty for the rest."""
    action = str(entry.get("asked", ""))
    if any(record["name"] == "error" for record in entry["sent"]):
        return ""
    if action.partition(".")[0] == "train":
        return "model"
    return {"query.survey": "survey", OWN_MODEL: "own model"}.get(action, "")
