"""Studies: what a protocol may say, what lies outside it, its limits, its signature, and a hospital's decision."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import weakref
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from failing import fails
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from gates import count_message, described

from client import studies
from client.protocol import policy as site_policy
from client.protocol.envelope import sign_study, signer_of
from client.protocol.methods import DEFAULTS, METHODS
from client.protocol.parsed import SiteError
from client.protocol.policy import Policy, PolicyRefusedError
from client.protocol.run_settings import owner
from client.protocol.study import FREE, allows, parse_study, study_setting_faults
from client.site import counts
from client.site.gate import check_message, pass_gate
from client.site.message import data_sha256, log_folder
from client.site.record import Record
from client.site.release import release_reply
from client.site.rules.study import message_faults
from client.site.runtime.doctor import study_checks
from client.site.study import approvals
from client.site.study.dangers import dangers, is_imprint, of_weights
from client.site.terms import GIVEN, Terms, narrow_policy, read_terms, take_terms, written_terms
from client.site.trust import audit
from partitions.common.errors import DataError, UserError
from partitions.schema import load_schema
from server.cli.main import main

APP = "ab" * 32
TEXT = f"""\
kind = "silofl study 1"
name = "heart"
purpose = "Does it help?"
contact = "A. Person"
results = "The hospitals."
retention = "Models for a year."
start = 2026-01-01
end = 2099-12-31
apps = ["{APP}"]
participants = 3
step = 1.0
metrics = ["loss", "score"]

[settings]
strategy = ["fedavg", "apple"]
learning-rate = {{min = 0.01, max = 0.1}}
batch-size = 32
rounds = [2, 3]

[settings.apple]
mu = 0.2

