"""Receipts for the silos' audit logs: signed, kept in the run directory, and sent with the next message.

A silo's reply holds its line number in the silo's log and the line's hash (``client/protocol/receipts.py``). The
server signs both and appends them to ``receipts.jsonl`` of the run directory before it sends them back. So both sides
hold the receipt even if a process is killed. A simulation has no logs, and a server without a key
(``SILOFL_RECEIPT_KEY``) requests none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Message
from pydantic import Field, ValidationError

from client.protocol.keys import load_signing_key
from client.protocol.parsed import SiteError
from client.protocol.receipts import (
    ASKED,
    FILE,
    KEY,
    RECORD,
    read_kept,
    read_receipt,
    sign_receipt,
)
from partitions.common.files import append
from partitions.common.parsed import Frozen, match_pattern
from strategies.base.transport.reporting import LONGEST_NAME, printable

MOST_LINES = 2**53


class LogHead(Frozen):
    """What a reply says of its line in the silo's audit log."""

    silo: Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
    line: Annotated[int, Field(ge=1, le=MOST_LINES)]
    hash: Annotated[str, match_pattern("[0-9a-f]{64}", "must be a SHA-256")]


@dataclass
class Receipts:
    """The receipts of one run. ``key``: None: no receipts are issued. ``note`` reports a log that goes back.

    ``names``: the registered ones by node, where there are any: a silo has receipts for its own log alone.
    """

    key: Ed25519PrivateKey | None = None
    path: Path | None = None
    run: str = ""
    note: Callable[[str], object] = lambda line: None
    names: Mapping[int, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)  # silo -> the last line with a receipt
    # Node -> the receipt for its last reply
    latest: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, directory: Path | None, note: Callable[[str], object], names: Mapping[int, str]
    ) -> Receipts:
        """Return the receipts of a run in this directory, with the earlier ones of a resumed run.

        Without a directory none are issued, as they could not be kept. Raises DataError for a file that is no key.
        """
        file = os.environ.get(KEY, "")
        if not file or directory is None:
            return cls()
        key = load_signing_key(Path(file))
        receipts = cls(key, directory / FILE, directory.name, note, names)
        for text in read_kept(receipts.path or directory):
            try:
                receipt = read_receipt(text)
            except SiteError as error:
                note(f"{receipts.path}: {error}")
                continue
            before = receipts.lines.get(receipt.silo, 0)
            receipts.lines[receipt.silo] = max(receipt.line, before)
        return receipts

    def attach(self, messages: Iterable[Message]) -> None:
        """Add to each message the receipt for its silo's last reply in this run, or an empty string."""
        if self.key is None:
            return
        for message in messages:
            config = cast(ConfigRecord, message.content["config"])
            config[ASKED] = self.latest.get(message.metadata.dst_node_id, "")

    def take(self, replies: Iterable[Message]) -> None:
        """Remove the log records from the replies, sign them, and keep the receipts."""
        signed: dict[int, tuple[str, int, str]] = {}
        for reply in replies:
            if reply.has_error() or RECORD not in reply.content:
                continue
            record = cast(Mapping[str, Any], reply.content.pop(RECORD))
            if self.key is None or (head := _head(record)) is None:
                continue
            node, run_id = reply.metadata.src_node_id, str(reply.metadata.run_id)
            if (name := self.names.get(node, head.silo)) != head.silo:
                claimed = printable(head.silo)
                self.note(f"{name} says that its audit log is {claimed}'s: no receipt")
                continue
            text = sign_receipt(self.key, run=self.run, run_id=run_id, **dict(head))
            signed[node] = head.silo, head.line, text
        if signed and self.path is not None:
            append(
                self.path,
                "\n" * is_torn(self.path)
                + "".join(f"{text}\n" for _, _, text in signed.values()),
            )
        for node, (silo, line, text) in signed.items():
            if line <= self.lines.get(silo, 0):
                self.note(
                    f"{printable(silo)}: its audit log goes back from line {self.lines[silo]} to line {line}: lines "
                    "were taken out, or the log is a new one"
                )
            self.lines[silo], self.latest[node] = line, text


def is_torn(path: Path) -> bool:
    """Return whether a crash has cut off the last line of a file."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _head(record: Mapping[str, Any]) -> LogHead | None:
    """Return silo, line and hash of a reply's log record; None if it is malformed."""
    try:
        return LogHead.model_validate(dict(record))
    except ValidationError:
        return None
