"""`silofl audit`: a site's log of what left it, as a page per month, and the check that the log is complete."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from client.protocol.chain import ChainVerdict
from client.protocol.methods import DEFAULTS
from client.protocol.receipts import FILE, read_kept
from client.site.trust.audit import log_files, settings_by_line, verify_log
from client.site.trust.bundle import find_state
from client.site.trust.receipts import ReceiptCheck, compare_receipts, known_key
from partitions.common.errors import UserError
from partitions.common.names import escape
from partitions.common.output import wrap

Entry = Mapping[str, Any]
OF_RUN = ("run-id", "method", "asked-by", "app", "settings")  # equal in all lines of a run


def find_log(where: Path | None) -> Path:
    """Return the log's folder, given it, a state directory or a bundle; None: the container's or machine's only one.

    Raises UserError, one line, if there is none.
    """
    where = find_state(where)
    folder = where / "audit" if (where / "audit").is_dir() else where
    if not log_files(folder):
        raise UserError(
            f"there is no audit log in {where}: nothing has left from there, or it is another directory"
        )
    return folder


def page(entries: Sequence[Entry], month: str, *, all_settings: bool = False) -> str:
    """Return the page of what left in a month, run by run: sender, content, times, number of messages, bytes.

    The server chose some of the texts, so terminal control characters are escaped.
    """
    settings = settings_by_line(entries)
    of_month = [entry for entry in entries if entry["time"].startswith(month)]
    # This site's decisions about studies
    decided = [entry for entry in of_month if "warnings" in entry]
    of_month = [entry for entry in of_month if "warnings" not in entry]
    runs: dict[tuple[str, ...], list[Entry]] = {}
    for entry in of_month:
        # Not by the run's name, which is not known yet when the data summary is sent
        runs.setdefault(tuple(entry[key] for key in OF_RUN), []).append(entry)
    silos = ", ".join(sorted({entry["silo"] for entry in of_month})) or "this silo"
    total = sum(entry["bytes"] for entry in of_month)
    lines = [
        f"{silos}, {month}: {len(runs)} runs, {len(of_month)} messages, {total} bytes left"
    ]
    lines += [
        f"{e['asked']}: {e['run']}, by {e['asked-by']}, {e['time']}, {len(e['warnings'])} warnings"
        for e in decided
    ]
    for sent in runs.values():
        lines += ["", *run_lines(sent, describe_run(sent, settings), all_settings)]
    others = sorted({entry["time"][:7] for entry in entries} - {month})
    if others:
        lines += ["", f"other months: {', '.join(others)} (--month)"]
    return "\n".join(map(escape, lines))


def describe_run(
    sent: Sequence[Entry], settings: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what the lines of one run tell of it. ``settings``: by line (`settings_by_line`)."""
    rounds = sorted({entry["round"] for entry in sent if entry["round"]})
    return {
        "run": next((entry["run"] for entry in sent if entry["run"]), ""),
        "run-id": sent[0]["run-id"],
        "method": sent[0]["method"],
        "asked-by": sorted({entry["asked-by"] for entry in sent}),
        "from": sent[0]["time"],
        "to": sent[-1]["time"],
        "rounds": [rounds[0], rounds[-1]] if rounds else [],
        "messages": dict(Counter(entry["asked"] for entry in sent)),
        "bytes": sum(entry["bytes"] for entry in sent),
        "left": kinds(sent),
        "settings": next(
            (dict(settings[e["line"]]) for e in sent if e["line"] in settings), {}
        ),
        "settings-sha256": sent[0]["settings"],
    }


def run_lines(
    sent: Sequence[Entry], run: Mapping[str, Any], all_settings: bool
) -> Iterator[str]:
    """Yield the lines of one run, with its settings as the server sent them: all, or those other than the defaults."""
    settings, rounds = run["settings"], run["rounds"]
    span = f", rounds {rounds[0]} to {rounds[1]}" if rounds else ""
    yield f"{run['run'] or 'a run without a name'} ({run['method'] or 'no method'}; run {run['run-id']})"
    yield f"  asked by  {run['asked-by'][0]}, {run['from']} to {run['to']}"
    yield f"  with      app {sent[0]['app']}, settings {run['settings-sha256'][:16]}"
    shown = {
        k: v
        for k, v in settings.items()
        if all_settings or k not in DEFAULTS or v != DEFAULTS[k]
    }
    yield from wrap(", ".join(f"{k} = {json.dumps(v)}" for k, v in shown.items()), " " * 12)
    if same := len(settings) - len(shown):
        yield f"            {same} more settings are silofl's defaults (--all-settings)"
    for cohort in sorted({entry["cohort"] for entry in sent if entry.get("cohort")}):
        yield f"  from      data file with SHA-256 {cohort[:16]}"
    yield f"  let by    {'; '.join(sorted({entry['rule'] for entry in sent}))}"
    for name, digest in sorted(
        {(e["study"]["name"], e["study"]["digest"]) for e in sent if "study" in e}
    ):
        yield f"  study     {name} ({digest[:16]})"
    yield from wrap(withheld_text(sent), "  withheld  ")
    yield from wrap(masked_text(sent), "  masked    ")
    yield f"  left      {len(sent)} messages, {run['bytes']} bytes{span}"
    yield from wrap(receipt_text(sent), "  receipts  ")
    for what, records in run["left"].items():
        yield f"            {records['count']:5} x {what}, {records['bytes']} bytes"