[limits]
runs = 2
rounds = 3
evaluations = 1
messages = 6
bytes = 1000
days = 2
"""
pytestmark = pytest.mark.usefixtures("identity")
RUN: dict[str, Any] = {
    **DEFAULTS,
    "study": "heart",
    "strategy": "fedavg",
    "batch-size": 32,
    "rounds": 2,
}
ASKED: dict[str, Any] = {"participants": 3, "round": 1}
TODAY = date(2026, 11, 24)


def study(**changes):
    """The study with these lines of its protocol in place of its own."""
    lines = TEXT.splitlines()
    for key, line in changes.items():
        place = next(
            i for i, old in enumerate(lines) if old.startswith(f"{key.replace('_', '-')} = ")
        )
        lines[place] = line
    return parse_study("\n".join(lines), "study.toml")


# ---- The protocol ----------------------------------------------------------------------------------------------------


BAD = {
    "kind": (
        'kind = "silofl bundle 1"',
        "kind = 'silofl bundle 1': must be 'silofl study 1'; `silofl study new`",
    ),
    "step": ("step = 0", "step = 0: must be greater than 0"),
    "name": ('name = "../heart"', r"name = '../heart': must be 1 to 63 lower-case letters"),
    "purpose": ('purpose = " "', "purpose = ' ': must be a text"),
    "contact": ("", "the key contact is missing; `silofl study new`"),
    "end": ("end = 2025-12-31", "end = 2025-12-31: must be a day after start = 2026-01-01"),
    "start": ('start = "2026-01-01"', "start = '2026-01-01': must be a valid date"),
    "apps": ("apps = []", r"apps = \[\]: List should have at least 1 item"),
    "participants": (
        "participants = 0",
        "participants = 0: must be greater than or equal to 1",
    ),
    "metrics": ('metrics = ["f1"]', r"metrics.1 = 'f1': must be one of loss"),
    "learning-rate": (
        "learning-rate = {min = 1, max = 0}",
        "a range is {min = LEAST, max = MOST}",
    ),
    "batch-size": ('batch-size = "all"', "a value like 64 is needed here"),
    "rounds": ("rounds = []", "a list of the values that it may have"),
    "strategy": ('strategy = ["fedavgg"]', "there is no method 'fedavgg'"),
    "mu": ("nu = 0.2", r"'apple.nu': this silofl has no such setting"),
    "runs": ("rins = 2", r"'limits.rins' is no key of it \(did you mean 'runs'\?\)"),
    "bytes": ("bytes = true", "limits.bytes = True: must be a valid integer"),
    "days": ("days = 2\nout = 'x'", "'limits.out' is no key of it"),
}


@pytest.mark.parametrize("key", BAD)
def test_what_is_no_protocol_is_one_line(key):
    line, reason = BAD[key]
    with pytest.raises(SiteError, match=reason) as caught:
        study(**{key: line})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, like", [("dp", "False"), ("model", "'auto'")])
def test_what_a_setting_may_have_is_of_its_kind(name, like):
    """No range of truths or texts, no number in the place of either."""
    for allowed, reason in (("{min = 0, max = 1}", "a range is"), ("1", f"like {like}")):
        fails(SiteError, reason, study, batch_size=f"{name} = {allowed}")


@pytest.mark.parametrize(
    "line",
    [
        "digest = 'ab'",
        "held_out = []",
        "step = nan",
        "participants = true",
        "start = 2026-01-01T00:00:00",
    ],
)
def test_what_no_file_sets(line):
    """A protocol's digest, Python's names of keys, numbers that are none, times of a day."""
    key = line.partition(" ")[0]
    old = next((old for old in TEXT.splitlines() if old.startswith(f"{key} = ")), "step = 1.0")
    with pytest.raises(SiteError, match=rf"^study.toml: .*{key}.*`silofl study new`"):
        parse_study(TEXT.replace(old, line if key in old else f"{old}\n{line}"), "study.toml")
    with pytest.raises(SiteError, match=r"^study.toml: limits = 5: must be keys and values"):
        parse_study("limits = 5\n" + TEXT[: TEXT.index("[limits]")], "study.toml")


def test_no_study_fixes_what_changes_nothing_at_a_hospital():
    assert set(DEFAULTS) >= FREE
    with pytest.raises(SiteError, match="'resume': no study fixes it; leave it out"):
        study(batch_size="resume = true")


def test_values_by_hand():
    assert allows({"min": 1, "max": 2}, 1) and allows({"min": 1, "max": 2}, "1.5")
    assert not allows({"min": 1, "max": 2}, 2.1) and not allows({"min": 1, "max": 2}, "nan")
    assert (
        allows([1, 2], 2)
        and not allows([1, 2], 3)
        and allows("sgd", "sgd")
        and not allows("sgd", "adam")
    )
    assert (
        allows(True, "true")
        and not allows(True, 1)
        and not allows(1, True)
        and not allows(0, False)
    )


# ---- What is outside a study -----------------------------------------------------------------------------------------


def outside(run, kind="train", **more):
    fields = {"sent": ASKED, "app": (APP,), "today": TODAY, **more}
    return message_faults(study(), run, kind, **fields)


def test_what_is_within():
    for run in (
        RUN,
        {**RUN, "strategy": "apple", "apple.mu": 0.2, "learning-rate": 0.01},
        {**RUN, "rounds": "3"},
    ):
        last = {**ASKED, "round": int(run["rounds"]) + 1}
        assert (
            outside(run) == outside(run, "query") == outside(run, "evaluate", sent=last) == []
        )


def test_every_setting_that_may_matter_is_fixed():
    """Red team: each setting alone, moved off what the study says. None gets through but the free ones."""
    run, fixed = {**RUN, "strategy": "apple", "apple.mu": 0.2}, study()
    for key, default in DEFAULTS.items():
        value = run[key]
        changed = (
            not value
            if isinstance(default, bool)
            else value + 7
            if not isinstance(value, str)
            else f"{value}x"
        )
        ignored = owner(key) in METHODS and owner(key) != "apple"  # another method's
        assert bool(study_setting_faults(fixed, {**run, key: changed})) == (
            key not in FREE and not ignored
        ), key


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({"batch-size": 1}, "the study heart has batch-size = 32, the run 1"),
        (
            {"learning-rate": 0.2},
            "the study heart has learning-rate = 0.01 to 0.1, the run 0.2",
        ),
        (
            {"strategy": "ditto"},
            "the study heart has strategy = fedavg or apple, the run 'ditto'",
        ),
        ({"ala": True}, "the study heart has ala = False, the run True"),
        ({"noise": 1}, "the study heart knows no setting 'noise'"),
    ],
)
def test_a_setting_outside(run, reason):
    (fault,) = outside({**RUN, **run})
    assert fault.startswith(reason)


def test_a_listed_setting_may_not_be_left_out():
    run = {key: value for key, value in RUN.items() if key not in ("batch-size", "apple.mu")}
    assert outside(run) == ["the study heart has batch-size = 32, the run none"]
    assert outside({**run, "strategy": "apple", "batch-size": 32}) == [
        "the study heart has apple.mu = 0.2, the run none"
    ]


def test_dates_builds_and_participants():
    assert outside(RUN, today=date(2025, 12, 31)) == ["the study heart starts on 2026-01-01"]
    assert outside(RUN, today=date(2100, 1, 1)) == ["the study heart ended on 2099-12-31"]
    assert outside(RUN, app=("cd" * 32, "ef" * 32)) == [
        "the study heart has 1 app builds, and cdcdcdcdcdcdcdcd... is none of them"
    ]
    assert outside(RUN, app=("cd" * 32, APP)) == [] and outside(RUN, app=()) == []
    assert outside(RUN, sent={**ASKED, "participants": 2}) == [
        "the study heart has participants = 3, the round 2"
    ]
    assert outside(RUN, sent={"round": 1}) and not outside(RUN, "evaluate", sent={"round": 3})


def test_rounds_are_those_of_the_study():
    """Two rounds of training, and after them one evaluation: no other number, and none left away."""
    wrong = "the study heart has rounds = 2 or 3, the round"
    assert (
        outside(RUN, sent={**ASKED, "round": 2})
        == outside(RUN, "evaluate", sent={"round": 3})
        == []
    )
    assert outside(RUN, sent={**ASKED, "round": 3}) == [f"{wrong} 3"]
    assert outside(RUN, sent={**ASKED, "round": 0}) == [f"{wrong} 0"]
    assert (
        outside(RUN, sent={"participants": 3}) == [f"{wrong} None"]
        and outside(RUN, "query", sent={}) == []
    )


def test_the_stricter_holds():
    policy = narrow_policy(
        Policy(metrics=("loss", "accuracy"), min_silos=5),
        study(participants="participants = 4"),
    )
    assert policy.metrics == ("loss",) and policy.min_silos == 5
    assert narrow_policy(Policy(min_silos=2), study()).min_silos == 3


# ---- A hospital decides ----------------------------------------------------------------------------------------------


@pytest.fixture
def silo(tmp_path):
    """The state directory of a silo whose policy wants a study."""
    (tmp_path / "state").mkdir()
    (tmp_path / "policy.toml").write_text('studies = "required"\nmin-silos = 1\n')
    return tmp_path / "state"


def context_of(silo, run=RUN, run_id=1):
    node: dict[str, Any] = {
        "name": "a",
        "data": "a.npz",
        "policy": str(silo.parent / "policy.toml"),
        "state-dir": str(silo),
    }
    return Context(run_id, 1, node, RecordDict(), run)


def message_of(sent, kind="train"):
    return Message(RecordDict({"config": sent}), dst_node_id=1, message_type=kind)


def ask(silo, run=RUN, kind="train", run_id=1, sent=ASKED, record=ConfigRecord, **more):
    """A message to the silo, as the site's own process checks it."""
    context = context_of(silo, run, run_id)
    terms = read_terms(context.node_config, run)
    message = message_of(record(sent), kind)
    check_message(message, context, terms, **{"app": (APP,), **more})
    return terms.study


def refused(reason, silo, *run, **more):
    fails(PolicyRefusedError, reason, ask, silo, *run, **more)


