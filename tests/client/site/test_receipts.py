"""The server's receipts for a site's audit log: who signed what, what is named, and what an auditor finds."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from audit_lines import entry
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from failing import fails
from taken import silofl

from client.protocol import chain, receipts
from client.protocol.chain import chain_line
from client.protocol.envelope import BUNDLE, add_prefix, sign
from client.protocol.parsed import SiteError
from client.protocol.policy import Policy, PolicyRefusedError, parse_policy
from client.protocol.receipts import ASKED, FILE, sign_receipt
from client.site.message import Passage
from client.site.rules.receipt import receipt_fault
from client.site.terms import Terms
from client.site.trust.audit import Log, verify_log
from client.site.trust.receipts import KEY_FILE, known_key

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
OPTIONAL, WANTED = Policy(), parse_policy('receipts = "required"', "policy.toml")


@pytest.fixture
def log(tmp_path):
    """Three lines, of run 7."""
    for number in range(1, 4):
        Log(tmp_path / "audit").append(entry(number))
    return tmp_path / "audit"


def receipt(log, line, key=KEY, **changes):
    """The server's receipt for a line of this log."""
    own = next((e["hash"] for e in verify_log(log).entries if e["line"] == line), "0" * 64)
    return sign_receipt(
        key,
        **{
            "run": "today",
            "run_id": "7",
            "silo": "clinic",
            "line": line,
            "hash": own,
            **changes,
        },
    )


def taken(log, text, policy=OPTIONAL, kind="train", run="7"):
    config = {} if text is None else {ASKED: text}
    sent: Any = SimpleNamespace(
        config=config, kind=kind, run=run, silo="clinic", log=log, data=log
    )
    sent.terms, sent.passage = Terms(policy), Passage()
    if fault := receipt_fault(sent):
        raise PolicyRefusedError(f"clinic refuses: {fault}")
    return sent.passage.receipt or {}


def test_a_receipt_is_kept_once(log, capsys):
    text = receipt(log, 3)
    for _ in range(2):  # a message that is sent again brings it again
        found = taken(log, text, WANTED)
    assert (found["line"], found["key"]) == (3, receipts.read_receipt(text).key) and found[
        "hash"
    ] == verify_log(log).entries[2]["hash"]
    assert receipts.read_kept(log / FILE) == [text] and known_key(log) == found["key"]
    assert (
        (log / FILE).stat().st_mode & 0o777 == (log / KEY_FILE).stat().st_mode & 0o777 == 0o600
    )
    assert capsys.readouterr().err == ""


WRONG = "in run '7'"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda log: None, "the server gives no receipt for the audit log"),
        (lambda log: "", "the server gives no receipt for the audit log"),
        (lambda log: 5, "cannot be used: it is no receipt"),
        (lambda log: "x" * 9999, "cannot be used: it is no receipt"),
        (lambda log: "[" * 3000, "cannot be used: it is no receipt"),
        (
            lambda log: receipt(log, 3).replace("today", "never"),
            "cannot be used: its signature is wrong",
        ),
        (lambda log: receipt(log, 3, silo="north"), f"is for 'north' {WRONG}"),
        (lambda log: receipt(log, 3, run_id="8"), "is for 'clinic' in run '8'"),
        (
            lambda log: receipt(log, 2, hash="1" * 64),
            "line 2 of the audit log, which has another hash here",
        ),
        (lambda log: receipt(log, 9), "line 9 of the audit log, which is not there here"),
    ],
)
def test_a_fault_is_named_and_stops_only_who_wants_receipts(log, capsys, make, reason):
    text = make(log)
    assert reason in taken(log, text)["fault"] and not (log / FILE).exists()
    err = capsys.readouterr().err
    assert (
        err.startswith("WARNING: clinic: the server") and reason in err and err.count("\n") == 1
    )
    with pytest.raises(
        PolicyRefusedError,
        match=r'clinic refuses: its policy has receipts = "required", and the server',
    ):
        taken(log, text, WANTED)


def test_another_key(log, capsys):
    """It is named, kept nowhere, and accepted where somebody here decides so."""
    first, other = receipt(log, 2), receipt(log, 3, OTHER)
    taken(log, first)
    assert "is signed by another key, SHA256:" in taken(log, other)["fault"]
    assert receipts.read_kept(log / FILE) == [first] and "delete" in capsys.readouterr().err
    fails(PolicyRefusedError, "is signed by another key", taken, log, other, WANTED)
    (log / KEY_FILE).unlink()
    assert taken(log, other, WANTED)["line"] == 3


def test_it_is_named_once_in_a_run(log, capsys):
    for run in ("7", "7", "8"):
        assert "fault" in taken(log, None, run=run)
    assert capsys.readouterr().err.count("WARNING") == 2


def test_a_query_has_no_reply_before_it(log, capsys):
    assert taken(log, None, WANTED, "query") == taken(log, "", WANTED, "query") == {}
    assert capsys.readouterr().err == ""


def test_a_torn_receipt_costs_no_other(log):
    """Killed while it wrote: the rest of a line stays without its end, and the next one stands by itself."""
    first, second = receipt(log, 2), receipt(log, 3)
    taken(log, first)
    with (log / FILE).open("a") as file:
        file.write(second[:40])
    assert receipts.read_kept(log / FILE) == [first]
    taken(log, second)
    assert [text for text in receipts.read_kept(log / FILE) if text in (first, second)] == [
        first,
        second,
    ]


