"""The server's receipts for this site's audit log: signatures over the hash of a line, kept by both.

    STATE_DIR/audit/receipts.jsonl     what the server signed, a receipt per line
    STATE_DIR/audit/server-key         the fingerprint of its key, from the first receipt on

A reply contains number and hash of its own line of the log. The next message of the run contains the server's signature
over them (Ed25519). A line's hash covers all lines before it. So a log that was rewritten, or cut off, lacks a line
that the server signed, and the server cannot deny what it was sent. The server keeps a run's receipts in its run
directory, for an auditor who does not trust the site's folder.

A server need not give receipts (rule ``receipts``). If it gives none, or a wrong one, that is logged once per run.

Standard library and `cryptography`, which Flower brings: the process that runs the app loads this file.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...protocol.chain import append_line, last_first, parse_line, write_whole
from ...protocol.parsed import SiteError
from ...protocol.receipts import ASKED, FILE, Receipt, read_receipt
from .audit import Log, log_files

KEY_FILE = "server-key"
REQUIRED = "required"
REPEATED = 32  # last receipts, which a repeated message may have brought
LOOKED_AT = 1000  # lines from the end of a log in which a receipt's line is searched


def keep_receipt(
    config: Mapping[str, Any], kind: str, run_id: str, silo: str, folder: Path
) -> dict[str, Any] | None:
    """Keep the receipt that came with a message; return its entry for the log, None if there is none.

    ``config``: of the message; ``kind``: train, evaluate or query; ``folder``: of the log. A run's first message, the
    query, has no reply before it. The entry of a receipt that is missing or wrong has its ``fault``.
    """
    if kind == "query" and not config.get(ASKED):
        return None
    try:
        receipt = _check_receipt(config.get(ASKED), run_id, silo, folder)
        _keep(receipt, folder)
        return {"line": receipt.line, "hash": receipt.hash, "key": receipt.key}
    except (SiteError, OSError) as error:
        return {"fault": str(error)}


def _check_receipt(text: Any, run_id: str, silo: str, folder: Path) -> Receipt:
    """Return the receipt in a message. Raises SiteError if it is not for this log; its text continues after "and"."""
    if not text:
        raise SiteError("the server gives no receipt for the audit log")
    try:
        receipt = read_receipt(str(text))
    except SiteError as error:
        raise SiteError(
            f"the server's receipt for the audit log cannot be used: {error}"
        ) from None
    known = known_key(folder)
    if known and receipt.key != known:
        raise SiteError(
            f"the server's receipt is signed by another key, {receipt.key}, not by {known}: compare it with what the "
            f"consortium tells you, and where it is right delete {folder / KEY_FILE}"
        )
    if (receipt.silo, receipt.run_id) != (silo, run_id):
        raise SiteError(
            f"the server's receipt is for {receipt.silo[:80]!r} in run {receipt.run_id[:40]!r}"
        )
    here = _hash_of(receipt.line, folder)
    if here != receipt.hash:
        what = "has another hash" if here else "is not there"
        raise SiteError(
            f"the server has a receipt for line {receipt.line} of the audit log, which {what} here: lines were taken "
            "out or written anew"
        )
    return receipt


def _hash_of(line: int, folder: Path) -> str:
    """Return the hash of a line among the last ones of the log; empty: it is not there."""
    texts = (text for file in reversed(log_files(folder)[-2:]) for text in last_first(file))
    for _, text in zip(range(LOOKED_AT), texts, strict=False):
        entry = parse_line(text, Log.required)
        if entry is not None and entry["line"] <= line:
            return str(entry["hash"]) if entry["line"] == line else ""
    return ""


def _keep(receipt: Receipt, folder: Path) -> None:
    """Add a receipt to the kept ones, and store the first one's key. A receipt that is there is not repeated."""
    if not known_key(folder):
        write_whole(folder / KEY_FILE, receipt.key + "\n")
    file, text = folder / FILE, receipt.text.encode()
    last = last_first(file) if file.exists() else ()
    if text not in itertools.islice(last, REPEATED):
        append_line(file, text)


def known_key(folder: Path) -> str:
    """Return the stored fingerprint of the server's key; empty: none was stored."""
    try:
        return (folder / KEY_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""


@functools.cache
def warn_once(line: str, run_id: str) -> None:
    """Print a line once per run."""
    print(line, file=sys.stderr, flush=True)


# --- comparison of receipts with the log -------------------------------------------------------------------


@dataclass(frozen=True)
class ReceiptCheck:
    """Receipts against a log: the faults, how many receipts match, up to which line, and who signed."""

    faults: tuple[str, ...]
    count: int
    line: int
    keys: tuple[str, ...]


def compare_receipts(
    texts: Iterable[str],
    entries: Iterable[Mapping[str, Any]],
    wanted: Callable[[Receipt], bool],
    key: str,
) -> ReceiptCheck:
    """Compare receipts with the lines of a log. ``wanted``: selects them; ``key``: the required signer (empty: any).

    Receipts for lines before the first one here are skipped: those lines are kept elsewhere.
    """
    hashes = {int(entry["line"]): str(entry["hash"]) for entry in entries}
    first, last = min(hashes, default=1), max(hashes, default=0)
    faults, count, line, keys = list[str](), 0, 0, dict[str, None]()
    for number, text in enumerate(texts, 1):
        try:
            receipt = read_receipt(text)
        except SiteError as error:
            faults.append(f"receipt {number}: {error}")
            continue
        if not wanted(receipt) or receipt.line < first:
            continue
        keys[receipt.key] = None
        if key and receipt.key != key:
            faults.append(
                f"receipt {number}: signed by {receipt.key}, not by the server's key {key}"
            )
        elif receipt.line > last:
            faults.append(
                f"the server has a receipt for line {receipt.line}, and the log ends with line {last}"
            )
        elif hashes.get(receipt.line) != receipt.hash:
            faults.append(
                f"line {receipt.line} is not what the server has a receipt for: the log was written anew"
            )
        else:
            count, line = count + 1, max(line, receipt.line)
    return ReceiptCheck(tuple(faults), count, line, tuple(keys))