def test_policy_and_study_are_read_once_for_a_message(silo, monkeypatch):
    """The audit line has the rules that allowed the message, whatever the files say a moment later."""
    approvals.record_approval(silo, "a", TEXT, "J. Doe", "", [])
    policy = silo.parent / "policy.toml"
    digest = hashlib.sha256(policy.read_bytes()).hexdigest()
    reads: list[str] = []
    for module, name in ((site_policy, "read_policy"), (approvals, "find")):
        monkeypatch.setattr(module, name, partial(counted, reads, getattr(module, name)))
    context = context_of(silo)
    message = message_of(ConfigRecord(ASKED))

    def answer(terms):
        node = context.node_config
        policy.write_text("peers = true\nmin-silos = 99\n")
        node[GIVEN] = written_terms(terms)
        # As the app's process gets them
        assert take_terms(node) == terms and GIVEN not in node
        return Message(RecordDict(), reply_to=message)

    assert not pass_gate(message, context, APP, answer, lambda: [APP]).has_error()
    (line,) = audit.verify_log(silo / "audit").entries[1:]
    assert reads == ["read_policy", "find"] and line["policy"] == digest
    assert (
        line["rules"]["min-silos"] == 3
        and line["rules"]["peers"] is False
        and line["study"]["name"] == "heart"
    )


def test_a_message_and_its_reply_are_gone_with_their_last_references(silo, no_search):
    approvals.record_approval(silo, "a", TEXT, "J. Doe", "", [])

    def answered():
        message = message_of(ConfigRecord(ASKED))
        reply = Message(RecordDict(), reply_to=message)
        given = pass_gate(message, context_of(silo), APP, lambda terms: reply, lambda: [APP])
        return [weakref.ref(one.content) for one in (message, given)]

    assert not any(content() for content in answered())


def test_a_config_of_another_type_is_refused(silo):
    """Not taken for none: what is asked, counted and logged is the same."""
    approvals.record_approval(silo, "a", TEXT, "J. Doe", "", [])
    refused("a refuses: the message's config is no ConfigRecord", silo, record=MetricRecord)


def counted(calls, function, *args):
    calls.append(function.__name__)
    return function(*args)


def approve(silo, text=TEXT):
    approvals.record_approval(silo, "a", text, "Dr. B", "", ["a warning"])


def test_only_an_approved_study_is_answered(silo):
    refused(
        'a refuses: its policy has studies = "required", and the run names none',
        silo,
        {**RUN, "study": ""},
    )
    refused("a refuses: no study 'heart' is approved here: silofl approve FILE", silo)
    approve(silo)
    found = ask(silo)
    assert found is not None and found.name == "heart"
    refused("no study 'other' is approved here", silo, {**RUN, "study": "other"})
    refused(
        r"no study '../studies/heart' is approved here",
        silo,
        {**RUN, "study": "../studies/heart"},
    )
    refused("the study heart has batch-size = 32, the run 8", silo, {**RUN, "batch-size": 8})
    refused("is none of them", silo, app=("cd" * 32,))
    (silo.parent / "policy.toml").write_text('studies = "optional"\nmin-silos = 1\n')
    assert ask(silo, {**RUN, "study": ""}) is None
    # Named, so it has to be there
    refused("no study 'other' is approved here", silo, {**RUN, "study": "other"})


def test_policy_and_study_both_hold(silo):
    (silo.parent / "policy.toml").write_text('studies = "required"\nmin-batch-size = 64\n')
    approve(silo)
    refused("its policy has min-batch-size = 64, the run batch-size = 32", silo)


def test_a_study_of_own_data_sets_asks_for_their_code(silo):
    approve(silo, f'{TEXT}\n[datasets]\na = "{"0" * 64}"\n')
    refused(r"has in \[datasets\] a = 0{16}\.\.\., and", silo)


def test_limits_hold_over_all_runs(silo):
    """Three trainings in all: two in the first run, one in the second; a third run is one too many."""
    approve(silo)
    assert all(ask(silo, kind=kind) for kind in ("query", "train", "train"))
    assert ask(silo, run_id=2)
    refused(r"limits.rounds = 3, and this is number 4: it is used up here", silo, run_id=2)
    refused(r"limits.runs = 2, and this is number 3", silo, kind="query", run_id=3)
    assert ask(silo, kind="evaluate", run_id=2, sent={"round": 3}) and ask(
        silo, kind="query", run_id=2
    )
    refused(r"limits.messages = 6, and this is number 7", silo, kind="query", run_id=2)
    used = {
        "runs": 2,
        "rounds": 3,
        "evaluations": 1,
        "queries": 2,
        "messages": 6,
        "bytes": 0,
        "days": 1,
    }
    assert counts.count_used_up(silo, study()) == used


def test_days_are_counted(silo):
    days = ["2026-01-01", "2026-01-02", "2026-01-03"]
    for day in days[:2]:
        count_message(Policy(), study(), silo, "1", "a", "query", day)
    with pytest.raises(PolicyRefusedError, match=r"limits.days = 2, and this is number 3"):
        count_message(Policy(), study(), silo, "1", "a", "query", days[2])


def test_a_revoked_study_is_refused_and_approved_again_keeps_its_counts(silo):
    approve(silo)
    assert ask(silo) and ask(silo)
    approvals.record_revocation(silo, "a", "heart", "Dr. B")
    refused("the study heart was revoked here on 20", silo)
    fails(
        SiteError,
        "was revoked before",
        approvals.record_revocation,
        silo,
        "a",
        "heart",
        "Dr. B",
    )
    approve(silo, TEXT.replace("days = 2", "days = 3"))  # another version of it
    assert ask(silo)
    refused(r"limits.rounds = 3, and this is number 4", silo)


def test_another_version_is_no_silent_change(silo):
    approve(silo)
    approve(silo)  # the same once more
    with pytest.raises(
        SiteError,
        match=r"another version of the study heart is approved here since .*: silofl revoke heart",
    ):
        approve(silo, TEXT.replace("rounds = 3", "rounds = 300"))


