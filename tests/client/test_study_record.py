"""What a committee gets of a study at its end: from the audit log alone, as a page and as a signed file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from gates import count_message, described
from study_text import study_text
from taken import silofl
from tiny import json_of

from client.protocol import chain, receipts
from client.protocol.envelope import fingerprint, public_pem
from client.protocol.keys import new_key, private_bytes
from client.protocol.policy import Policy
from client.protocol.study import parse_study
from client.site import release
from client.site.record import Record
from client.site.study import approvals
from client.site.terms import Terms, read_terms
from client.site.trust import audit
from client.study_record import read_export
from partitions.common.errors import DataError
from server.simulation.engine import flower_identity

TEXT = study_text(purpose="Does it help?", contact="A. Person", app="ab" * 32)


@pytest.fixture
def silo(tmp_path):
    """The state of a silo that answered four messages of a study, refused one outside it, and one of no study."""
    state = tmp_path / "site/a/state"
    (state.parent).mkdir(parents=True)
    (state.parent / "policy.toml").write_text("min-silos = 2\n")
    approvals.record_approval(
        state, "a", TEXT, "Dr. B", "", ["batch-size may be 8: gradient inversion"]
    )
    for kind in ("query", "train", "train", "evaluate"):
        answer(state, kind, "heart", withheld={"metrics": ["auc"]} if kind == "train" else {})
    answer(
        state,
        "train",
        "heart",
        error="a refuses: the study heart has batch-size = 32, the run 1",
    )
    answer(state, "train", "")
    return state


def answer(state, kind, study, error="", withheld=None):
    """One message of 20 bytes; an error is a refusal, which belongs to no study."""
    node: dict[str, Any] = {
        "name": "a",
        "policy": str(state.parent / "policy.toml"),
        "state-dir": str(state),
    }
    own = parse_study(TEXT, "f") if study and not error else None
    with flower_identity():
        message = Message(
            RecordDict({"config": ConfigRecord({"round": 1, "run": "first"})}), 1, kind
        )
        context = Context(1, 1, node, RecordDict(), {"strategy": "fedavg", "study": study})
        if own is not None:
            count_message(Policy(), own, str(state), "1", "a", kind, "2026-01-02")
        terms = Terms(read_terms(node, {}).policy, own)
        parsed = described(message, context, terms)
        records = RecordDict(
            {"config": ConfigRecord({"k": "x" * 11}), "site": ConfigRecord(withheld or {})}
        )
        reply = (
            Message(Error(1, error), reply_to=message)
            if error
            else Message(records, reply_to=message)
        )
        release.release_reply(reply, parsed)


def run(capsys, *words):
    code = silofl("audit", *words)
    found = capsys.readouterr()
    return code, found.out, found.err


def test_what_a_committee_reads(silo, capsys):
    code, out, _ = run(capsys, str(silo), "--study", "heart")
    assert code == 0
    for line in (
        "  purpose    Does it help?",
        f"  protocol   SHA-256 {parse_study(TEXT, 'f').digest}",
        "study approved, by Dr. B",
        "    ! batch-size may be 8: gradient inversion",
        "What left: 4 messages, 80 bytes",
        "  first (fedavg; run 1), rounds 1 to 1",
        "    4 x config: k, 80 bytes",
        "  1 x a refuses: the study heart has batch-size = 32, the run 1",
        "  auc (metrics)",
        "  rounds       2 of 9",
        "  bytes        80 of 100,000",
        f"  app        SHA-256 {'ab' * 32}",
        "ok    the audit log is whole, lines 1 to 7",
        "note  no receipt of the server: only this hospital vouches for the log",
    ):
        assert line in out, line
    assert "min-silos = 3" in " ".join(out.split())  # the stricter of policy (2) and study (3)


def test_the_signed_file(silo, tmp_path, capsys):
    key, file = new_key(), tmp_path / "heart.json"
    (tmp_path / "key").write_bytes(private_bytes(key))
    code, out, _ = run(
        capsys,
        str(silo),
        "--study",
        "heart",
        "--export",
        str(file),
        "--sign-with",
        str(tmp_path / "key"),
    )
    own = fingerprint(public_pem(key))
    assert code == 0 and f"signed by {own}" in out and file.stat().st_mode & 0o777 == 0o600
    record, signer = read_export(file)
    assert signer == own and (record["study"], record["messages"], record["bytes"]) == (
        "heart",
        4,
        80,
    )
    assert record["budget"]["messages"] == record["used"]["messages"] == 4
    assert [one["from-line"] for one in record["policies"]] == [2] and record["policies"][0][
        "versions"
    ]["silofl"]
    assert record["log"]["hash"] == audit.verify_log(silo / "audit").entries[-1]["hash"]
    code, out, _ = run(capsys, "--check", str(file))
    assert (
        code == 0
        and "What left: 4 messages, 80 bytes" in out
        and f"ok    signed by {own}" in out
    )


@pytest.mark.parametrize("change", ["record", "signature", "key", "kind", "text"])
def test_a_changed_file_is_refused(silo, tmp_path, capsys, change):
    file = tmp_path / "heart.json"
    (silo.parent / "own.key").write_bytes(private_bytes(new_key()))
    # Its own key
    assert run(capsys, str(silo), "--study", "heart", "--export", str(file))[0] == 0
    content = json_of(file)
    if change == "record":
        content["record"] = content["record"].replace('"messages": 4', '"messages": 3')
    elif change == "signature":
        content["signature"] = content["signature"][:-8] + "AAAAAAA="
    elif change == "key":
        content["public-key"] = public_pem(new_key()).decode()
    elif change == "kind":
        del content["public-key"]
    file.write_text("{" if change == "text" else json.dumps(content))
    with pytest.raises(DataError):
        read_export(file)
    code, out, err = run(capsys, "--check", str(file))
    assert (
        code == 2
        and out == ""
        and err.count("\n") == 1
        and "ask the hospital for the file again" in err
    )


def test_faults_of_the_log_go_with_it(silo, tmp_path, capsys):
    """A line is taken out, and the server's receipt is for a line that is not there: both are in page and file."""
    key, file = ["--sign-with", str(tmp_path / "key")], tmp_path / "heart.json"
    (tmp_path / "key").write_bytes(private_bytes(new_key()))
    log = silo / "audit" / chain.file_name(1, "audit")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:2] + lines[3:]))
    theirs: dict[str, Any] = {
        "run": "first",
        "run_id": "1",
        "silo": "a",
        "line": 99,
        "hash": "0" * 64,
    }
    (tmp_path / receipts.FILE).write_text(
        receipts.sign_receipt(Ed25519PrivateKey.generate(), **theirs) + "\n"
    )
    options = ["--export", str(file), *key, "--receipts", str(tmp_path / receipts.FILE)]
    code, out, _ = run(capsys, str(silo), "--study", "heart", *options)
    assert (
        code == 2
        and "FAIL  the server has a receipt for line 99" in out
        and "line 3 is missing" in out
    )
    assert (
        run(capsys, "--check", str(file))[0] == 2
        and len(read_export(file)[0]["log"]["faults"]) == 1
    )


def test_what_cannot_be_is_one_line(silo, tmp_path, capsys):
    code, out, err = run(capsys, str(silo), "--study", "other")
    assert (code, out) == (2, "") and "has nothing of a study 'other'" in err
    assert (
        "belong to --study NAME" in run(capsys, str(silo), "--export", str(tmp_path / "x"))[2]
    )
    assert (
        "there is no"
        in run(capsys, str(silo), "--study", "heart", "--export", str(tmp_path / "x"))[2]
    )
    assert run(capsys, "--check", str(tmp_path / "gone"))[0] == 2


def test_where_the_studys_file_is_gone(silo, capsys):
    with Record(silo).write() as db:
        db.execute("DELETE FROM approvals")
    code, out, _ = run(capsys, str(silo), "--study", "heart")
    assert (
        code == 0
        and "Limits: the study's file is not here" in out
        and "  messages     4" in out
    )
