"""`silofl audit`: a site's log of what left it, as a page per month, and the check that the log is complete."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from client.protocol.chain import ChainVerdict
from client.protocol.methods import DEFAULTS
from client.protocol.receipts import FILE, read_kept
from client.site.trust.audit import log_files, settings_by_line, verify_log
from client.site.trust.bundle import find_state
from client.site.trust.receipts import ReceiptCheck, compare_receipts, known_key
from partitions.common.errors import UserError
from partitions.common.output import text_page

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


PAGE = """\
{{ silos }}, {{ month }}: {{ runs|length }} runs, {{ left|length }} messages, {{ left|sum("bytes") }} bytes left
{% for e in decided %}
{{ e.asked }}: {{ e.run }}, by {{ e["asked-by"] }}, {{ e.time }}, {{ e.warnings|length }} warnings
{% endfor %}
{% for sent, run, shown in runs %}

{{ run.run or "a run without a name" }} ({{ run.method or "no method" }}; run {{ run["run-id"] }})
  asked by  {{ run["asked-by"][0] }}, {{ run["from"] }} to {{ run.to }}
  with      app {{ sent[0].app }}, settings {{ run["settings-sha256"][:16] }}
{% set words %}{% for key, value in shown.items() %}
{{ key }} = {{ value|json }}{{ ", " if not loop.last }}
{%- endfor %}{% endset %}
{{ words|wrap(" " * 12) }}
{% if run.settings|length > shown|length %}
            {{ run.settings|length - shown|length }} more settings are silofl's defaults (--all-settings)
{% endif %}
{% for cohort in sent|selectattr("cohort", "defined")|map(attribute="cohort")|select|unique|sort %}
  from      data file with SHA-256 {{ cohort[:16] }}
{% endfor %}
  let by    {{ sent|map(attribute="rule")|unique(true)|sort(case_sensitive=true)|join("; ") }}
{% for study in sent|selectattr("study", "defined")|map(attribute="study")|unique(true, "digest")
  |sort(case_sensitive=true, attribute="name,digest") %}
  study     {{ study.name }} ({{ study.digest[:16] }})
{% endfor %}
{{ withheld_text(sent)|wrap("  withheld  ") }}
{{ masked_text(sent)|wrap("  masked    ") }}
  left      {{ sent|length }} messages, {{ run.bytes }} bytes
{%- if run.rounds %}, rounds {{ run.rounds[0] }} to {{ run.rounds[1] }}{% endif +%}
{{ receipt_text(sent)|wrap("  receipts  ") }}
{% for what, records in run.left.items() %}
            {{ "%5d"|format(records.count) }} x {{ what }}, {{ records.bytes }} bytes
{% endfor %}
{% endfor %}
{% if others %}

other months: {{ others|join(", ") }} (--month)
{% endif %}"""


def page(entries: Sequence[Entry], month: str, *, all_settings: bool = False) -> str:
    """Return the page of what left in a month, run by run: sender, content, times, number of messages, bytes.

    A run's settings are those other than the defaults, or all, as the server sent them.
    """
    settings = settings_by_line(entries)
    of_month = [entry for entry in entries if entry["time"].startswith(month)]
    left = [entry for entry in of_month if "warnings" not in entry]
    by_run: dict[tuple[str, ...], list[Entry]] = {}
    for entry in left:
        # Not by the run's name, which is not known yet when the data summary is sent
        by_run.setdefault(tuple(entry[key] for key in OF_RUN), []).append(entry)
    runs = []
    for sent in by_run.values():
        run = describe_run(sent, settings)
        shown = {
            key: value
            for key, value in run["settings"].items()
            if all_settings or key not in DEFAULTS or value != DEFAULTS[key]
        }
        runs.append((sent, run, shown))
    return text_page(
        PAGE,
        silos=", ".join(sorted({entry["silo"] for entry in left})) or "this silo",
        month=month,
        runs=runs,
        left=left,
        # This site's decisions about studies
        decided=[entry for entry in of_month if "warnings" in entry],
        withheld_text=withheld_text,
        masked_text=masked_text,
        receipt_text=receipt_text,
        others=sorted({entry["time"][:7] for entry in entries} - {month}),
    ).rstrip("\n")


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


def with_receipts(
    folder: Path, first: int = 1, others: Sequence[Path] = ()
) -> tuple[ChainVerdict, ReceiptCheck]:
    """Verify a log, and compare the receipts kept by the site, and the server's own files of receipts, with it.

    Raises UserError for a file that cannot be read.
    """
    texts = read_kept(folder / FILE)  # before the log: another process may go on meanwhile
    for path in others:
        if not path.is_file():
            raise UserError(
                f"--receipts {path}: there is no such file; the server has runs/NAME/{FILE}"
            )
        texts += read_kept(path)
    verdict = verify_log(folder, first)
    silos = {entry["silo"] for entry in verdict.entries}
    return verdict, compare_receipts(
        dict.fromkeys(texts),
        verdict.entries,
        lambda receipt: receipt.silo in silos or not silos,
        known_key(folder),
    )


CHAIN = """\
{% for fault in verdict.faults %}
FAIL  {{ fault }}
{% endfor %}
{% for note in verdict.notes %}
note  {{ note }}
{% endfor %}
{% set entries = verdict.entries %}
{% if not verdict.faults %}
ok    lines {{ entries[0].line }} to {{ entries[-1].line }} in {{ files }} files: none changed, missing or moved
{% endif %}
{% if checked.count %}
ok    {{ checked.count }} receipts of the server, up to line {{ checked.line }}, by {{ checked.keys|join(", ") }}
{% endif %}
{% if entries %}
last  {{ entries[-1].hash }}  (keep it elsewhere; --seen looks for it)
{% endif %}"""


def chain(verdict: ChainVerdict, checked: ReceiptCheck, folder: Path, seen: str) -> str:
    """Return the chain's faults and notes, a line each, and its last hash, which should be kept elsewhere.

    Adds a fault if the hash in ``seen`` is not in the log, and those of the server's receipts.
    """
    verdict.faults += checked.faults
    if seen and not any(entry["hash"].startswith(seen) for entry in verdict.entries):
        verdict.faults.append(
            f"no line has the hash {seen}, which was seen before: lines were taken out or written anew"
        )
    files = len(log_files(folder))
    return text_page(CHAIN, verdict=verdict, checked=checked, files=files).rstrip("\n")


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
    verdict, checked = with_receipts(folder, first, others)
    months = sorted({entry["time"][:7] for entry in verdict.entries})
    shown = page(
        verdict.entries,
        month or (months[-1] if months else "no month"),
        all_settings=all_settings,
    )
    return f"{shown}\n\n{chain(verdict, checked, folder, seen)}", verdict.faults
