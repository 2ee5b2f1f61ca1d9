"""The audit gate: the last step before a reply leaves the site. A reply that cannot be logged does not leave.

The site's SuperNode calls it for every message (`messages.pass_gate`). An app under Flower's own SuperNode answers
nothing (`client/app.py`). In a simulation nothing leaves, and nothing is logged.

Of rules and budgets a line has

    policy     SHA-256 of `policy.toml`; empty: there is no file
    rules      the value of every rule that was applied, the stricter of policy and study
    versions   of the installed tools
    withheld   what the rules withheld from this reply, by rule, as the app reports it; missing: it does not report
    budget     what was used of the hospital's limits, `before` and `after` this message

`rules` and `versions` are in the first line of a run in each file of the log, like its settings (`trust/audit.py`).
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..flower.contents import array_sums, config_of, records_of
from ..flower.internals import internal
from ..protocol import receipts
from ..protocol.chain import canonical, digest, utc_now, write_whole
from ..protocol.code import digest_of_code
from ..protocol.parsed import SiteError
from ..protocol.policy import Policy, Rules
from ..protocol.study import StudyProtocol
from .budget.ledger import SpentEpsilon
from .budget.release import Charged, note_charged
from .counts import budget_of, charge_bytes, note_reply
from .record import Record
from .terms import Terms
from .trust.receipts import keep_receipt

TAKEN = "withheld"  # in `SILOFL_SITE_AUDITS`: the site accepts this record from the app
RECORD = "site"  # in a reply: the app's report to the site, removed before the reply leaves
TOOLS = ("silofl", "flwr", "torch", "numpy", "cryptography")
# Limits of an app's report: items per rule; characters per item
MOST_ITEMS, MOST_WORDS = 100, 200
# Environment variable that is set if the site's own process counts and logs the app's messages; and its value.
BY_SITE = "SILOFL_SITE_AUDITS"
BY_SITE_VALUE = f"1 {TAKEN}"
MOST_TEXT = 300  # characters of an error in the log
# The arguments of Flower's `Metadata`, which identify the message that a reply belongs to.
METADATA = (
    *("run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id"),
    *("created_at", "ttl", "message_type"),
)


@dataclass(frozen=True)
class MessageInfo:
    """The data of a message before its reply: the log's folder, and its fields in a line, which lacks those of None.

    The server chooses the run's name and round: they are not verified. An allowed message also gets its study, its
    receipt, and its charge to the privacy budget (`messages.charge_message`).
    """

    folder: Path
    line: Mapping[str, Any]
    study: StudyProtocol | None = None
    charged: Charged | None = None

    def add(self, **fields: Any) -> "MessageInfo":
        """Return the info with these fields of its line."""
        return replace(self, line={**self.line, **fields})


def describe_message(message: Any, context: Any, app: str, terms: Terms) -> MessageInfo:
    """Return the data of a message; `app` is the SHA-256 of the app's build."""
    node, config, policy = dict(context.node_config), config_of(message), terms.policy
    settings = {key: context.run_config[key] for key in sorted(context.run_config)}
    line = {
        "silo": str(node.get("name", "")),
        "asked-by": os.environ.get("SILOFL_SERVER") or "unknown",
        "run-id": str(context.run_id),
        "run": str(config.get("run", ""))[:MOST_TEXT],
        "round": config.get("round", 0) if isinstance(config.get("round", 0), int) else 0,
        "asked": str(message.metadata.message_type)[:MOST_TEXT],
        "method": str(settings.get("strategy", ""))[:MOST_TEXT],
        "app": app,
        "settings": digest(canonical(settings)),
        "run-config": settings,
        "rule": rule_of(terms),
        "policy": policy.sha256 if policy else "",
        "rules": rule_values(policy) if policy else {},
        "versions": versions(),
        "cohort": cohort_of(node),
        "study": None,
        # The log's entry about the server's receipt (`take_receipt`)
        "receipt": None,
        # SHA-256 of the source of the run's trainer, as this site has it; empty: not found here
        "trainer": digest_of_code(str(settings["trainer"]))
        if settings.get("trainer")
        else None,
        # The slot of a masked vector, or of an answer about its masks
        "secure": None,
    }
    return MessageInfo(folder_of(node), line)