def masked_text(sent: Iterable[Entry]) -> str:
    """Return in how many rounds vectors left under masks, over how many silos, repeated how often, and who was gone."""
    notes = [entry["secure"] for entry in sent if entry.get("secure")]
    uploads = [note for note in notes if "silos" in note]
    sums = [note for note in notes if "survivors" in note]
    if not uploads:
        return ""
    rounds, counts = {note["round"] for note in uploads}, {note["survivors"] for note in sums}
    again = {note["round"] for note in uploads if note["attempt"] > 1}
    ends = dict.fromkeys(map(str, (min(counts, default=0), max(counts, default=0))))
    over = f" over {' to '.join(ends)} silos" if counts else ""
    text = f"{len(rounds)} rounds, {len(sums)} sums{over}; {len(again)} repeated"
    gone = [f"{name} in round {note['round']}" for note in sums for name in note["gone"]]
    bad = {name for note in uploads for name in note.get("unreadable", ())}
    return "; ".join(
        [
            text,
            *([f"gone: {', '.join(gone)}"] if gone else []),
            *([f"no share that opens of {', '.join(sorted(bad))}"] if bad else []),
        ]
    )


def receipt_text(sent: Iterable[Entry]) -> str:
    """Return up to which line the server had signed when it sent its last message, and earlier faults."""
    entries = [entry["receipt"] for entry in sent if entry.get("receipt")]
    faults = dict.fromkeys(receipt["fault"] for receipt in entries if "fault" in receipt)
    lines = [receipt["line"] for receipt in entries if "line" in receipt]
    return "; ".join([*([f"of the server, up to line {max(lines)}"] if lines else []), *faults])


def withheld_text(sent: Iterable[Entry]) -> str:
    """Return what the rules withheld, by rule, as the app reported it; empty: nothing, or the app does not report."""
    by_rule: dict[str, set[str]] = {}
    for entry in sent:
        for rule, items in entry.get("withheld", {}).items():
            by_rule.setdefault(rule, set()).update(items)
    return "; ".join(
        f"{', '.join(sorted(items))} ({rule})" for rule, items in sorted(by_rule.items())
    )


def kinds(sent: Iterable[Entry]) -> dict[str, dict[str, int]]:
    """Count the records of each kind that left, and their bytes."""
    counts, sizes = Counter[str](), Counter[str]()
    for entry in sent:
        for record in entry["sent"]:
            what = record["name"]
            if "shape" in record:
                what = f"{what} {record['dtype']} {tuple(record['shape'])}"
            elif "keys" in record:
                what = f"{what}: {', '.join(record['keys'])}"
            elif "text" in record:
                what = f"{what}: {' '.join(cause(record['text']).split())}"
            counts[what] += 1
            sizes[what] += record["bytes"]
    return {what: {"count": counts[what], "bytes": sizes[what]} for what in counts}


def cause(error: str) -> str:
    """Return the text of a reply's error without the class name that Flower puts around it."""
    return re.sub(r"^<class '[\w.]+'>:<'(.*)'>$", r"\1", error, flags=re.DOTALL)


def check_receipts(
    verdict: ChainVerdict, folder: Path, others: Sequence[Path] = ()
) -> ReceiptCheck:
    """Compare the receipts kept by the site, and the server's own files of receipts, with the log.

    Raises UserError for a file that cannot be read.
    """
    texts = read_kept(folder / FILE)
    for path in others:
        if not path.is_file():
            raise UserError(
                f"--receipts {path}: there is no such file; the server has runs/NAME/{FILE}"
            )
        texts += read_kept(path)
    silos = {entry["silo"] for entry in verdict.entries}
    key = known_key(folder)
    return compare_receipts(
        dict.fromkeys(texts),
        verdict.entries,
        lambda receipt: receipt.silo in silos or not silos,
        key,
    )


def chain(verdict: ChainVerdict, folder: Path, seen: str, others: Sequence[Path] = ()) -> str:
    """Return the chain's faults and notes, a line each, and its last hash, which should be kept elsewhere.

    Adds a fault if the hash in ``seen`` is not in the log, or if the server's receipts (``others``: its own files) do
    not match it.
    """
    checked = check_receipts(verdict, folder, others)
    verdict.faults += checked.faults
    hashes = [entry["hash"] for entry in verdict.entries]
    if seen and not any(line_hash.startswith(seen) for line_hash in hashes):
        verdict.faults.append(
            f"no line has the hash {seen}, which was seen before: lines were taken out or written anew"
        )
    lines = [f"FAIL  {fault}" for fault in verdict.faults] + [
        f"note  {note}" for note in verdict.notes
    ]
    if not verdict.faults:
        first, last = (verdict.entries[i]["line"] for i in (0, -1))
        lines.append(
            f"ok    lines {first} to {last} in {len(log_files(folder))} files: none changed, missing or moved"
        )
    if checked.count:
        lines.append(
            f"ok    {checked.count} receipts of the server, up to line {checked.line}, by {', '.join(checked.keys)}"
        )
    if hashes:
        lines.append(f"last  {hashes[-1]}  (keep it elsewhere; --seen looks for it)")
    return "\n".join(lines)


def audit(
    where: Path | None,
    month: str,
    seen: str,
    first: int,
    others: Sequence[Path] = (),
    *,
    all_settings: bool = False,
) -> tuple[str, list[str]]:
    """Return the page and the chain as text, and the faults. ``others``: the server's files of receipts."""
    folder = find_log(where)
    verdict = verify_log(folder, first)
    months = sorted({entry["time"][:7] for entry in verdict.entries})
    shown = page(
        verdict.entries,
        month or (months[-1] if months else "no month"),
        all_settings=all_settings,
    )
    return f"{shown}\n\n{chain(verdict, folder, seen, others)}", verdict.faults
