"""The part of an audit log line about rules and budgets: under which rules a message left, from which budget.

    policy     SHA-256 of `policy.toml`; empty: there is no file
    rules      the value of every rule that was applied, the stricter of policy and study
    versions   of the installed tools
    withheld   what the rules withheld from this reply, by rule, as the app reports it; missing: it does not report
    budget     what was used of the hospital's limits, `before` and `after` this message

`rules` and `versions` are in the first line of a run in each file of the log, like its settings (`trust/audit.py`).

Standard library only: this runs in the process that must not import the package `client`.
"""

import functools
import importlib.metadata
import os
import platform
import sqlite3
from collections.abc import Mapping
from typing import Any

from .budget.ledger import SpentEpsilon
from .counts import budget_of
from .trust.policy import Policy, Rules

TAKEN = "withheld"  # in `SILOFL_SITE_AUDITS`: the site accepts this record from the app
RECORD = "site"  # in a reply: the app's report to the site, removed before the reply leaves
TOOLS = ("silofl", "flwr", "torch", "numpy", "cryptography")
# Limits of an app's report: items per rule; characters per item
MOST_ITEMS, MOST_TEXT = 100, 200


def rule_values(policy: Policy) -> dict[str, Any]:
    """Return the value of each rule, by its key in the file."""
    return policy.model_dump(mode="json", by_alias=True, include={*Rules.model_fields})


@functools.cache
def versions() -> dict[str, str]:
    """Return the version of each tool at this site; empty if it is not installed."""
    found = {"python": platform.python_version()}
    for name in TOOLS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def site_takes() -> bool:
    """Return whether the process that writes the log removes :data:`RECORD` from a reply of this app."""
    return TAKEN in os.environ.get("SILOFL_SITE_AUDITS", "").split()


def take_withheld(reply: Any) -> dict[str, list[str]] | None:
    """Remove the app's report of what it withheld from a reply and return it; None if there is none.

    The consortium wrote the app, so the report's size is limited, and it cannot set another key of the line.
    """
    if reply.has_error() or RECORD not in reply.content:
        return None
    record = reply.content.config_records.get(RECORD, {})
    del reply.content[RECORD]
    lists = {
        rule: value if isinstance(value, list) else [value] for rule, value in record.items()
    }
    return {
        str(rule)[:MOST_TEXT]: [str(one)[:MOST_TEXT] for one in lists[rule][:MOST_ITEMS]]
        for rule in sorted(lists)[:MOST_ITEMS]
    }


def budget(
    db: sqlite3.Connection,
    study: Mapping[str, Any] | None,
    spent: SpentEpsilon | None,
    silo: str,
    size: int,
) -> dict[str, dict[str, float]]:
    """Return `before` and `after`: what was used of each limit, by name, without and with this message.

    ``db``: the record; ``size``: bytes of the reply. With differential privacy both include the epsilon that the people
    in the data have spent, at this delta.
    """
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    if study:
        before, after = budget_of(db, study, silo, size)
    if spent is not None:
        before = {**before, "epsilon": spent.before, "delta": spent.delta}
        after = {**after, "epsilon": spent.after, "delta": spent.delta}
    return {"before": before, "after": after}
