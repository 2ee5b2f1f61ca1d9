"""The trainer that a run names, at the hospital: whether the policy lists it, and which file it is."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from study_text import study_text

from client.protocol.code import digest_of_code
from client.protocol.parsed import SiteError
from client.protocol.policy import Policy
from client.protocol.study import parse_study
from client.site.message import read_message
from client.site.release import describe_message
from client.site.rules.study import message_faults
from client.site.terms import Terms
from client.site.trust.message_rules import run_faults
from partitions.common.own_code import code_sum, load_function
from server.simulation.engine import flower_identity
from strategies.base.run_settings import defaults

RUN: dict[str, Any] = {**defaults(), "strategy": "fedavg"}
SENT = {"round": 1, "participants": 3}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A trainer's module in a package; neither may be imported here."""
    package = tmp_path / "hospital_code"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('was imported')")
    (package / "loop.py").write_text("raise AssertionError('was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return package / "loop.py"


@pytest.mark.parametrize(
    ("trainers", "name", "allowed"),
    [
        ((), "", True),
        ((), "hospital_code.loop:train", False),
        (("hospital_code.loop",), "hospital_code.loop:train", True),
        (("hospital_code",), "hospital_code.loop:train", False),
        (("app",), "hospital_code.loop:train", False),
        (("app",), "models.loop:train", True),
        (("app",), "app:train", False),  # the word, and no package of this name
        (("all",), "os:system", True),
        (("hospital_code.loop",), "os:system", False),
    ],
)
def test_a_trainer_must_be_listed(trainers, name, allowed):
    faults = run_faults(Policy(trainers=trainers), {**RUN, "trainer": name})
    assert bool(faults) is not allowed
    if faults:
        assert faults[0].startswith("its policy has trainers = [")
        assert faults[0].endswith(f"the run trainer = {name}, which is not among them")


def test_a_digest_needs_no_import(file, tmp_path):
    """It is the one that the app computes of imported code: of a module, or of its whole package."""
    own = digest_of_code("hospital_code.loop:train")
    (tmp_path / "alone.py").write_text("def train(task): ...\n")
    assert len(own) == 64 and digest_of_code("hospital_code.nothing:train") == ""
    assert digest_of_code("nothing.at.all:train") == ""
    (file.parent / "__init__.py").write_text("")
    assert digest_of_code("hospital_code.loop:train") != own
    file.write_text("def train(task): ...\n")
    (tmp_path / "ward").mkdir()  # a package without __init__.py
    (tmp_path / "ward/loop.py").write_text("def train(task): ...\n")
    assert len(digest_of_code("ward.loop:train")) == 64
    for name in ("hospital_code.loop:train", "alone:train", "ward.loop:train"):
        assert digest_of_code(name) == code_sum(load_function("trainer", name, "task"))


def test_the_log_names_the_trainers_file(file):
    run = {**RUN, "trainer": "hospital_code.loop:train"}

    def fields(run):
        with flower_identity():
            asked = Message(RecordDict(), dst_node_id=7, message_type="train")
            context = Context(1, 1, {"state-dir": str(file.parent)}, RecordDict(), run)
            return describe_message(read_message(asked, context, "", Terms(Policy())))

    assert fields(run)["trainer"] == digest_of_code(run["trainer"])
    assert fields(RUN)["trainer"] is None


def test_a_study_fixes_the_file(file):
    name = "hospital_code.loop:train"
    text = study_text(participants=f'3\ntrainer = "{digest_of_code(name)}"')
    text = text.replace("[settings]", f'[settings]\ntrainer = "{name}"')
    study = parse_study(text, "f")
    fields: dict[str, Any] = {"kind": "train", "sent": SENT, "app": (), "today": study.start}
    run = {
        **RUN,
        "trainer": name,
        **{k: v for k, v in study.settings.items() if not isinstance(v, dict | list)},
    }
    assert not message_faults(study, run, **fields)
    file.write_text("print('another loop')")
    (fault,) = message_faults(study, run, **fields)
    assert fault.startswith("the study heart has trainer = ") and "has SHA-256" in fault
    file.unlink()
    (fault,) = message_faults(study, run, **fields)
    assert fault.endswith(f"{name} here is missing")
    with pytest.raises(
        SiteError, match="trainer is missing: the SHA-256 of the trainer's source"
    ):
        parse_study(text.replace('trainer = "' + study.trainer, '# "' + study.trainer), "f")