def cohort_of(node_config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the silo's data file, which identifies the patients behind a reply; empty: unreadable.

    It is cached in a file beside the log until the data file's size or time changes.
    """
    path = Path(str(node_config.get("data", "")))
    note = folder_of(node_config) / "data.json"
    try:
        found = path.stat()
        known = {"path": str(path), "size": found.st_size, "time": found.st_mtime_ns}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            noted = json.loads(note.read_text(encoding="utf-8"))
            if known.items() <= noted.items():
                return str(noted["sha256"])
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(note, json.dumps({**known, "sha256": sha256}) + "\n")
        return sha256
    except OSError:
        return ""


def in_study(info: MessageInfo, terms: Terms) -> MessageInfo:
    """Return the info with the message's study, whose rules apply and whose bytes are counted; unchanged without."""
    study = terms.study
    if study is None:
        return info
    own = {"name": study.name, "digest": study.digest}
    return replace(info.add(study=own, rules=rule_values(terms.rules)), study=study)


def take_receipt(message: Any, context: Any, terms: Terms) -> dict[str, Any] | None:
    """Keep the server's receipt for this silo's last reply; return its entry for the log, None if there is none.

    Raises PolicyRefusedError if the site's policy requires one and there is none for this log.
    """
    node = context.node_config
    if "data" not in node:
        return None
    kind, run_id = message.metadata.message_type.partition(".")[0], str(context.run_id)
    silo = str(node.get("name", ""))
    return keep_receipt(config_of(message), kind, run_id, silo, folder_of(node), terms.rules)


def rule_of(terms: Terms) -> str:
    """Return a text of the rules that a message passed: the list of builds, the policy's digest."""
    pins = os.environ.get("SILOFL_ALLOWED_APPS", "")
    builds = (
        "allowed-apps: this build is listed" if pins else "no allowed-apps: any build may send"
    )
    if (policy := terms.policy) is None:
        return f"{builds}; no policy can be read, so only refusals leave: {terms.error}"
    return f"{builds}; policy: {policy.where} (rules {digest(canonical(rule_values(policy)))[:16]})"


def folder_of(node_config: Mapping[str, Any]) -> Path:
    """Return the folder of a silo's log: in its state directory, or in Flower's own folder if it has none."""
    if "state-dir" in node_config:
        return Path(str(node_config["state-dir"])) / "audit"
    return Path(internal("get_flwr_home")()) / "audit"


def release_reply(reply: Any, info: MessageInfo, message: Any) -> Any:
    """Return the reply once it is in the log; if that fails, return an error of one line in its place."""
    try:
        spent = None
        if info.charged is not None and not reply.has_error():
            spent = note_charged(reply, info.charged, info.folder.parent)
        number, own = write_down(reply, info, spent)
        if receipts.ASKED in config_of(message) and not reply.has_error():
            from flwr.app import ConfigRecord

            reply.content[receipts.RECORD] = ConfigRecord(
                receipts.head(number, own, info.line["silo"])
            )
        return reply
    except Exception as error:
        reason = (
            error.strerror
            if isinstance(error, OSError) and error.strerror
            else f"{type(error).__name__}: {error}"
        )
        reason = f"the audit log cannot be written: {' '.join(str(reason).split())}"
        line = f"nothing leaves: {error if isinstance(error, SiteError) else reason}"
        print(f"ERROR: {line} ({info.folder})", file=sys.stderr, flush=True)
        return refuse(message, line)


def refuse(message: Any, reason: str, code: str = "CLIENT_APP_RAISED_EXCEPTION") -> Any:
    """Return the reply to a message with the reason why it has no answer."""
    from flwr.app import Error, Message, Metadata, RecordDict

    sent = message.metadata
    if time.time() > sent.created_at + sent.ttl - 1.0:
        # Flower makes no reply to a message whose time is over, but the SuperNode waits for one. The server drops it.
        fields = {key: getattr(sent, key) for key in METADATA} | {
            "created_at": time.time(),
            "ttl": 60.0,
        }
        message = internal("make_message")(metadata=Metadata(**fields), content=RecordDict())
    return Message(Error(getattr(internal("ErrorCode"), code), reason), reply_to=message)


def write_down(
    reply: Any, info: MessageInfo, spent: SpentEpsilon | None = None
) -> tuple[int, str]:
    """Append a reply to log and record, count its bytes in its study, and remove the app's report to the site.

    Returns the line's number and hash; they leave with the reply if the server gives receipts. Raises OSError or
    SiteError if log or record cannot be written, SiteError if the study allows no more bytes.
    """
    withheld = take_withheld(reply)
    held = {} if withheld is None else {"withheld": withheld}
    sent, now, record = list(records(reply)), utc_now(), Record(info.folder.parent)
    total = sum(one["bytes"] for one in sent)
    with record.write() as db:
        before: dict[str, float] = {}
        after: dict[str, float] = {}
        if info.study:
            charge_bytes(db, info.study, total)
            before, after = budget_of(db, info.study.name, info.line["silo"], total)
        if spent is not None:
            # The epsilon that the people in the data have spent, at this delta
            before = {**before, "epsilon": spent.before, "delta": spent.delta}
            after = {**after, "epsilon": spent.after, "delta": spent.delta}
        used = {"budget": {"before": before, "after": after}}
        fields = {key: value for key, value in info.line.items() if value is not None}
        entry = {"time": now, **fields, **used, **held, "bytes": total, "sent": sent}
        return note_reply(db, record, entry)


def records(reply: Any) -> Iterable[dict[str, Any]]:
    """Describe a reply: name, type, shape, bytes and SHA-256 of each array; the keys of each other record."""
    if reply.has_error():
        reason = str(reply.error.reason or "")
        yield {"name": "error", "text": reason[:MOST_TEXT], **measure_reply(reason.encode())}
        return
    content = reply.content
    for one in array_sums(content):
        kind = {"dtype": one.dtype, "shape": [*one.shape], "bytes": one.bytes}
        yield {"name": f"{one.record}/{one.key}", **kind, "sha256": one.sha256}
    for found in (records_of(content, "Metric"), records_of(content, "Config")):
        for name, record in found.items():
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
    record = records_of(reply.content, "Config").get(RECORD, {})
    del reply.content[RECORD]
    lists = {
        rule: value if isinstance(value, list) else [value] for rule, value in record.items()
    }
    return {
        str(rule)[:MOST_WORDS]: [str(one)[:MOST_WORDS] for one in lists[rule][:MOST_ITEMS]]
        for rule in sorted(lists)[:MOST_ITEMS]
    }