def test_the_doctor_says_which_are_approved(silo):
    site = SimpleNamespace(policy=str(silo.parent / "policy.toml"), state=silo)
    assert [(c.ok, c.detail) for c in study_checks(site)] == [  # type: ignore[arg-type]
        (True, "none is approved, so no run is answered: silofl approve FILE")
    ]
    approve(silo)
    assert study_checks(site)[0].detail == "approved: heart"  # type: ignore[arg-type]
    (silo / "record.sqlite").unlink()
    assert not study_checks(site)[0].ok  # type: ignore[arg-type]
    (silo.parent / "policy.toml").write_text('studies = "optional"\n')
    assert study_checks(site) == []  # type: ignore[arg-type]


def test_the_decision_is_in_the_audit_log(silo):
    approve(silo)
    approvals.record_revocation(silo, "a", "heart", "Dr. C")
    found = audit.verify_log(silo / "audit")
    assert not found.faults
    told = [
        (e["asked"], e["run"], e["asked-by"], e["study"]["digest"], e["warnings"])
        for e in found.entries
    ]
    assert told == [
        ("study approved", "heart", "Dr. B", study().digest, ["a warning"]),
        ("study revoked", "heart", "Dr. C", "", []),
    ]


def test_nothing_is_approved_where_the_log_cannot_be_written(silo):
    (silo / "audit").write_text("no folder")
    with pytest.raises(OSError):
        approve(silo)
    assert approvals.find(silo, "heart") is None


def test_bytes_count_before_they_leave(silo):
    """Replies of 600 and 300 bytes leave; one of 200 would be 1100 of 1000: an error of one line goes in its place."""

    def reply(size):
        message = message_of(ConfigRecord())
        context = Context(1, 1, {"name": "a", "state-dir": str(silo)}, RecordDict(), {})
        terms = Terms(Policy(), study())
        parsed = described(message, context, terms)
        content = RecordDict({"c": ConfigRecord({"k": "x" * (size - len('{"k": ""}'))})})
        released = release_reply(Message(content, reply_to=message), parsed)
        return released

    sent = [reply(size) for size in (600, 300, 200)]
    assert [one.has_error() for one in sent] == [False, False, True]
    line = (
        "nothing leaves: the study heart has limits.bytes = 1000; 900 have left, and 200 follow"
    )
    assert sent[2].error.reason == line
    entries = audit.verify_log(silo / "audit").entries
    assert [e["bytes"] for e in entries] == [600, 300] and entries[0]["study"][
        "name"
    ] == "heart"
    assert counts.count_used_up(silo, study())["bytes"] == 900


def test_what_left_of_which_data(silo, capsys):
    """Two replies of one data file, one of another version of it; a refusal's bytes are no model."""
    data, node = (
        silo / "a.npz",
        {"name": "a", "data": str(silo / "a.npz"), "state-dir": str(silo)},
    )
    assert data_sha256(node) == ""  # there is none
    sums, record = [], Record(silo)

    def left(entry):
        with record.write() as db:
            record.note_reply(db, entry)

    for content in (b"one", b"one", b"two"):
        if not data.exists() or data.read_bytes() != content:
            data.write_bytes(content)
        sums.append(data_sha256(node))
        assert log_folder(node).stat().st_mode & 0o777 == 0o700
        entry = {
            "time": "2026-01-02T00:00:00Z",
            "silo": "a",
            "asked-by": "s",
            "run-id": "1",
            "run": "r",
            "round": 1,
        }
        entry |= {
            "asked": "train",
            "method": "fedavg",
            "app": APP,
            "settings": "",
            "rule": "",
            "sent": [],
        }
        study = {"name": "heart", "digest": ""} if content == b"one" else {}
        left({**entry, "cohort": sums[-1], "bytes": 10} | ({"study": study} if study else {}))
    refusal = {
        **entry,
        "cohort": sums[-1],
        "bytes": 10,
        "sent": [{"name": "error", "bytes": 10, "sha256": ""}],
    }
    left(refusal)
    assert (
        sums[0] == sums[1] == hashlib.sha256(b"one").hexdigest()
        and sums[2] == hashlib.sha256(b"two").hexdigest()
    )
    found = studies.list_released(silo)
    assert [(one["models"], one["bytes"], one["studies"]) for one in found] == [
        (2, 20, {"heart": 2}),
        (1, 10, {"": 1}),
    ]
    assert main(["studies", "--state-dir", str(silo)]) == 0
    assert (
        f"data {sums[0][:16]}: 2, 20 bytes, 2026-01-02 to 2026-01-02, 1 runs (2 in heart)"
        in capsys.readouterr().out
    )


# ---- The signature ---------------------------------------------------------------------------------------------------


def test_a_signature_is_over_every_byte():
    key = Ed25519PrivateKey.generate()
    text = sign_study(TEXT, key)
    assert (
        signer_of(text).startswith("SHA256:")
        and parse_study(text, "f").digest == study().digest
    )
    # In its place
    assert (
        sign_study(text, Ed25519PrivateKey.generate()) != text and sign_study(text, key) == text
    )
    assert signer_of(TEXT) == ""
    for changed in (
        text.replace("rounds = 3", "rounds = 4"),
        text.replace("Does", "does"),
        "# x\n" + text,
    ):
        with pytest.raises(
            SiteError, match="was changed after it was signed: its signature is wrong"
        ):
            signer_of(changed)
    for damaged in (
        text.replace("public-key", "public"),
        text.replace("MCow", "MCo"),
        text[:-8],
    ):
        with pytest.raises(
            SiteError, match="was changed after it was signed: its signature is damaged"
        ):
            signer_of(damaged)


