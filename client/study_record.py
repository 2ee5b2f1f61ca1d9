"""`silofl audit --study`: what left a hospital in a study, from its audit log, as a page and as signed JSON.

It is for a committee, at the end of a study. Everything is read from the approved study and the log, whose chain is
verified first; the server's receipts show how much of the log a second party has countersigned. The file is signed with
the silo's node key (ECDSA P-384 with SHA-384), whose fingerprint the consortium has from the registration.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from client.protocol.chain import utc_now
from client.protocol.envelope import RECORD, fingerprint, public_pem, seal, unseal
from client.protocol.keys import load_key, own_key
from client.protocol.node import Site
from client.protocol.parsed import SiteError
from client.site.counts import count_used_up
from client.site.study import approvals
from client.site.trust.audit import settings_by_line
from client.site.trust.audit_page import (
    cause,
    describe_run,
    receipt_text,
    with_receipts,
    withheld_text,
)
from partitions.common.errors import DataError, UserError
from partitions.common.files import write_atomically
from partitions.common.output import text_page

Entry = Mapping[str, Any]


# Of a decision: its keys in the record, and in the log
DECISION = {"what": "asked", "by": "asked-by", "when": "time", "warnings": "warnings"}


def _errors(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how often each cause of an error was sent."""
    sent = (record for entry in entries for record in entry["sent"])
    return dict(Counter(cause(record["text"]) for record in sent if record["name"] == "error"))


