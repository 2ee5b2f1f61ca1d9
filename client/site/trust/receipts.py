"""The server's receipts for this site's audit log: its signature under the hash of a line, kept by both.

    STATE_DIR/audit/receipts.jsonl     what the server signed, a receipt per line
    STATE_DIR/audit/server-key         the fingerprint of its key, from the first receipt on

A reply carries number and hash of its own line of the log, and the next message of the run the server's signature under
them (Ed25519). The hash of a line stands for all lines before it. So a log that was written anew, or cut off, does not
have the line that somebody else has signed; and the server cannot deny what it was sent. The server keeps the receipts
of a run in its run directory, for an auditor who does not believe the site's folder.

A server need not give receipts (rule ``receipts``); one that gives none, or a wrong one, is named once in a run.

Standard library and `cryptography`, which Flower brings: the process that runs the app loads this file.
"""

import base64
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from ..errors import SiteError
from .audit import Log, files_of
from .chain import last_first, parsed, sync_folder, write_whole
from .policy import Policy, PolicyRefusedError

KIND = "silofl receipt 1"
ASKED = "receipt"  # in a message's config: the receipt for the silo's last reply, or nothing yet
RECORD = "audit"  # of a reply: number and hash of its line
KEY = "SILOFL_RECEIPT_KEY"  # in the server's environment: the file of the key that signs receipts
FILE, KEY_FILE, NAMED = "receipts.jsonl", "server-key", "receipts-named"
LONGEST = 4096  # bytes of a receipt
REQUIRED = "required"
LOOKED_AT = 1000  # lines from the end of a log, among which a receipt's has to be


@dataclass(frozen=True)
class Receipt:
    """A receipt whose signature is right. ``key``: the fingerprint of who signed it; ``text``: as it travels."""

    run: str
    run_id: str
    silo: str
    line: int
    hash: str
    time: str
    key: str
    text: str


# --- making and reading -----------------------------------------------------------------------------------