def test_who_signed_it_decides(silo):
    key = Ed25519PrivateKey.generate()
    fingerprint = signer_of(sign_study(TEXT, key))
    place = studies.silo_at(silo)
    assert place.name == silo.parent.name and place.policy.studies == "required"
    studies.check_signer(fingerprint, place, "")  # of no bundle is a signer known
    (silo.parent / "signed-by").write_text(fingerprint + "\n")
    place = studies.silo_at(silo)
    studies.check_signer(fingerprint, place, "")
    other = signer_of(sign_study(TEXT, Ed25519PrivateKey.generate()))
    fails(DataError, "somebody else made it", studies.check_signer, other, place, "")
    fails(DataError, "this study is not signed", studies.check_signer, "", place, "")
    studies.check_signer("", place, "nobody")


PREPARED = f'participants = 3\nweights = "{APP}"'

# ---- Warnings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "attack"),
    [
        ({"batch_size": "batch-size = 8"}, "gradient inversion"),
        ({"batch_size": "weight-decay = 0.5"}, "forgetting"),
        ({"evaluations": "evaluations = 51"}, "metric oracle"),
        ({"metrics": 'metrics = ["loss", "net_benefit"]'}, "small cells"),
        (
            {"batch_size": "momentum = 0.9", "learning_rate": "learning-rate = 0.001"},
            "momentum subsets",
        ),
        (
            {"batch_size": "warmup-batches = 9", "learning_rate": "learning-rate = 0.001"},
            "momentum subsets",
        ),
        (
            {"batch_size": 'momentum = 0.9\nblock-rates = "fc1=0.01"'},
            "less by block-rates: momentum subsets",
        ),
        ({"step": "step = 0.3"}, "imprint. A model so far from your last one"),
        (
            {"batch_size": 'dp = true\n"dp.noise-multiplier" = 0.1'},
            "imprint. Noise may be so small that a model within step",
        ),
        (
            {"batch_size": "dp = [false, true]"},
            "imprint. Noise may be so small that a model within step",
        ),
        ({"batch_size": 'trainable = "conv1"'}, "training of some layers alone"),
        ({"batch_size": 'init-weights = "w.safetensors"', "participants": PREPARED}, "imprint"),
        ({"batch_size": 'model = "mine.net:make"'}, "imprint"),
    ],
)
def test_a_danger_is_named(changes, attack):
    safe = {"strategy": 'strategy = "fedavg"', "step": "step = 0.25"}
    assert dangers(study(**safe), Policy()) == []
    (line,) = dangers(study(**{**safe, **changes}), Policy())
    assert attack in line and re.search(r"\. Ask for |; ask who |Have its code read", line)


def test_epsilon_bounds_what_step_does_not():
    safe = {"strategy": 'strategy = "fedavg"', "step": "step = 0.25"}
    with_target = study(**safe, batch_size='dp = true\n"dp.target-epsilon" = 3.0')
    assert (
        dangers(study(**safe, batch_size="dp = true"), Policy(epsilon=3.0))
        == dangers(with_target, Policy())
        == []
    )
    told = "With dp = true later ones are not checked"
    assert told in studies.study_page(with_target, "") and told not in studies.study_page(
        study(**safe), ""
    )


def test_dangers_of_people(silo):
    approve(silo)
    one = study(strategy='strategy = "fedavg"', name='name = "second"', step="step = 0.25")
    found = dangers(one, Policy(), approvals.list_approved(silo), samples=150)
    assert ["membership" in found[0], "differencing" in found[1], len(found)] == [True, True, 2]
    assert dangers(one, Policy(), (), samples=200) == []
    assert any(
        "hands your model to the other hospitals" in line for line in dangers(study(), Policy())
    )
    assert any(
        "means per class" in line
        for line in dangers(study(strategy='strategy = "fedproto"'), Policy())
    )


# ---- The commands ----------------------------------------------------------------------------------------------------

WORDS = "--purpose P --contact C --results R --retention T"


