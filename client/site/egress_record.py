"""What a line of the audit log says besides the message itself: under which rules it left, and out of which budget.

    policy     SHA-256 of `policy.toml`; empty: there is no file
    rules      the value of every rule that was applied, the stricter of policy and study
    versions   of what was running here
    withheld   what the rules held back from this reply, by rule, as the app reports it; missing: it does not report
    budget     what was used of the hospital's limits, `before` and `after` this message

`rules` and `versions` stand in the first line of a run in each file of the log, as its settings do (`trust/audit.py`).

Standard library only: this runs in the process that must not know the name `client`.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .budget.ledger import Spent
from .study.accounting import budget_of
from .trust.policy import Policy, rules

TAKEN = "withheld"  # the word in `SILOFL_SITE_AUDITS` by which an app knows that the site takes this record
RECORD = "site"  # of a reply: what the app tells the site, and the site takes out before the reply leaves
TOOLS = ("silofl", "flwr", "torch", "numpy", "cryptography")
MOST_ITEMS, MOST_TEXT = 100, 200  # of what an app reports, in one rule's list; characters of one item


def applied(policy: Policy) -> dict[str, Any]:
    """The value of each rule, by its key in the file."""
    values = {key: getattr(policy, f.name) for key, f in rules().items()}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def policy_sum(policy: Policy) -> str:
    """Return the SHA-256 of the policy's file; empty where there is none."""
    try:
        return hashlib.sha256(Path(policy.where).expanduser().read_bytes()).hexdigest()
    except OSError:
        return ""


@functools.cache
def versions() -> dict[str, str]:
    """The version of each tool at this site; empty: it is not installed."""
    found = {"python": platform.python_version()}
    for name in TOOLS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def site_takes() -> bool:
    """Return whether the process that writes the log takes :data:`RECORD` out of a reply of this app."""
    return TAKEN in os.environ.get("SILOFL_SITE_AUDITS", "").split()


def take_withheld(reply: Any) -> dict[str, list[str]] | None:
    """Take the app's report of what it held back out of a reply; None where there is none.

    The app is the consortium's: its words are bounded, and make no other key of the line.
    """
    if reply.has_error() or RECORD not in reply.content:
        return None
    record = reply.content.config_records.get(RECORD, {})
    del reply.content[RECORD]
    lists = {rule: value if isinstance(value, list) else [value] for rule, value in record.items()}
    return {
        str(rule)[:MOST_TEXT]: [str(one)[:MOST_TEXT] for one in lists[rule][:MOST_ITEMS]]
        for rule in sorted(lists)[:MOST_ITEMS]
    }


def budget(
    study: Mapping[str, Any] | None, spent: Spent | None, state: Path, silo: str, size: int
) -> dict[str, dict[str, float]]:
    """What was used before this message and after it: `before` and `after`, by the name of each limit.

    ``size``: bytes of the reply. With differential privacy both have what the people in the data have spent: epsilon,
    at this delta.
    """
    before: dict[str, float] = {}
    after: dict[str, float] = {}
    if study:
        before, after = budget_of(study, state, silo, size)
    if spent is not None:
        before = {**before, "epsilon": spent.before, "delta": spent.delta}
        after = {**after, "epsilon": spent.after, "delta": spent.delta}
    return {"before": before, "after": after}
