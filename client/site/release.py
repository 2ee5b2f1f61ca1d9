"""The release: the last step before a reply leaves the site. A reply that cannot be logged does not leave.

The gate calls it for every message (`gate.py`). An app under Flower's own SuperNode answers
nothing (`client/app.py`). In a simulation nothing leaves, and nothing is logged.

Of rules and budgets a line has

    policy     SHA-256 of `policy.toml`; empty: there is no file
    rules      the value of every rule that was applied, the stricter of policy and study
    versions   of the installed tools
    withheld   what the rules withheld from this reply, by rule, as the app reports it; missing: it does not report
    budget     what was used of the hospital's limits, `before` and `after` this message

`rules` and `versions` are in the first line of a run in each file of the log, like its settings (`trust/audit.py`).
"""

import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable
from typing import Any

from ..flower.messages import array_sums, records_of, refuse
from ..protocol import receipts
from ..protocol.chain import canonical, digest, utc_now
from ..protocol.code import digest_of_code
from ..protocol.launch import BY_SITE, TAKEN
from ..protocol.parsed import SiteError
from ..protocol.policy import Policy, Rules
from .counts import charge_bytes, study_budget
from .message import SiteMessage
from .record import Record
from .rules.budget import note_charged
from .terms import Terms

RECORD = "site"  # in a reply: the app's report to the site, removed before the reply leaves
TOOLS = ("silofl", "flwr", "torch", "numpy", "cryptography")
# Limits of an app's report: items per rule; characters per item
MOST_ITEMS, MOST_WORDS = 100, 200
MOST_TEXT = 300  # characters of an error in the log


def describe_message(message: SiteMessage) -> dict[str, Any]:
    """Return a message's line of the audit log, without what is known only after the rules."""
    policy, settings = message.terms.policy, message.settings
    config, run_config = message.config, {key: settings[key] for key in sorted(settings)}
    return {
        "silo": str(message.context.node_config.get("name", "")),
        "asked-by": os.environ.get("SILOFL_SERVER") or "unknown",
        "run-id": str(message.run),
        "run": str(config.get("run", ""))[:MOST_TEXT],
        "round": config.get("round", 0) if isinstance(config.get("round", 0), int) else 0,
        "asked": message.action[:MOST_TEXT],
        "method": str(settings.get("strategy", ""))[:MOST_TEXT],
        "app": message.build,
        "settings": digest(canonical(run_config)),
        "run-config": run_config,
        "rule": rule_of(message.terms),
        "policy": policy.sha256 if policy else "",
        "rules": rule_values(policy) if policy else {},
        "versions": versions(),
        "cohort": message.cohort,
        "study": None,
        # The log's entry about the server's receipt
        "receipt": None,
        # SHA-256 of the source of the run's trainer, as this site has it; empty: not found here
        "trainer": digest_of_code(str(settings["trainer"]))
        if settings.get("trainer")
        else None,
        # The slot of a masked vector, or of an answer about its masks
        "secure": None,
    }


def released_line(message: SiteMessage) -> dict[str, Any]:
    """Return a message's line after the rules; an allowed one has its study, whose rules apply and bytes count."""
    line, study, passage = message.passage.line, message.terms.study, message.passage
    if passage.allowed:
        line |= {
            "receipt": passage.receipt,
            "secure": passage.masks and (passage.masks.note or None),
        }
        if study is not None:
            line["study"] = {"name": study.name, "digest": study.digest}
            line["rules"] = rule_values(message.terms.rules)
    return {key: value for key, value in line.items() if value is not None}


def rule_of(terms: Terms) -> str:
    """Return a text of the rules that a message passed: the list of builds, the policy's digest."""
    pins = os.environ.get("SILOFL_ALLOWED_APPS", "")
    builds = (
        "allowed-apps: this build is listed" if pins else "no allowed-apps: any build may send"
    )
    if (policy := terms.policy) is None:
        return f"{builds}; no policy can be read, so only refusals leave: {terms.error}"
    return f"{builds}; policy: {policy.where} (rules {digest(canonical(rule_values(policy)))[:16]})"