def signed(key: Ed25519PrivateKey, *, run: str, run_id: str, silo: str, line: int, hash: str) -> str:
    """A receipt by this key, as one line of JSON."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fields = {"kind": KIND, "run": run, "run-id": run_id, "silo": silo, "line": line, "hash": hash, "time": now}
    text = json.dumps(fields, sort_keys=True)
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return json.dumps({"receipt": text, "public-key": _coded(public), "signature": _coded(key.sign(_message(text)))})


def read(text: str) -> Receipt:
    """The receipt in a line. Raises SiteError where it is none, or its signature is wrong."""
    try:
        if len(text) > LONGEST:
            raise ValueError("too long")
        outer = json.loads(text)
        public, inner = base64.b64decode(outer["public-key"], validate=True), str(outer["receipt"])
        key = load_der_public_key(public)
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError("another kind of key")
        key.verify(base64.b64decode(outer["signature"], validate=True), _message(inner))
        fields = json.loads(inner)
        if fields["kind"] != KIND or type(fields["line"]) is not int:
            raise ValueError("another kind of text")
        words = {name: str(fields[name.replace("_", "-")]) for name in ("run", "run_id", "silo", "hash", "time")}
        return Receipt(**words, line=fields["line"], key=f"SHA256:{hashlib.sha256(public).hexdigest()}", text=text)
    except InvalidSignature:
        raise SiteError("its signature is wrong") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SiteError(f"it is no receipt ({type(error).__name__})") from None


def _coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _message(text: str) -> bytes:
    """Return the bytes that are signed: a text of another kind cannot pass for a receipt."""
    return f"{KIND}\0{text}".encode()


# --- at the site ------------------------------------------------------------------------------------------


def take(
    config: Mapping[str, Any], kind: str, run_id: str, silo: str, folder: Path, policy: Policy
) -> dict[str, Any] | None:
    """Keep the receipt that came with a message, and return what the log says of it; None: nothing.

    ``config``: of the message; ``kind``: train, evaluate or query; ``folder``: of the log. A run's first message, the
    query, has no reply before it. A fault is named once in a run; it stops nothing but where the rule ``receipts``
    says so: then raises PolicyRefusedError.
    """
    if kind == "query" and not config.get(ASKED):
        return None
    try:
        receipt = _checked(config.get(ASKED), run_id, silo, folder)
        _keep(receipt, folder)
        return {"line": receipt.line, "hash": receipt.hash, "key": receipt.key}
    except (SiteError, OSError) as error:
        fault = str(error)
    if policy.receipts == REQUIRED:
        raise PolicyRefusedError(f"{silo} refuses: its policy has {policy.line('receipts')}, and {fault}")
    _name(f"WARNING: {silo}: {fault} ({folder})", run_id, folder)
    return {"fault": fault}


def _checked(text: Any, run_id: str, silo: str, folder: Path) -> Receipt:
    """The receipt in a message. Raises SiteError, in words that follow "and", where it is not for this log."""
    if not text:
        raise SiteError("the server gives no receipt for the audit log")
    try:
        receipt = read(str(text))
    except SiteError as error:
        raise SiteError(f"the server's receipt for the audit log cannot be used: {error}") from None
    known = known_key(folder)
    if known and receipt.key != known:
        raise SiteError(
            f"the server's receipt is signed by another key, {receipt.key}, not by {known}: compare it with what the "
            f"consortium tells you, and where it is right delete {folder / KEY_FILE}"
        )
    if (receipt.silo, receipt.run_id) != (silo, run_id):
        raise SiteError(f"the server's receipt is for {receipt.silo[:80]!r} in run {receipt.run_id[:40]!r}")
    here = _hash_of(receipt.line, folder)
    if here != receipt.hash:
        what = "has another hash" if here else "is not there"
        raise SiteError(
            f"the server has a receipt for line {receipt.line} of the audit log, which {what} here: lines were taken "
            "out or written anew"
        )
    return receipt


def _hash_of(line: int, folder: Path) -> str:
    """The hash of a line among the last ones of the log; empty: it is not there."""
    texts = (text for file in reversed(files_of(folder)[-2:]) for text in last_first(file))
    for _, text in zip(range(LOOKED_AT), texts, strict=False):
        entry = parsed(text, Log.required)
        if entry is not None and entry["line"] <= line:
            return str(entry["hash"]) if entry["line"] == line else ""
    return ""


def _keep(receipt: Receipt, folder: Path) -> None:
    """Add a receipt to those that are kept, and remember the first one's key. A receipt that is there stays one."""
    if not known_key(folder):
        write_whole(folder / KEY_FILE, receipt.key + "\n")
    descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        last = os.pread(descriptor, 4 * LONGEST, max(0, size - 4 * LONGEST))
        if receipt.text.encode() in last.split(b"\n"):
            return
        torn = b"\n" if last and not last.endswith(b"\n") else b""
        os.write(descriptor, torn + receipt.text.encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(folder)


def known_key(folder: Path) -> str:
    """The fingerprint of the server's key, as this site remembers it; empty: it has seen none."""
    try:
        return (folder / KEY_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""


def _name(line: str, run_id: str, folder: Path) -> None:
    """Print a line, once in a run: every message has a process of its own, so a note says for which it was."""
    note = folder / NAMED
    try:
        if note.exists() and note.read_text(encoding="utf-8", errors="replace") == run_id + line:
            return
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(note, run_id + line)
    except OSError:
        pass  # then it is printed again
    print(line, file=sys.stderr, flush=True)


def head(line: int, own: str, silo: str) -> dict[str, Any]:
    """What a reply says of its own line of the log."""
    return {"line": line, "hash": own, "silo": silo}


# --- does the log have what was signed? -------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Receipts against a log: what is wrong, how many fit, up to which line, and who signed."""

    faults: tuple[str, ...]
    count: int
    line: int
    keys: tuple[str, ...]


def check(
    texts: Iterable[str], entries: Iterable[Mapping[str, Any]], wanted: Callable[[Receipt], bool], key: str
) -> Check:
    """Compare receipts with the lines of a log. ``wanted``: which ones; ``key``: who has to have signed (empty: any).

    A receipt for a line before the first one here is not looked at: that line is kept elsewhere.
    """
    hashes = {int(entry["line"]): str(entry["hash"]) for entry in entries}
    first, last = min(hashes, default=1), max(hashes, default=0)
    faults, count, line, keys = list[str](), 0, 0, dict[str, None]()
    for number, text in enumerate(texts, 1):
        try:
            receipt = read(text)
        except SiteError as error:
            faults.append(f"receipt {number}: {error}")
            continue
        if not wanted(receipt) or receipt.line < first:
            continue
        keys[receipt.key] = None
        if key and receipt.key != key:
            faults.append(f"receipt {number}: signed by {receipt.key}, not by the server's key {key}")
        elif receipt.line > last:
            faults.append(f"the server has a receipt for line {receipt.line}, and the log ends with line {last}")
        elif hashes.get(receipt.line) != receipt.hash:
            faults.append(f"line {receipt.line} is not what the server has a receipt for: the log was written anew")
        else:
            count, line = count + 1, max(line, receipt.line)
    return Check(tuple(faults), count, line, tuple(keys))


def kept(path: Path) -> list[str]:
    """The receipts of a file; the last one may have been torn by a crash, and then is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line for line in text.split("\n")[:-1] if line]