def test_from_a_draft_to_its_end(silo, tmp_path, capsys):
    """The commands in their order, as documented; a study that is written, signed, approved, listed, revoked."""
    file, key = tmp_path / "study.toml", tmp_path / "signing.key"
    run = "--strategy fedavg,ditto --rounds 2 --seed 1,2 --set batch-size=32 mlp.hidden=8"
    new = f"study new {file} --name trial --sum {APP} {run}".split()
    assert (
        main(new) == 0
        and "write purpose, contact, results, retention into it" in capsys.readouterr().out
    )
    assert main(["study", "check", str(file)]) == 2
    assert "purpose = '': must be a text" in capsys.readouterr().err
    assert (
        main(new) == 2
        and "is there already: --overwrite replaces it" in capsys.readouterr().err
    )
    assert main([*new, "--overwrite", *WORDS.split()]) == 0
    file.write_text(file.read_text().replace('contact = "C"', 'contact = "..."'))
    assert (
        main(["study", "check", str(file)]) == 2
        and "contact has no words" in capsys.readouterr().err
    )
    assert main([*new, "--overwrite", *WORDS.split()]) == 0
    assert main(["study", "check", str(file)]) == 0 and "not signed" in capsys.readouterr().out
    key.write_bytes(_pem(Ed25519PrivateKey.generate()))
    assert main(["study", "sign", str(file), "--sign-with", str(key)]) == 0
    assert main(["study", "show", str(file)]) == 0
    page = capsys.readouterr().out
    assert (
        "signed by SHA256:" in page
        and "fedavg: the whole model. Can be inferred: class counts" in page
    )
    assert "mlp.hidden = 8" in page and "seed = 1 or 2" in page

    here = ["--state-dir", str(silo)]
    assert main(["approve", str(file), *here]) == 2  # no terminal
    assert "--yes --by NAME approves without a question" in capsys.readouterr().err
    assert (
        main(["approve", str(file), *here, "--yes"]) == 2
        and "--by NAME is missing" in capsys.readouterr().err
    )
    assert (
        main(["studies", *here]) == 0
        and "no study was approved here" in capsys.readouterr().out
    )
    assert main(["approve", str(file), *here, "--yes", "--by", "Dr. B", "--samples", "50"]) == 0
    page = capsys.readouterr().out
    assert "! you have 50 training samples: membership" in page and "Checked against" in page
    found = parse_study(file.read_text(), "f")
    (run_config,) = {
        json.dumps(run, sort_keys=True) for run in studies.corners(found, "ditto")[:1]
    }
    assert ask(silo, {**json.loads(run_config), "seed": 2}) is not None
    assert main(["studies", *here, "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["state"], listed["by"], listed["used"]["rounds"]) == (
        "trial",
        "open",
        "Dr. B",
        1,
    )
    assert listed["limits"]["rounds"] == 8 and listed["limits"]["runs"] == 4
    assert main(["revoke", "trial", *here, "--by", "Dr. B"]) == 0
    assert main(["studies", *here]) == 0 and "trial: revoked" in capsys.readouterr().out
    assert main(["revoke", "trail", *here]) == 2
    assert "no study 'trail' is approved here" in capsys.readouterr().err


def _pem(key):
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def test_somebody_decides_at_a_terminal(silo, tmp_path):
    (file := tmp_path / "study.toml").write_text(TEXT.replace('"fedavg", "apple"', '"fedavg"'))
    said: list[str] = []
    answers = iter(["Dr. B", "no", "Dr. B", "heart"])

    def decide():
        return studies.approve_study(
            file,
            silo,
            by="",
            signed_by="nobody",
            ask=lambda question: next(answers),
            echo=said.append,
        )

    fails(UserError, "heart is not approved: its name was not typed", decide)
    assert approvals.find(silo, "heart") is None
    assert decide().name == "heart" and "NOT SIGNED" in said[0]
    assert "also warns of a cohort that is too small" in said[-1]
    assert approvals.list_approved(silo)[0].by == "Dr. B"


def test_a_study_that_the_policy_refuses_altogether(silo, tmp_path):
    (silo.parent / "policy.toml").write_text("min-batch-size = 64\n")
    with pytest.raises(
        UserError,
        match=r"the study cannot run under .*: its policy has min-batch-size = 64, the run",
    ):
        studies.review(study(strategy='strategy = "fedavg"'), studies.silo_at(silo))
    (silo.parent / "policy.toml").write_text("max-rounds = 2\n")
    near = study(strategy='strategy = "fedavg"', step="step = 0.25")
    (line,) = studies.review(near, studies.silo_at(silo))
    assert (
        line
        == "your policy refuses a part of it: its policy has max-rounds = 2, the run rounds = 3"
    )


def test_a_study_that_waits_or_has_ended(silo):
    today = datetime.now(UTC).date()
    for name, start, end in (("waits", 1, 2), ("ended", -2, -1)):
        dates = {
            "start": f"start = {today + timedelta(start)}",
            "end": f"end = {today + timedelta(end)}",
        }
        text = TEXT.replace('name = "heart"', f'name = "{name}"')
        text = text.replace("start = 2026-01-01", dates["start"]).replace(
            "end = 2099-12-31", dates["end"]
        )
        approve(silo, text)
        refused(
            f"the study {name} {'starts' if start > 0 else 'ended'} on",
            silo,
            {**RUN, "study": name},
        )
    assert [one["state"] for one in studies.overview(silo)] == ["ended", "waits"]


# ---- What was added when the study was attacked again ----------------------------------------------------------------


def test_a_held_out_hospital_is_evaluated_and_not_trained_on(silo):
    text = TEXT.replace("participants = 3", 'held-out = ["a", "north"]\nparticipants = 3')
    approve(silo, text)
    refused("the study heart has held-out = a, and this would train there", silo)
    last = {**ASKED, "round": 3}
    assert message_faults(parse_study(text, "f"), RUN, "evaluate", last, (), TODAY, "a") == []
    assert message_faults(parse_study(text, "f"), RUN, "train", ASKED, (), TODAY, "south") == []
    # What it would have got in the reported round
    chosen = {**ASKED, "round": 1, "newcomer": True}
    assert message_faults(parse_study(text, "f"), RUN, "evaluate", chosen, (), TODAY, "a") == []
    assert (
        message_faults(parse_study(text, "f"), RUN, "evaluate", chosen, (), TODAY, "south")
        != []
    )
    with pytest.raises(SiteError, match=r"held-out = 'a': must be a list"):
        parse_study(text.replace('["a", "north"]', '"a"'), "f")
    assert "Evaluated and not trained on: a, north" in studies.study_page(
        parse_study(text, "f"), ""
    )


def test_queries_are_counted_where_the_study_says_how_many(silo):
    """A study that does not say has as many as messages."""
    assert study().limits.queries == study().limits.messages == 6
    approve(silo, TEXT.replace("messages = 6", "messages = 6\nqueries = 2"))
    assert ask(silo, kind="query") and ask(silo, kind="query")
    refused(r"limits.queries = 2, and this is number 3", silo, kind="query")
    assert ask(silo)


def test_a_run_evaluates_behind_its_last_round(silo):
    """Not before, but where the study lets it stop early."""
    wrong = "the study heart has rounds = 2 or 3, its evaluation is number 3, this one"
    assert outside(RUN, "evaluate", sent={"round": 2}) == [f"{wrong} 2"]
    assert outside(RUN, "evaluate", sent={"round": 4}) == [f"{wrong} 4"]
    assert outside(RUN, "evaluate", sent={}) == [f"{wrong} None"]


def test_a_study_of_given_models_evaluates_in_each_round():
    """Rounds 1 to `rounds`, no training, and no other models than those that the study names."""
    named = f"m={'0' * 64},n={'1' * 64}"
    found = study(
        strategy='strategy = ["fedavg", "evaluate"]',
        mu=f'mu = 0.2\n[settings.evaluate]\nmodels = "{named}"',
    )
    run = {**RUN, "strategy": "evaluate", "evaluate.models": named}

    def faults(kind, this, **changes):
        return message_faults(
            found, {**run, **changes}, kind, {**ASKED, "round": this}, (APP,), TODAY
        )

    assert faults("evaluate", 1) == faults("evaluate", 2) == faults("query", None) == []
    wrong = "the study heart has rounds = 2 or 3, the round"
    for this in (0, 3, None):
        assert (
            faults("evaluate", this)
            == faults("evaluate", this, patience=0)
            == [f"{wrong} {this}"]
        )
    for this in (0, 1, 2, 3):
        (line,) = faults("train", this)
        assert line.endswith(
            "a run with strategy = evaluate trains nothing, and a message asks to train"
        )
    assert (
        "evaluate.models"
        in faults("evaluate", 1, **{"evaluate.models": f"m={'2' * 64},n={'1' * 64}"})[0]
    )
    assert faults("evaluate", 1, strategy="fedavg") and not faults(
        "evaluate", 3, strategy="fedavg"
    )


def imprint(rows=64):
    """One direction in every row, at lengths of its own, as an imprint has it."""
    import numpy as np

    rng = np.random.default_rng(3)
    return np.outer(rng.uniform(0.5, 2, rows), rng.normal(size=12)).astype(np.float32)


def test_a_layer_that_imprints_is_seen_in_the_weights(tmp_path):
    import numpy as np

    assert is_imprint(imprint()[:, :2])
    from safetensors.numpy import save_file

    file, rng = tmp_path / "w.safetensors", np.random.default_rng(4)
    honest = {
        "conv": rng.normal(size=(32, 3, 3, 3)),
        "head": rng.normal(size=(10, 64)),
        "bias": np.ones(64),
    }
    honest |= {"few": np.ones((4, 9)), "zero": np.zeros((20, 20)), "one": np.ones((64, 1))}
    for name, found in (("honest", []), ("fc1", ["fc1"])):
        save_file({**honest, **({"fc1": imprint()} if found else {})}, file)
        lines = of_weights(file, hashlib.sha256(file.read_bytes()).hexdigest())
        assert [line.split("the rows of ")[1].split()[0] for line in lines] == found, name
        assert all("imprint" in line for line in lines)
    with pytest.raises(
        DataError, match=r"w.safetensors has SHA-256 .*, and the study's weights have none"
    ):
        of_weights(file, "")
    file.write_bytes(b"no weights")
    with pytest.raises(DataError, match="is no safetensors file"):
        of_weights(file, hashlib.sha256(b"no weights").hexdigest())


def test_the_networks_of_silofl_are_no_imprint():
    """No layer of a network as it is made is taken for one."""
    from models.networks.registry import build

    for name, shape in (("mlp", (30,)), ("small-cnn", (1, 8, 8)), ("resnet8", (3, 32, 32))):
        for tensor in build(name, shape, 10).state_dict().values():
            assert not is_imprint(tensor.numpy()), name


def reply_of(silo, run, size, cohort):
    entry = {
        "time": f"2026-01-0{run}T00:00:00Z",
        "silo": "a",
        "asked-by": "s",
        "run-id": run,
        "run": "r",
        "round": 1,
    }
    entry |= {
        "asked": "train",
        "method": "fedavg",
        "app": APP,
        "settings": "",
        "rule": "",
        "sent": [],
    }
    record = Record(silo)
    with record.write() as db:
        study = {"name": "heart"}
        record.note_reply(db, {**entry, "cohort": cohort, "bytes": size, "study": study})


def test_what_left_is_remembered_though_the_log_is_moved_away(silo):
    for run, size, cohort in (("1", 10, "x"), ("2", 20, "x"), ("2", 5, "y")):
        reply_of(silo, run, size, cohort)
    shutil.rmtree(silo / "audit")
    first, second = studies.list_released(silo)
    assert (first["cohort"], first["models"], first["bytes"], first["runs"]) == (
        "x",
        2,
        30,
        ["1", "2"],
    )
    assert (second["models"], second["studies"]) == (1, {"heart": 1})


def test_a_draft_with_a_schema_and_a_held_out_hospital(tmp_path):
    schema, file = tmp_path / "schema.json", tmp_path / "study.toml"
    schema.write_text('{"features":["age"],"labels":["well","ill"]}')
    more = f"--schema {schema} --held-out north --strategy fedavg --rounds 2".split()
    assert main([*f"study new {file} --name trial --sum {APP} {WORDS}".split(), *more]) == 0
    found = parse_study(file.read_text(), "f")
    assert (found.schema_digest, found.held_out) == (load_schema(schema).digest, ("north",))
    assert (found.limits.queries, found.limits.messages) == (4, 8)


def test_a_draft_of_secure_sums_names_each_silos_key(tmp_path, capsys):
    """A round has one message more; a check misses the keys that are not there."""
    file, peers = tmp_path / "study.toml", {n: f"SHA256:{ord(n):064}" for n in "abc"}
    new = f"study new {file} --name trial --sum {APP} {WORDS} --overwrite".split()
    new += ["--strategy", "fedavg", "--rounds", "5", "--set", "secure-aggregation=true"]
    assert main(new) == 0 and main(["study", "check", str(file)]) == 2
    assert "[peers] has 0 silos" in capsys.readouterr().err
    assert main([*new, "--peer", "a"]) == 2
    given = [word for n, own in peers.items() for word in ("--peer", f"{n}={own}")]
    assert main([*new, *given]) == 0
    assert main(["study", "check", str(file)]) == 0
    found = parse_study(file.read_text(), "f")
    assert found.peers == peers
    assert (found.limits.queries, found.limits.messages) == (4 + 5 + 12, 21 + (5 + 4) + 2)
    page = studies.study_page(found, "")
    assert "only sums over several" in page and f"  b {peers['b']}" in page
    assert "A key does not show who holds it" in " ".join(page.split())
    assert "under masks" not in studies.study_page(study(), "")
    for name, says in (("a", "secure-peers = 3, and [peers] 2 besides a"), ("d", "name d")):
        place = studies.JoinedSilo(name, tmp_path / "state", Policy())
        assert any(says in line for line in studies.review(found, place))


def test_a_draft_puts_silos_into_groups(tmp_path):
    """In the order of their names, without the held-out one; the study has one size of groups."""
    file = tmp_path / "study.toml"
    new = f"study new {file} --name trial --sum {APP} {WORDS} --overwrite".split()
    new += ["--strategy", "fedavg", "--held-out", "b"]
    new += ["--set", "secure-aggregation=true", "secure-group=2"]
    new += [word for n in "fedcba" for word in ("--peer", f"{n}=SHA256:{ord(n):064}")]
    assert main(new) == 0 and main(["study", "check", str(file)]) == 0
    text = file.read_text()
    for line in ("a, c", "d, e, f"):
        assert f"# In a sum together or not at all: {line}\n" in text
    found = parse_study(text, "f")
    assert found.groups == [["a", "c"], ["d", "e", "f"]]
    assert "all hospitals of a group, or none" in studies.study_page(found, "")
    for other in ("[1, 2]", "{min = 1, max = 2}"):
        with pytest.raises(SiteError, match="secure-group: one value"):
            parse_study(text.replace("secure-group = 2", f"secure-group = {other}"), "f")
    file.write_text(text.replace("secure-group = 2", "secure-group = 6"))
    assert main(["study", "check", str(file)]) == 2
    fours = parse_study(
        text.replace("secure-group = 2", "secure-group = 4").replace("trial", "more"), "f"
    )
    approved = approvals.Approved(found, "me", "2026-11-26", "")
    of_groups = [
        line for line in dangers(fours, Policy(), [approved]) if "secure-group" in line
    ]
    assert "trial, approved here, has other groups of hospitals" in of_groups[0]
    for earlier in (replace(approved, revoked="2026-11-27"), replace(approved, study=fours)):
        lines = dangers(fours.model_copy(update={"name": "x"}), Policy(), [earlier])
        assert not any("secure-group" in line for line in lines)
    place = studies.JoinedSilo("a", tmp_path / "state", Policy(secure_group=3, secure_peers=2))
    fails(UserError, "secure-group = 3, the run secure-group = 2", studies.review, found, place)


def drafted(file, count, *given):
    new = f"study new {file} --name trial --sum {APP} {WORDS} --overwrite".split()
    new += ["--strategy", "fedavg", "--set", "secure-aggregation=true", *given]
    names = [f"h{number:02}" for number in range(count)]
    new += [word for n in names for word in ("--peer", f"{n}=SHA256:{int(n[1:]):064}")]
    assert main(new) == 0
    return file.read_text()


LOST = "If a hospital is missing in one of two rounds, its update follows from their two sums"
LIAR = "One hospital that lies can replace the model"
EACH = "The server reads the sum of each group by itself"


def test_a_draft_has_groups_of_three_from_nine_hospitals_on(tmp_path):
    """Draft, page and approval say in a sentence each what masks leave open."""
    file = tmp_path / "study.toml"
    for count, group, given in ((8, 1, ()), (9, 3, ()), (9, 1, ("secure-group=1",))):
        text = drafted(file, count, *given)
        found = parse_study(text, "f")
        assert found.settings.get("secure-group", 1) == group
        page = " ".join(studies.study_page(found, "").split())
        for shown in (text, page):
            assert (LOST in shown) == (group == 1) and LIAR in shown and EACH not in shown
        assert main(["study", "check", str(file)]) == 0


def test_sums_of_groups_are_agreed_in_the_study(tmp_path, capsys):
    """Three groups of more than secure-peers; a hospital that wants more peers is warned, and answers no message."""
    file, groups = tmp_path / "study.toml", ("secure-robust=groups", "secure-group=5")
    text = drafted(file, 17, *groups)
    found, fives = parse_study(text, "f"), ("h00", "h05")
    assert main(["study", "check", str(file)]) == 0
    page = " ".join(studies.study_page(found, "").split())
    assert EACH in page and EACH in text and LIAR not in page and LOST not in page
    assert [len(found.summed_with(name)) for name in (*fives, "h16")] == [5, 5, 7]
    assert found.summed_with("other") == []
    for peers, warned in ((4, False), (5, True)):
        place = studies.JoinedSilo("h00", tmp_path / "state", Policy(secure_peers=peers))
        lines = studies.review(found, place)
        says = f"secure-peers = {peers}, and the group of silos 4 besides h00: no message"
        assert any(says in line for line in lines) == warned
    few = text.replace("secure-group = 5", "secure-group = 6")
    line = (
        "needs at least 3 groups of at least 3 silos that train (secure-group), here are 2 of 6"
    )
    with pytest.raises(SiteError, match=re.escape(line)):
        parse_study(few, "f")
    file.write_text(few)
    assert main(["study", "check", str(file)]) == 2 and line in capsys.readouterr().err
    with pytest.raises(SiteError, match="secure-robust: one value"):
        parse_study(text.replace('"groups"', '["none", "groups"]'), "f")
    # No run of another study opens sums of groups
    alone = parse_study(drafted(file, 17, "secure-group=5"), "f")
    run = {**studies.corners(alone, "fedavg")[0], "secure-robust": "groups"}
    assert study_setting_faults(alone, run) == [
        "the study trial has secure-robust = none, the run 'groups'"
    ]


def test_the_page_says_whether_noise_is_added():
    """Only where every run of the study has it, with the study's own numbers."""
    without = ("", 'strategy = ["fedavg"]\ndp = [true, false]')
    for line in without:
        page = studies.study_page(study(**({"strategy": line} if line else {})), "")
        assert (
            "Nothing here adds noise to what leaves." in page
            and "Training adds noise" not in page
        )
    page = " ".join(
        studies.study_page(
            study(strategy='strategy = "fedavg"\ndp = true\n"dp.delta" = 0.1'), ""
        ).split()
    )
    assert "Training adds noise here (dp = true; " in page and "dp.clip-norm = 1.0" in page
    assert "Nothing here adds noise" not in page