def release_reply(reply: Any, message: SiteMessage) -> Any:
    """Return the reply once it is in budget and log; if that fails, return an error of one line in its place."""
    try:
        number, line_hash = write_down(reply, message)
        if receipts.ASKED in message.config and not reply.has_error():
            from flwr.app import ConfigRecord

            head = receipts.head(number, line_hash, message.passage.line["silo"])
            reply.content[receipts.RECORD] = ConfigRecord(head)
        return reply
    except Exception as error:
        reason = (
            error.strerror
            if isinstance(error, OSError) and error.strerror
            else f"{type(error).__name__}: {error}"
        )
        reason = f"the audit log cannot be written: {' '.join(str(reason).split())}"
        line = f"nothing leaves: {error if isinstance(error, SiteError) else reason}"
        print(f"ERROR: {line} ({message.log})", file=sys.stderr, flush=True)
        return refuse(message.message, line)


def write_down(reply: Any, message: SiteMessage) -> tuple[int, str]:
    """Note a reply in one transaction: in budget, study and log; remove the app's report to the site from it.

    Returns the line's number and hash; they leave with the reply if the server gives receipts. Raises OSError or
    SiteError if log or record cannot be written, SiteError if budget or study allow no such reply.
    """
    study = message.terms.study if message.passage.allowed else None
    line, withheld = released_line(message), take_withheld(reply)
    sent, record = list(describe_reply(reply)), Record(message.log.parent)
    total = sum(item["bytes"] for item in sent)
    with record.write() as db:
        spent = note_charged(reply, message)
        before: dict[str, float] = {}
        after: dict[str, float] = {}
        if study:
            charge_bytes(db, study, total)
            before, after = study_budget(db, study.name, line["silo"], total)
        if spent is not None:
            # The epsilon that the people in the data have spent, at this delta
            before = {**before, "epsilon": spent.before, "delta": spent.delta}
            after = {**after, "epsilon": spent.after, "delta": spent.delta}
        line |= {"budget": {"before": before, "after": after}}
        line |= {} if withheld is None else {"withheld": withheld}
        return record.note_reply(db, {"time": utc_now(), **line, "bytes": total, "sent": sent})


def describe_reply(reply: Any) -> Iterable[dict[str, Any]]:
    """Describe a reply: name, type, shape, bytes and SHA-256 of each array; the keys of each other record."""
    if reply.has_error():
        reason = str(reply.error.reason or "")
        yield {"name": "error", "text": reason[:MOST_TEXT], **measure_reply(reason.encode())}
        return
    content = reply.content
    for array in array_sums(content):
        kind = {"dtype": array.dtype, "shape": [*array.shape], "bytes": array.bytes}
        yield {"name": f"{array.record}/{array.key}", **kind, "sha256": array.sha256}
    for records in (records_of(content, "Metric"), records_of(content, "Config")):
        for name, record in records.items():
            values = {str(key): record[key] for key in sorted(record)}
            yield {"name": name, "keys": list(values), **measure_reply(canonical(values))}


def measure_reply(data: bytes | memoryview) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": digest(data)}


def rule_values(policy: Policy) -> dict[str, Any]:
    """Return the value of each rule, by its key in the file."""
    return policy.model_dump(mode="json", by_alias=True, include={*Rules.model_fields})


@functools.cache
def versions() -> dict[str, str]:
    """Return the version of each tool at this site; empty if it is not installed."""
    installed = {"python": platform.python_version()}
    for name in TOOLS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = ""
    return installed


def site_takes() -> bool:
    """Return whether the process that writes the log removes :data:`RECORD` from a reply of this app."""
    return TAKEN in os.environ.get(BY_SITE, "").split()


def take_withheld(reply: Any) -> dict[str, list[str]] | None:
    """Remove the app's report of what it withheld from a reply and return it; None if there is none.

    The consortium wrote the app, so the report's size is limited, and it cannot set another key of the line.
    """
    if reply.has_error() or RECORD not in reply.content:
        return None
    record = records_of(reply.content, "Config").get(RECORD, {})
    del reply.content[RECORD]
    lists = {
        rule: value if isinstance(value, list) else [value] for rule, value in record.items()
    }
    return {
        str(rule)[:MOST_WORDS]: [str(item)[:MOST_WORDS] for item in lists[rule][:MOST_ITEMS]]
        for rule in sorted(lists)[:MOST_ITEMS]
    }