# --- what an auditor finds ------------------------------------------------------------------------------------


def anew(log, change):
    """Write the whole log anew, with this in its second line, and all hashes right: somebody who may write here."""
    before, lines = chain.START, []
    for one in verify_log(log).entries:
        fields = {**one, **(change if one["line"] == 2 else {}), "previous": before}
        text, before = chain_line(
            {key: value for key, value in fields.items() if key != "hash"}
        )
        lines.append(text)
    (log / chain.file_name(1, "audit")).write_bytes(b"\n".join(lines) + b"\n")
    head = {"line": len(lines), "hash": before, "settings": {}}
    chain.write_whole(log / "head.json", json.dumps(head))
    assert not verify_log(log).faults  # by itself nothing shows


def outcome(log, capsys, *options):
    code = silofl("audit", log.parent, *options)
    return code, capsys.readouterr().out


def test_a_whole_log_has_what_was_signed(log, capsys):
    for line in (2, 3):
        taken(log, receipt(log, line))
    code, out = outcome(log, capsys)
    assert code == 0 and "ok    2 receipts of the server, up to line 3, by SHA256:" in out


def test_a_receipt_that_comes_while_the_log_is_read_is_no_fault(log, capsys, monkeypatch):
    """A silo that runs writes line 4, and is given its receipt, just when an auditor has read three."""

    def read_then_answered(files):
        yield from [*lines(files)]
        monkeypatch.undo()
        Log(log).append(entry(4))
        taken(log, receipt(log, 4))

    taken(log, receipt(log, 2))
    lines = chain.lines
    monkeypatch.setattr(chain, "lines", read_then_answered)
    code, out = outcome(log, capsys)
    assert code == 0 and "ok    lines 1 to 3 " in out and "1 receipts of the server" in out


@pytest.mark.parametrize("site_has_them", [True, False])
def test_a_log_that_was_written_anew(log, tmp_path, capsys, site_has_them):
    """Found by the site's receipts; and where these were deleted too, by the server's."""
    for line in (1, 3):
        taken(log, receipt(log, line))
    servers = tmp_path / "receipts.jsonl"
    shutil.copy(log / FILE, servers)
    anew(log, {"bytes": 1})
    if not site_has_them:
        (log / FILE).unlink()
        assert outcome(log, capsys)[0] == 0
    code, out = outcome(log, capsys, *([] if site_has_them else ["--receipts", str(servers)]))
    assert (
        code == 2
        and "FAIL  line 3 is not what the server has a receipt for: the log was written anew"
        in out
    )
    assert "line 1 is" not in out  # it is as it was


def test_a_log_that_was_deleted(log, tmp_path, capsys):
    """And goes on from line 1: the server's copy has a line that this one does not have yet."""
    servers = tmp_path / "receipts.jsonl"
    servers.write_text(receipt(log, 3) + "\n")
    shutil.rmtree(log)
    Log(log).append(entry(1))
    assert outcome(log, capsys)[0] == 0
    code, out = outcome(log, capsys, "--receipts", str(servers))
    assert (
        code == 2
        and "FAIL  the server has a receipt for line 3, and the log ends with line 1" in out
    )
    assert silofl("audit", log.parent, "--receipts", tmp_path / "gone") == 2


def test_receipts_of_other_silos_and_by_other_keys(log, tmp_path, capsys):
    taken(log, receipt(log, 2))
    servers = tmp_path / "receipts.jsonl"
    servers.write_text(receipt(log, 3, silo="north", hash="2" * 64) + "\n")
    assert outcome(log, capsys, "--receipts", str(servers))[0] == 0
    servers.write_text(receipt(log, 3, OTHER) + "\nno receipt\n")
    code, out = outcome(log, capsys, "--receipts", str(servers))
    assert code == 2 and "not by the server's key" in out and "it is no receipt" in out


def test_lines_that_are_kept_elsewhere(log, capsys, monkeypatch):
    for line in (1, 3):
        taken(log, receipt(log, line))
    monkeypatch.setattr(chain, "LARGEST", 10)
    Log(log).append(entry(4))
    (log / chain.file_name(1, "audit")).unlink()
    code, out = outcome(log, capsys, "--first", "4")
    assert code == 0 and "receipts" not in out


def test_what_is_signed_is_a_receipt_and_nothing_else():
    """A signature over another kind of text, by the same key, is none."""
    text = json.loads(sign_receipt(KEY, run="r", run_id="1", silo="a", line=1, hash="0" * 64))
    own = json.dumps({**json.loads(text["receipt"]), "kind": "silofl receipt 2"})
    with pytest.raises(SiteError, match="it is no receipt"):
        receipts.read_receipt(json.dumps({**text, "receipt": own}))
    # The same text, signed behind no kind, or behind another one
    for kind in ("", add_prefix(BUNDLE, "")):
        with pytest.raises(SiteError, match="its signature is wrong"):
            receipts.read_receipt(json.dumps({**text, **sign(kind + text["receipt"], KEY)}))