def study_record(
    folder: Path, name: str, first: int = 1, receipts: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return the record of a study in a log, from line ``first`` on. ``receipts``: the server's own copies, if any.

    Raises UserError if the log has no line of the study.
    """
    verdict, checked = with_receipts(folder, first, receipts)
    entries, settings = verdict.entries, settings_by_line(verdict.entries)
    of_study = [entry for entry in entries if entry.get("study", {}).get("name") == name]
    if not of_study:
        raise UserError(
            f"the audit log in {folder} has nothing of a study {name!r}; `silofl studies` lists them"
        )
    decided = [entry for entry in of_study if "warnings" in entry]
    left = [entry for entry in of_study if "warnings" not in entry]
    outside = [
        e
        for e in entries
        if "study" not in e and settings.get(e["line"], {}).get("study") == name
    ]
    return {
        "made": utc_now(),
        "study": name,
        "silos": sorted({entry["silo"] for entry in of_study}),
        "protocols": sorted(
            {entry["study"]["digest"] for entry in of_study if entry["study"]["digest"]}
        ),
        **_of_approval(folder.parent, name),
        "decisions": [
            {key: entry[field] for key, field in DECISION.items()} for entry in decided
        ],
        "runs": _runs(left, settings),
        "messages": len(left),
        "bytes": sum(entry["bytes"] for entry in left),
        "errors": _errors([*left, *outside]),
        "withheld": withheld_text(left),
        "data": sorted({entry["cohort"] for entry in left if entry.get("cohort")}),
        "apps": sorted({entry["app"] for entry in left}),
        "policies": list(_policies(left, entries)),
        "budget": left[-1].get("budget", {}).get("after", {}) if left else {},
        "log": {
            "lines": [entries[i]["line"] for i in (0, -1)],
            "hash": entries[-1]["hash"],
            "faults": verdict.faults,
            "notes": verdict.notes,
        },
        "receipts": asdict(checked),
        "receipts-noted": receipt_text(left),
    }


def _of_approval(state: Path, name: str) -> dict[str, Any]:
    """Return the approved study and the use of its limits; empty if it is not stored beside this log."""
    approved = approvals.find(state, name)
    if approved is None:
        return {}
    study = approved.study
    return {
        "purpose": study.purpose,
        "contact": study.contact,
        "from": study.start.isoformat(),
        "to": study.end.isoformat(),
        "signed-by": approved.signer,
        "revoked": approved.revoked,
        "limits": dict(study.limits),
        "used": count_used_up(state, study),
    }


def _runs(
    left: Sequence[Entry], settings: Mapping[int, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    runs: dict[tuple[str, str], list[Entry]] = {}
    for entry in left:
        runs.setdefault((entry["run-id"], entry["settings"]), []).append(entry)
    return [describe_run(sent, settings) for sent in runs.values()]


def _policies(left: Iterable[Entry], entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """Yield the policies, rules and versions under which messages left, each once, with its first line."""
    by_line, seen = {entry["line"]: entry for entry in entries}, list[dict[str, Any]]()
    for entry in left:
        whole = by_line.get(entry.get("settings-line", entry["line"]), entry)
        rules = {"policy": entry.get("policy", "")} | {
            key: whole.get(key, {}) for key in ("rules", "versions")
        }
        if rules not in seen:
            seen.append(rules)
            yield {"from-line": entry["line"], **rules}


# --- as a page --------------------------------------------------------------------------------------------------------


PAGE = """\
Study {{ study }} at {{ silos|join(", ") }}, {{ made }}
{% for key in ("purpose", "contact") if record[key] is defined %}
  {{ "%-10s %s"|format(key, record[key]) }}
{% endfor %}
{% for digest in protocols %}
  protocol   SHA-256 {{ digest }}
{% endfor %}

Decisions
{% for one in decisions %}
  {{ one.when }}  {{ one.what }}, by {{ one.by }}
{% for warning in one.warnings %}
{{ warning|wrap("    ! ") }}
{% endfor %}
{% endfor %}

What left: {{ "{:,} messages, {:,} bytes".format(messages, bytes) }}
{% for run in runs %}
  {{ run.run or "a run without a name" }} ({{ run.method }}; run {{ run["run-id"] }})
{%- if run.rounds %}, rounds {{ run.rounds[0] }} to {{ run.rounds[-1] }}{% endif +%}
    asked by {{ run["asked-by"]|join(", ") }}, {{ run["from"] }} to {{ run.to }}
{% for what, one in run.left.items() %}
{{ (one.count ~ " x " ~ what ~ ", " ~ one.bytes ~ " bytes")|wrap("    ") }}
{% endfor %}
{% endfor %}
{% if errors %}

What was refused or failed
{% for text, count in errors.items() %}
{{ (count ~ " x " ~ text)|wrap("  ") }}
{% endfor %}
{% endif %}

What the rules held back
{{ (withheld or "nothing that the app reported")|wrap("  ") }}

{{ "Used of the study's limits" if limits is defined else "Limits: the study's file is not here" }}
{% for name, most in (limits|default({})).items() %}
  {{ "{:<12} {:,} of {:,}".format(name, used[name], most) }}
{% endfor %}
{% for name, value in budget.items() if name not in limits|default({}) %}
  {{ "{:<12} {:g}".format(name, value) }}
{% endfor %}

From which data, by which software, under which policy
{% for one in data %}
  data file  SHA-256 {{ one }}
{% endfor %}
{% for one in apps %}
  app        SHA-256 {{ one }}, as it was shipped
{% endfor %}
{% for one in policies %}
  policy     {{ one.policy or "no file" }}, from line {{ one["from-line"] }}
{% set rules %}{% for key, value in one.rules.items() %}
{{ key }} = {{ value|json }}{{ ", " if not loop.last }}
{%- endfor %}{% endset %}
{{ rules|wrap("             ") }}
{% set versions %}{% for name, version in one.versions.items() %}
{{ name }} {{ version }}{{ ", " if not loop.last }}
{%- endfor %}{% endset %}
{{ versions|wrap("             ") }}
{% endfor %}

{% for fault in log.faults|list + receipts.faults|list %}
FAIL  {{ fault }}
{% else %}
ok    the audit log is whole, lines {{ log.lines[0] }} to {{ log.lines[1] }}
{% endfor %}
{% if receipts.count %}
ok    {{ receipts.count }} receipts of the server, up to line {{ receipts.line }}: {{ receipts["keys"][0] }}
{% else %}
note  no receipt of the server: only this hospital vouches for the log
{% endif %}
{% if record["receipts-noted"] %}
note  in its messages: {{ record["receipts-noted"] }}
{% endif %}
last  {{ log.hash }}"""


def record_page(record: Mapping[str, Any]) -> str:
    """Return the record as a page for a committee."""
    return text_page(PAGE, record=record, **record)


# --- as a signed file -------------------------------------------------------------------------------------------------


def key_file(folder: Path, named: Path | None) -> Path:
    """Return the file of the silo's private key: the given one, this container's, or the joined silo's.

    Raises UserError if there is none.
    """
    if named is not None:
        return named
    if os.environ.get("SILOFL_NAME"):
        return Path(Site.from_environment(os.environ).node_key)
    node_key = own_key(folder.parent.parent)
    if not node_key.is_file():
        raise UserError(
            f"there is no {node_key} to sign with: name the silo's private key with --sign-with FILE"
        )
    return node_key


def export(record: Mapping[str, Any], file: Path, key: Path) -> str:
    """Write the record, signed; return the fingerprint of the key. Raises UserError or OSError."""
    private = load_key(key)
    write_atomically(file, seal(RECORD, "record", record, private, indent=1) + "\n", mode=0o600)
    return fingerprint(public_pem(private))


def read_export(file: Path) -> tuple[dict[str, Any], str]:
    """Return the record in a signed file, and its signer's fingerprint. Raises DataError if it was changed."""
    try:
        return unseal(RECORD, "record", file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        what = error if isinstance(error, SiteError) else "it is no text"
        raise DataError(f"{file}: {what}; ask the hospital for the file again") from None


def show_export(file: Path, echo: Callable[[str], object]) -> list[str]:
    """Print a signed record and its signer; return the faults of its log."""
    record, signer = read_export(file)
    echo(record_page(record))
    echo(f"ok    signed by {signer}: compare it with the silo's fingerprint at the consortium")
    return [*record["log"]["faults"], *record["receipts"]["faults"]]
