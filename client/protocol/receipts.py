"""The server's receipts for a silo's audit log: signatures (Ed25519) over the hash of a line, kept by both.

A reply contains number and hash of its own line of the log. The next message of the run contains the server's signature
over them. The server keeps a run's receipts in its run directory, for an auditor who does not trust the site's folder.
"""

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field

from .chain import utc_now
from .envelope import RECEIPT, seal, unseal
from .parsed import Frozen, SiteError, parse_values

ASKED = "receipt"  # in a message's config: the receipt for the silo's last reply, or empty
RECORD = "audit"  # in a reply: number and hash of its line
# In the server's environment: the file of the key that signs receipts
KEY = "SILOFL_RECEIPT_KEY"
FILE = "receipts.jsonl"  # of a site's log, and of a run directory
LONGEST = 4096  # bytes of a receipt


class Receipt(Frozen):
    """A receipt with a correct signature. ``key``: the signer's fingerprint; ``text``: the receipt as sent."""

    kind: str
    run: str
    run_id: str = Field(alias="run-id")
    silo: str
    line: int
    hash: str
    time: str
    key: str
    text: str


def sign_receipt(
    key: Ed25519PrivateKey, *, run: str, run_id: str, silo: str, line: int, hash: str
) -> str:
    """Return a receipt signed by this key, as one line of JSON."""
    fields = {
        "run": run,
        "run-id": run_id,
        "silo": silo,
        "line": line,
        "hash": hash,
        "time": utc_now(),
    }
    return seal(RECEIPT, "receipt", fields, key)


def read_receipt(text: str) -> Receipt:
    """Return the receipt in a line. Raises SiteError if it is none, or if its signature is wrong."""
    if len(text) > LONGEST:
        raise SiteError("it is no receipt (too long)")
    fields, key = unseal(RECEIPT, "receipt", text)
    return parse_values(
        Receipt, {**fields, "key": key, "text": text}, "it is no receipt", "the server made it"
    )


def head(line: int, own_hash: str, silo: str) -> dict[str, Any]:
    """Return the record in which a reply refers to its own line of the log."""
    return {"line": line, "hash": own_hash, "silo": silo}


def read_kept(path: Path) -> list[str]:
    """Return the receipts of a file; a last one that was torn by a crash is dropped."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line for line in text.split("\n")[:-1] if line]
