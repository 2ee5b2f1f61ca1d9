"""``silofl lineage``: each link of a model's chain is verified, and named where it does not hold."""

from __future__ import annotations

import hashlib
from dataclasses import asdict

import pytest
from audit_lines import entry
from failing import fails
from study_text import study_text

from client.exporting.lineage import lineage_checks, lineage_of
from client.exporting.model_card import Lineage
from client.protocol.study import parse_study
from client.site.trust.audit import Log
from partitions.common.errors import UserError

ABOUT = {"silo": "clinic", "method": "apple"}


@pytest.fixture
def site(tmp_path):
    """A state directory with four replies of a study's run, an evaluation, and a run of another name."""
    data, study = tmp_path / "ours.npz", tmp_path / "study.toml"
    data.write_bytes(b"records")
    study.write_text(study_text(purpose="Who needs a bed?"))
    digest = parse_study(study.read_text(), "study").digest
    of = {
        "cohort": hashlib.sha256(b"records").hexdigest(),
        "study": {"name": "heart", "digest": digest},
    }
    log = Log(tmp_path / "state" / "audit")
    for number in range(1, 5):
        log.append(entry(number, **of))
    log.append(entry(5, asked="evaluate", **of))
    log.append(entry(3, run="another", **of))
    folder = tmp_path / "state" / "today" / "apple-42" / "clinic" / "run-0011223344556677"
    folder.mkdir(parents=True)
    return folder


def known(site, last=3):
    return Lineage.model_validate(lineage_of(site, ABOUT, last)["lineage"])


def checked(lineage, **places):
    ends = {"state": None, "data": None, "study": None, "app": None} | places
    return {check.name: check for check in lineage_checks(lineage, **ends)}


def test_a_card_names_the_last_reply_that_trained_the_model(site):
    """Not a later one, no evaluation, and none of another run."""
    assert (known(site).round, known(site).line, known(site).run) == (3, 3, "today")
    assert known(site, last=9).line == 4
    assert lineage_of(site, {**ABOUT, "silo": "other"}, 3) == {}
    simulated = site.parents[4] / "run" / "a" / "b" / "c" / "d"
    assert lineage_of(simulated, ABOUT, 3) == {}


def test_each_link_is_verified_against_its_other_end(site, tmp_path):
    lineage, state = known(site), site.parents[3]
    ends = {"state": state, "data": tmp_path / "ours.npz", "study": tmp_path / "study.toml"}
    right = checked(lineage, **ends)
    assert [check.ok for check in right.values()] == [True] * 4
    assert "not checked: --app" in right["app"].detail
    assert all(
        "not checked" not in right[name].detail for name in ("audit log", "data", "study")
    )

    (tmp_path / "ours.npz").write_bytes(b"other records")
    (tmp_path / "study.toml").write_text(study_text(purpose="Another question?"))
    wrong = checked(lineage, **ends)
    assert [name for name, check in wrong.items() if not check.ok] == ["data", "study"]
    assert not checked(lineage, data=tmp_path / "missing.npz")["data"].ok
    (tmp_path / "study.toml").write_bytes(b"\xff")
    assert "is not in UTF-8" in checked(lineage, study=tmp_path / "study.toml")["study"].detail


@pytest.mark.parametrize(
    "field", ["data", "app", "settings", "hash", "asked_by", "time", "round"]
)
def test_a_card_that_says_something_else_is_named(site, field):
    """Also where it names another line of the same log."""
    value = 2 if field == "round" else "f" * 64
    other = Lineage.model_validate({**known(site).model_dump(exclude_none=True), field: value})
    assert not checked(other, state=site.parents[3])["audit log"].ok


def test_a_log_that_was_changed_is_named(site):
    lineage, state = known(site), site.parents[3]
    file = next((state / "audit").glob("audit-*.jsonl"))
    file.write_text(file.read_text().replace('"round":2', '"round":7'))
    check = asdict(checked(lineage, state=state)["audit log"])
    assert not check["ok"] and "line 2" in check["detail"]
    fails(UserError, "the audit log is not whole", lineage_of, site, ABOUT, 3)
    assert not checked(lineage, state=state.parent)["audit log"].ok  # a folder without a log
