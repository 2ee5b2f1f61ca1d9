"""`silofl budget STATE_DIR`: the cost of differential privacy for the people in a site's data, and what is left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from client.protocol.chain import read_head
from client.protocol.policy import Policy
from client.protocol.run_settings import is_private
from client.site.budget.accounting import DataFile, epsilon_of, label, load_data_file
from client.site.budget.ledger import (
    Ledger,
    Line,
    charges,
    cohort_of,
    delta_of,
    pending_lines,
    spent_of,
)
from client.site.record import Record
from client.site.trust.audit import settings_by_line, verify_log
from partitions.common.output import text_page


def budgets(state: Path, policy: Policy) -> list[dict[str, Any]]:
    """Return each cohort of a state directory with what it has spent. Raises SiteError if the ledger is damaged."""
    of_cohorts = list[dict[str, Any]]()
    with Record(state).reading() as db:
        known = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'pending'").fetchone()
        # First: another process writes them into the files, and forgets them
        pending = pending_lines(db, 0) if known else []
        lines = [*Ledger(state).lines()]
        lines += [json.loads(text) for number, _, text in pending if number > len(lines)]
        left = {
            name: load_data_file(db, name) for name in {line["data"] for line in charges(lines)}
        }
    while left:
        versions = cohort_of(left[min(left)], left)
        of_cohorts.append(
            budget_of(state, policy, lines, [left[name] for name in sorted(versions)])
        )
        left = {name: file for name, file in left.items() if name not in versions}
    return sorted(of_cohorts, key=lambda cohort: str(cohort["cohort"]))


def budget_of(
    state: Path, policy: Policy, lines: Sequence[Line], files: Sequence[DataFile]
) -> dict[str, Any]:
    """Return one cohort's budget: what it has spent, run by run, and what no epsilon covers."""
    versions = [file.sha256 for file in files]
    charged = [line for line in charges(lines) if line["data"] in versions]
    delta = delta_of(charged, policy)
    runs: dict[tuple[str, str], list[Line]] = {}
    for line in charged:
        runs.setdefault((line["run-id"], line["run"]), []).append(line)
    spent, budget = spent_of(charged, delta), policy.epsilon or None
    return {
        "cohort": label(files),
        "unit": "record" if any(line["unit"] == "record" for line in charged) else "patient",
        "delta": delta,
        "spent": spent,
        "budget": budget,
        "left": None if budget is None else max(budget - spent, 0.0),
        "runs": [
            {
                "run": run or run_id,
                "epsilon": epsilon_of(of_run, delta),
                "steps": sum(line["steps"] for line in of_run),
            }
            for (run_id, run), of_run in runs.items()
        ],
        "data": versions,
        "uncovered": find_uncovered(state, versions),
    }


def find_uncovered(state: Path, versions: Sequence[str]) -> list[str]:
    """Return the runs that got something of these data without differential privacy, as far as the log goes back."""
    entries = verify_log(state / "audit").entries
    settings = settings_by_line(entries)
    runs = (
        entry["run"] or entry["run-id"]
        for entry in entries
        if entry.get("cohort") in versions
        and any(map(is_of_records, entry["sent"]))
        and not is_private(settings.get(entry["line"], {}))
    )
    return list(dict.fromkeys(runs))


def is_of_records(sent: Mapping[str, Any]) -> bool:
    """Return whether a record of a reply is computed from patients: a vector, metrics, evidence, sums, a survey."""
    keys = {key for key in sent.get("keys", ()) if not key.startswith("seconds.")}
    if sent["name"] == "survey":
        return True
    return (
        "shape" in sent
        or (sent["name"] == "metrics" and bool(keys))
        or not keys.isdisjoint({"sum", "square_sum"})
    )


PAGE = """\
{% for cohort in cohorts %}
{{ cohort.cohort }}: epsilon of a {{ cohort.unit }}, at delta {{ "%.2g"|format(cohort.delta) }}
  spent  {{ "%.3f"|format(cohort.spent) }}  {{ "no budget (rule epsilon)" if cohort.budget is none
  else "of %g, left %.3f"|format(cohort.budget, cohort.left) }}
{% for run in cohort.runs %}
         {{ "%.3f"|format(run.epsilon) }}  {{ run.run }}, {{ run.steps }} steps
{% endfor %}
{% for run in cohort.uncovered|default([]) %}
         none   {{ run }}: without differential privacy, so no epsilon bounds what it shows
{% endfor %}
{% for sha256 in cohort.data|default([]) %}
  from   data file with SHA-256 {{ sha256[:16] }}
{% endfor %}

{% else %}
{{ without }}

{% endfor %}
{% if head %}
ok    {{ head[0] }} lines: none changed, missing or moved
last  {{ head[1] }}  (keep it elsewhere)
{% endif %}"""


def budget_page(cohorts: Sequence[Mapping[str, Any]], name: str, state: Path) -> str:
    """Return the page of these budgets."""
    without = f"{name}: no run with differential privacy has cost anything here"
    head = read_head(Ledger(state).folder)
    return text_page(PAGE, cohorts=cohorts, without=without, head=head).rstrip("\n")


def run_page(cohorts: Sequence[Mapping[str, Any]]) -> str:
    """Return a text with the cost of a run directory's runs for each silo."""
    without = "no run here had differential privacy (dp = true)"
    return text_page(PAGE, cohorts=cohorts, without=without, head=None).rstrip("\n")
